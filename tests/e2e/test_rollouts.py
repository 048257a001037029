"""Rollouts on the real stack under load: versions that work, versions that do not, and what clients saw of either.

PIERHEAD_TEST_ROLLOUTS=24 makes the long row of rollouts; `-s` prints the figures.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.load import Load
from tests.harness.stack import ROOT, Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

APP = Path(__file__).parent / "apps" / "faulty.yaml"
ROLLOUTS = int(os.environ.get("PIERHEAD_TEST_ROLLOUTS", "6"))
CONNECTIONS = 8


@pytest.fixture
def edited() -> Iterator[tuple[Stack, Path]]:
    """A stack with one service whose file may be edited."""
    app = ROOT / ".state" / "faulty.yaml"
    app.parent.mkdir(exist_ok=True)
    shutil.copy(APP, app)
    try:
        with Stack("pierhead-test-rollout", [".state/faulty.yaml"]).running() as stack:
            stack.wait_settled(faulty=2)
            eventually(lambda: row(stack)["stable"], "the first version counts as proved")
            eventually(lambda: stack.get("/faulty").body == b"v0", "it answers")
            yield stack, app
    finally:
        app.unlink()


def row(stack: Stack) -> Any:
    return stack.service("faulty")


def edit(app: Path, name: str, *, rollout: str = "{bake_s: 1}", startup_s: int = 60, **environment: str) -> None:
    """Write another version of the service."""
    variables = "".join(f"\n      {key}: {value!r}" for key, value in {"NAME": name, **environment}.items())
    text = APP.read_text().replace("\n      NAME: v0", variables).replace("rollout: {bake_s: 1}", f"rollout: {rollout}")
    app.write_text(text.replace("deadline_s: 60", f"deadline_s: {startup_s}"))


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


def messages(stack: Stack, kind: str) -> list[str]:
    return [event["message"] for event in stack.events() if event["kind"] == kind]


def test_a_row_of_rollouts_every_third_one_bad(edited: tuple[Stack, Path]) -> None:
    stack, app = edited
    worker = stack.haproxy_worker()
    bad, times, rejected = 0, [], []
    with Load([stack.url("/faulty")], connections=CONNECTIONS, limit_s=60.0 * ROLLOUTS) as load:
        for number in range(1, ROLLOUTS + 1):
            before, offered = row(stack)["stable"], row(stack)["offered"]
            broken: dict[str, str] = {}
            if number % 3 == 0:
                bad += 1
                broken = {"BREAK": "crash" if bad % 2 else "unready"}
            begun = time.monotonic()
            edit(app, f"v{number}", startup_s=4 if broken else 60, **broken)
            eventually(partial(began, stack, offered), "the new version is seen")
            eventually(lambda: ended(stack), "the rollout is over", within_s=120)
            times.append(time.monotonic() - begun)
            now = row(stack)
            if broken:
                assert (now["stable"], now["state"]) == (before, "DEPLOY_FAILED"), now["message"]
                rejected.append(now["rejected"]["reason"])
            else:
                assert now["stable"] == now["offered"] != before
                assert now["state"] == "HEALTHY"
                eventually(partial(answers, stack, f"v{number}"), "it is the new one")
    print(f"\n{ROLLOUTS} rollouts, {bad} of them bad: {load.result}")
    print("seconds each: " + ", ".join(f"{seconds:.1f}" for seconds in times))
    print("\n".join(rejected))
    load.assert_no_failure()
    assert len(rejected) == bad
    assert stack.haproxy_worker() == worker, "not one reload"
    assert len(messages(stack, "rolled_out")) == ROLLOUTS - bad


def test_a_version_with_more_errors_is_rolled_back(edited: tuple[Stack, Path]) -> None:
    stack, app = edited
    before = row(stack)["stable"]
    with Load([stack.url("/faulty")], connections=CONNECTIONS) as load:
        edit(app, "v1", rollout="{bake_s: 60}", FAULTS="0.2")
        eventually(lambda: messages(stack, "rollback"), "it is rolled back", within_s=120)
        eventually(lambda: ended(stack), "the former version serves again", within_s=60)
    said = messages(stack, "rollback")[0]
    print(f"\n{said}\n{load.result}")
    found = re.search(r"it fails (\d+) of (\d+) requests .* the former version (\d+) of (\d+) requests", said)
    assert found, said
    assert int(found[3]) == 0
    assert row(stack)["stable"] == before
    assert load.result.kinds() == {"500"}, "its own errors, and nothing else"
    assert stack.get("/faulty").body == b"v0"


def test_a_canary_gets_its_share_and_people_decide(edited: tuple[Stack, Path]) -> None:
    stack, app = edited
    first = row(stack)["stable"]
    edit(app, "v1", rollout="{bake_s: 3600}\n      canary: {weight: 10}")
    eventually(lambda: (row(stack)["rollout"] or {}).get("phase") == "BAKING", "the canary serves", within_s=60)
    eventually(lambda: len(messages(stack, "set_server_weight")) == 2, "the two old ones have their share")
    seen = Counter(stack.get("/faulty").body for _ in range(300))
    assert 10 <= seen[b"v1"] <= 60, f"a tenth of 300: {seen}"
    assert stack.api("/api/v1/services/faulty/abort", "POST", {}).status == 202
    eventually(lambda: ended(stack), "it is gone", within_s=60)
    assert row(stack)["stable"] == first
    assert stack.api("/api/v1/deploy", "POST", {"services": ["faulty"]}).status == 202
    eventually(lambda: (row(stack)["rollout"] or {}).get("phase") == "BAKING", "it is tried again", within_s=60)
    assert stack.api("/api/v1/services/faulty/promote", "POST", {}).status == 202
    eventually(lambda: (row(stack)["rollout"] or {}).get("phase") == "SETTLING", "the rest followed", within_s=60)
    assert Counter(stack.get("/faulty").body for _ in range(20)) == {b"v1": 20}
    edit(app, "v1", rollout="{bake_s: 1}")
    eventually(lambda: ended(stack), "it is done", within_s=60)
    second = row(stack)["stable"]
    listed = stack.api("/api/v1/services/faulty/revisions").json["revisions"]
    assert {(one["version"], one["stable"]) for one in listed} == {(first, False), (second, True)}
    with Load([stack.url("/faulty")], connections=CONNECTIONS) as load:
        assert stack.api("/api/v1/services/faulty/rollback", "POST", {}).status == 202
        eventually(lambda: row(stack)["stable"] == first and ended(stack), "the earlier version is back", within_s=60)
    load.assert_no_failure()
    assert stack.get("/faulty").body == b"v0"
