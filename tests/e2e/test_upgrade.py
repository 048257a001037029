"""A stack that an earlier build started is upgraded under load: which requests fail, and what is remembered."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import Ended, run
from tests.harness.load import Load
from tests.harness.ports import free_ports
from tests.harness.stack import PORTS, ROOT, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(1200)]

EARLIER = "96bcf6a0"
"""Its replicas are reached at ports, its state has no version, its API no backups: a later build differs by less."""
REPLACED_WITHIN_S = 11
"""`up` says so of HAProxy, whose image has changed."""
SERVICES = ("echo", "echo-child")


class Clone:
    """A user's clone, with a stack and ports of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = free_ports(len(PORTS))
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PIERHEAD_")}
        self.environment |= dict(zip(PORTS, map(str, self.ports), strict=True))
        self.environment |= {"COMPOSE_PROJECT_NAME": "pierhead-test-upgrade", "PIERHEAD_TAG": "test-upgrade"}
        self.environment |= {"COMPOSE_FILE": "compose/compose.yaml:compose/apps/echo.yaml", "COMPOSE_PROFILES": ""}

    def has(self, commit: str) -> None:
        self.typed("git", "checkout", "--quiet", "--force", commit)

    def typed(self, *words: str, status: int = 0) -> Ended:
        done = run(words, 600.0, self.directory, self.environment)
        assert done.returncode == status, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def told(self, *words: str) -> Any:
        return json.loads(self.typed("./pierhead", *words, "-o", "json").stdout)

    def services(self) -> dict[str, Any]:
        return {row["name"]: row for row in self.told("status")["services"]}

    def is_at_rest(self) -> bool:
        rows = self.services()
        return all(rows[name]["rollout"] is None and rows[name]["state"] == "HEALTHY" for name in SERVICES)


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Clone]:
    if run(["git", "cat-file", "-e", EARLIER], 10.0, ROOT).returncode:
        pytest.skip(f"this clone's history does not reach back to {EARLIER}")
    made = Clone(tmp_path / "clone")
    assert run(["git", "clone", "--quiet", ROOT, made.directory], 60.0, tmp_path).returncode == 0
    made.has(EARLIER)
    try:
        yield made
    finally:
        made.typed("./pierhead", "down", "--volumes")


def test_a_stack_of_an_earlier_build_is_upgraded_under_load(clone: Clone) -> None:
    clone.typed("make", "up")
    clone.typed("./pierhead", "scale", "echo", "3")
    before = {name: row["version"] for name, row in clone.services().items()}
    url = f"http://127.0.0.1:{clone.ports[0]}/echo?message=hi"
    with Load([url], connections=4, limit_s=600.0, reuse=False, pause_s=0.1) as load:
        clone.has(run(["git", "rev-parse", "HEAD"], 10.0, ROOT).stdout.strip())
        refused = clone.typed("./pierhead", "upgrade", "state.json", status=2)
        assert "/api/v1/backup" in refused.stderr, "a controller without backups changes nothing by this command"
        clone.typed("make", "up")
        eventually(clone.is_at_rest, "the services are of the new build", within_s=180)
    print(load.result)
    assert load.result.kinds() <= {"ConnectionRefusedError"}, load.result.failures
    seconds = {found.second for found in load.result.counts}
    assert not seconds or max(seconds) - min(seconds) <= REPLACED_WITHIN_S

    rows = clone.services()
    assert (rows["echo"]["wanted"], rows["echo"]["ready"]) == (3, 3), "its number is remembered"
    assert "set by scale" in rows["echo"]["message"]
    assert all(rows[name]["version"] != before[name] for name in SERVICES)
    versions = [row["version"] for row in clone.told("revisions", "echo")["revisions"]]
    assert before["echo"] in versions, "the way back is remembered"
    events = request(f"http://127.0.0.1:{clone.ports[2]}/api/v1/events?limit=1000").json["events"]
    assert any(event["kind"] == "scale" for event in events), "events are remembered"

    with Load([url], connections=4, limit_s=300.0, reuse=False, pause_s=0.1) as again:
        clone.typed("./pierhead", "upgrade", "state.json")
        assert "state.json exists" in clone.typed("./pierhead", "upgrade", "state.json", status=2).stderr
    again.assert_no_failure()
    assert (clone.directory / "state.json").stat().st_mode & 0o777 == 0o600
    assert request(url).status == 200
