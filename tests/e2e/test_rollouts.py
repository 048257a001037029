"""Rollouts on the real stack under load: versions that work, versions that do not, and what clients saw of either.

`-s` prints the figures.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.load import Load
from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

FAULTY = (Path(__file__).parent / "apps" / "faulty.yaml").read_text()
CONNECTIONS = 8


@pytest.fixture
def faulty(written: WrittenStack) -> WrittenStack:
    """One service that does what its environment says."""
    written.become(FAULTY, faulty=2)
    eventually(lambda: row(written)["stable"], "the first version counts as proved")
    eventually(lambda: written.get("/faulty").body == b"v0", "it answers")
    return written


def row(stack: Stack) -> Any:
    return stack.service("faulty")


def version(name: str, *, rollout: str = "{bake_s: 1}", startup_s: int = 60, **environment: str) -> str:
    """Another version of the service."""
    variables = "".join(f"\n      {key}: {value!r}" for key, value in {"NAME": name, **environment}.items())
    text = FAULTY.replace("\n      NAME: v0", variables).replace("rollout: {bake_s: 1}", f"rollout: {rollout}")
    return text.replace("deadline_s: 60", f"deadline_s: {startup_s}")


def began(stack: Stack, offered: str) -> bool:
    """Whether the files give another version than that one, and it was taken up."""
    now = row(stack)
    taken_up = now["rollout"] or now["rejected"] or now["stable"] == now["offered"]
    return bool(taken_up and now["offered"] not in (None, offered))


def answers(stack: Stack, name: str) -> bool:
    return stack.get("/faulty").body == name.encode()


def ended(stack: Stack) -> bool:
    now = row(stack)
    return now["rollout"] is None and now["converged"]


BREAKS = [{}, {}, {"BREAK": "crash"}, {}, {}, {"BREAK": "unready"}]
"""What is wrong with one version after the other."""


@pytest.mark.parametrize(
    "breaks", [pytest.param(BREAKS[1:3], id="two"), pytest.param(BREAKS * 2, id="twelve", marks=pytest.mark.long)]
)
def test_a_row_of_rollouts_some_of_them_bad(faulty: WrittenStack, breaks: list[dict[str, str]]) -> None:
    worker, done = faulty.haproxy_worker(), set[str]()
    with Load([faulty.url("/faulty")], connections=CONNECTIONS, limit_s=600) as load:
        for number, broken in enumerate(breaks, 1):
            before, offered = row(faulty)["stable"], row(faulty)["offered"]
            faulty.write(version(f"v{number}", startup_s=4 if broken else 60, **broken))
            eventually(partial(began, faulty, offered), "the new version is seen")
            eventually(lambda: ended(faulty), "the rollout is over", within_s=120)
            now = row(faulty)
            if broken:
                assert (now["stable"], now["state"]) == (before, "DEPLOY_FAILED"), now["message"]
                assert now["rejected"]["reason"]
            else:
                assert now["stable"] == now["offered"] != before
                assert now["state"] == "HEALTHY"
                eventually(partial(answers, faulty, f"v{number}"), "it is the new one")
            done |= set(faulty.messages("rolled_out"))  # each time: twelve rollouts have more events than are kept
    print(f"\n{load.result}")
    load.assert_no_failure()
    assert faulty.haproxy_worker() == worker, "not one reload"
    assert len(done) == breaks.count({})


@pytest.mark.long
def test_a_version_with_more_errors_is_rolled_back(faulty: WrittenStack) -> None:
    before = row(faulty)["stable"]
    with Load([faulty.url("/faulty")], connections=CONNECTIONS) as load:
        faulty.write(version("v1", rollout="{bake_s: 60}", FAULTS="0.2"))
        eventually(lambda: faulty.messages("rollback"), "it is rolled back", within_s=120)
        eventually(lambda: ended(faulty), "the former version serves again", within_s=60)
    said = faulty.messages("rollback")[0]
    print(f"\n{said}\n{load.result}")
    found = re.search(r"it fails (\d+) of (\d+) requests .* the former version (\d+) of (\d+) requests", said)
    assert found, said
    assert int(found[3]) == 0
    assert row(faulty)["stable"] == before
    assert load.result.kinds() == {"500"}, "its own errors, and nothing else"
    assert answers(faulty, "v0")


def phase(stack: Stack) -> str:
    return str((row(stack)["rollout"] or {}).get("phase", ""))


@pytest.mark.long
def test_a_canary_gets_its_share_and_people_decide(faulty: WrittenStack) -> None:
    first = row(faulty)["stable"]
    faulty.write(version("v1", rollout="{bake_s: 3600}\n      canary: {weight: 10}"))
    eventually(lambda: phase(faulty) == "BAKING", "the canary serves")
    eventually(lambda: len(faulty.messages("set_server_weight")) == 2, "the two old ones have their share")
    seen = Counter(faulty.get("/faulty").body for _ in range(300))
    assert 10 <= seen[b"v1"] <= 60, f"a tenth of 300: {seen}"
    assert faulty.api("/api/v1/services/faulty/abort", "POST", {}).status == 202
    eventually(lambda: ended(faulty), "it is gone")
    assert row(faulty)["stable"] == first
    assert faulty.api("/api/v1/deploy", "POST", {"services": ["faulty"]}).status == 202
    eventually(lambda: phase(faulty) == "BAKING", "it is tried again")
    assert faulty.api("/api/v1/services/faulty/promote", "POST", {}).status == 202
    eventually(lambda: phase(faulty) == "SETTLING", "the rest followed")
    assert Counter(faulty.get("/faulty").body for _ in range(20)) == {b"v1": 20}
    faulty.write(version("v1"))
    eventually(lambda: ended(faulty), "it is done")
    second = row(faulty)["stable"]
    listed = faulty.api("/api/v1/services/faulty/revisions").json["revisions"]
    assert {(one["version"], one["stable"]) for one in listed} == {(first, False), (second, True)}
    with Load([faulty.url("/faulty")], connections=CONNECTIONS) as load:
        assert faulty.api("/api/v1/services/faulty/rollback", "POST", {}).status == 202
        eventually(lambda: row(faulty)["stable"] == first and ended(faulty), "the earlier version is back")
    load.assert_no_failure()
    assert answers(faulty, "v0")
