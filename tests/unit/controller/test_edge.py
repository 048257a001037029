"""Which readiness question HAProxy asks while replicas made with different ones coexist."""

from __future__ import annotations

from dataclasses import replace

from controller.edge import edge_spec
from controller.model import Health, Observed, ProbeSpec
from tests.unit.controller.worlds import replica, retirement, service

OLD = ProbeSpec(port=9100, path="/readyz")
NEW = ProbeSpec(port=81, path="/")
SPEC = service(probe=NEW)


def asked(*containers: object, **changes: object) -> ProbeSpec:
    return edge_spec(SPEC, Observed(containers=containers, **changes)).probe  # type: ignore[arg-type]


def test_a_new_question_waits_for_a_replica_that_answers_it() -> None:
    old = replica(SPEC, 1, probe=(9100, "/readyz"))
    new = replica(SPEC, 2, probe=(81, "/"), health=Health.UNKNOWN)
    assert asked(old, new) == OLD
    assert asked(old, replace(new, health=Health.READY)) == NEW


def test_with_nobody_serving_it_is_the_written_one() -> None:
    assert asked() == NEW
    assert asked(replica(SPEC, 1, probe=(9100, "/readyz"), health=Health.FAILED)) == NEW
    leaving = replica(SPEC, 1, probe=(9100, "/readyz"))
    assert asked(leaving, retirements=retirement(leaving)) == NEW


def test_replicas_that_do_not_say_and_other_services_do_not_count() -> None:
    assert asked(replica(SPEC, 1)) == NEW
    assert asked(replica(service("other"), 1, probe=(9100, "/readyz"))) == NEW


def test_the_port_of_requests_stays_that_whatever_its_number_was() -> None:
    spec = service(port=8081, probe=ProbeSpec(port=8081, path="/"))
    old = replica(spec, 1, port=8080, probe=(8080, "/"))
    assert edge_spec(spec, Observed(containers=(old,))).probe == spec.probe
