"""The probe and the limits of HAProxy while replicas made with different ones coexist."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from controller.desired.edge import edge_spec
from controller.model.actions import WriteRouting
from controller.model.observed import Observed
from controller.model.spec import ProbeSpec, RolloutSpec, ServiceSpec, backend_name
from controller.model.world import ReplicaContainer, ReplicaHealth, RoutingState, ServerState, SleepReport
from controller.observe.snapshot import second_opinion
from controller.routing.base import RoutingAction
from tests.fakes.fake_router import FakeRouter
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import replica, retirement, routing, server, service

OLD = ProbeSpec(port=9100, path="/readyz")
NEW = ProbeSpec(port=81, path="/")
SPEC = service(probe=NEW)


def asked(*containers: object, **changes: object) -> ProbeSpec:
    return edge_spec(SPEC, Observed(containers=containers, **changes), {}).probe  # type: ignore[arg-type]


def test_haproxy_uses_the_probe_that_all_serving_replicas_answer() -> None:
    old, new = replica(SPEC, 1, probe=(9100, "/readyz")), replica(SPEC, 2, probe=(81, "/"))
    assert asked(old, replace(new, health=ReplicaHealth.UNKNOWN)) == OLD
    assert asked(new) == NEW
    assert not asked(old, new).haproxy_asks
    assert asked(old, new, retirements=retirement(old)) == NEW
    assert asked(old, new, retirements=retirement(new)) == OLD
    assert asked(new, replace(new, name="as the files say", probe=None)) == NEW
    # Replicas that do not serve, do not say their probe, or are of another service do not count.
    assert asked(replace(old, health=ReplicaHealth.FAILED)) == NEW
    assert asked(old, retirements=retirement(old)) == NEW
    assert asked(replica(SPEC, 1)) == NEW
    assert asked(replica(service("other"), 1, probe=(9100, "/readyz"))) == NEW
    # A probe on the port of requests stays there, whatever its number was.
    spec = service(port=8081, probe=ProbeSpec(port=8081, path="/"))
    moved = replica(spec, 1, port=8080, probe=(8080, "/"))
    assert edge_spec(spec, Observed(containers=(moved,)), {}).probe == spec.probe


@pytest.mark.parametrize(
    ("said", "is_asked", "health"),
    [
        ({}, True, ReplicaHealth.READY),
        ({}, False, ReplicaHealth.FAILED),
        ({"ip": None, "has_socket": True}, True, ReplicaHealth.FAILED),
        ({"broken": True}, True, ReplicaHealth.FAILED),
        ({"sleep": SleepReport(True, False, True, "no memory")}, True, ReplicaHealth.FAILED),
    ],
    ids=[
        "HAProxy's check passes",
        "HAProxy asks nothing",
        "no network",
        "it has given itself up",
        "it does not wake up",
    ],
)
def test_when_haproxys_check_counts_as_a_second_opinion(
    said: dict[str, Any], is_asked: bool, health: ReplicaHealth
) -> None:
    silent = replica(SPEC, 1, health=ReplicaHealth.FAILED, **said)
    assert second_opinion(silent, routing(server(silent, is_asked=is_asked))).health is health


def test_haproxy_uses_the_limits_that_every_serving_replica_can_keep() -> None:
    old, new = replica(SPEC, 1, version="v1"), replica(SPEC, 2, version="v2")
    then = replace(SPEC, max_ongoing_requests=10, request_timeout_s=300.0)
    now = replace(SPEC, max_ongoing_requests=100, request_timeout_s=1.0)

    def limits(*containers: ReplicaContainer, **changes: object) -> tuple[int, float]:
        world = Observed(containers=containers, **changes)  # type: ignore[arg-type]
        found = edge_spec(now, world, {"v1": then, "v2": now})
        return found.max_ongoing_requests, found.request_timeout_s

    assert limits() == (100, 1.0)
    assert limits(old) == limits(old, replace(new, health=ReplicaHealth.UNKNOWN)) == (10, 300.0)
    assert limits(old, new) == (10, 300.0)
    assert limits(old, new, retirements=retirement(old)) == (100, 1.0)
    assert limits(replace(old, version="without a record")) == (100, 1.0)


# ---------------------------------------------------------------------------------------- by the whole controller


@dataclass
class AskingRouter(FakeRouter):
    """HAProxy that probes: every server of a backend gets the probe of the running configuration."""

    control: Control = field(init=False)
    asked: dict[str, ProbeSpec] = field(default_factory=dict)

    def routing_hash(self, services: Collection[ServiceSpec]) -> str:
        asked = sorted(f"{one.name} {one.route} {self._question(one.probe)}" for one in services)
        return hashlib.sha256(repr(asked).encode()).hexdigest()[:8]

    async def perform(self, action: RoutingAction) -> None:
        await super().perform(action)
        if isinstance(action, WriteRouting):
            self.asked = {backend_name(one.name): one.probe for one in action.services}

    async def observe(self) -> RoutingState:
        for key, one in list(self.servers.items()):
            asked = self._question(self.asked[one.backend])
            found = [c for c in self.control.engine.containers.values() if c.name == one.name]
            well = [c for c in found if asked in (None, c.probe) and self.control.engine.readiness(c.name) == "ready"]
            self.servers[key] = replace(one, up=bool(well), is_asked=asked is not None)
        return await super().observe()

    def taking(self) -> int:
        """How many servers get traffic."""
        return sum(one.up and one.state is ServerState.READY for one in self.servers.values())

    @staticmethod
    def _question(probe: ProbeSpec) -> tuple[int, str] | None:
        return (probe.port, probe.path) if probe.haproxy_asks else None


@pytest.mark.parametrize(
    "another",
    [{"probe": ProbeSpec(port=8080, path="/ready")}, {"probe": ProbeSpec(port=9100, path="/readyz"), "managed": True}],
    ids=["path", "runtime"],
)
@pytest.mark.virtual_time
async def test_all_replicas_serve_while_another_probe_is_rolled_out(tmp_path: Path, another: dict[str, object]) -> None:
    rollout = RolloutSpec(bake_s=0.2)
    old = service("web", replicas=4, managed=False, probe=ProbeSpec(port=8080, path="/health"), rollout=rollout)
    new = replace(old, definition_hash="d2", **another)  # type: ignore[arg-type]
    control = Control.of(tmp_path, old)
    control.router = router = AskingRouter()
    router.control = control
    least = 4

    def is_done() -> bool:
        nonlocal least
        least = min(least, router.taking())
        state = control.controller.deployer.state("web")
        return state.rollout is None and state.stable == control.controller.deployer.wanted("web") != first

    async with control.running(web=4) as controller:
        await until(lambda: router.taking() == 4 and controller.deployer.state("web").stable)
        first = controller.deployer.state("web").stable
        control.source.edit(new)
        await until(is_done, within_s=20.0)
        assert least == 4
        await control.settled("web", 4)
        await until(lambda: router.asked["svc_web"] == new.probe)
