"""Each request counts once, where it is."""

from __future__ import annotations

from controller.desired.autoscale import Load
from controller.desired.loads import loads
from controller.model.world import ContainerState, Held
from tests.unit.controller.worlds import observed, replica, retirement, routing, server, service

WEB = service("web")
MODEL = service("model", route=None, protocol="grpc")


def test_what_replicas_work_on_and_what_waits_for_them() -> None:
    first, second = replica(WEB, 1, ongoing=3, waiting={"model": 4, "other": 1}), replica(WEB, 2, ongoing=5)
    model = replica(MODEL, 1, ongoing=8, waiting={"web": 2})
    servers = routing(server(first, queued=6), server(second, sessions=9), queued={"svc_web": 7, "svc_model": 0})
    world = observed(first, second, model, specs=(WEB, MODEL), routing=servers)
    assert loads(["web", "model"], world) == {
        "web": Load(running=8, waiting=7 + 6 + 2),
        "model": Load(running=8, waiting=4),
    }


def test_an_image_that_reports_nothing_has_what_haproxy_sent_it() -> None:
    silent = replica(WEB, 1, ongoing=None)
    world = observed(silent, specs=(WEB,), routing=routing(server(silent, sessions=5)))
    assert loads(["web"], world) == {"web": Load(running=5)}


def test_draining_replicas_need_no_room_but_their_calls_wait_like_any() -> None:
    leaving = replica(WEB, 1, ongoing=3, waiting={"model": 2})
    world = observed(leaving, specs=(WEB,), retirements=retirement(leaving))
    assert loads(["web", "model"], world) == {"web": Load(), "model": Load(waiting=2)}


def test_what_is_not_up_or_not_there_has_none() -> None:
    gone = replica(WEB, 1, ongoing=3, waiting={"model": 2}, state=ContainerState.EXITED)
    assert loads(["web", "model"], observed(gone, specs=(WEB,), routing=None)) == {"web": Load(), "model": Load()}


def test_what_haproxy_holds_for_a_first_replica_waits() -> None:
    held = routing(queued={"svc_web": 0}, held={"svc_web": Held(now=12, served=100), "svc_model": Held(left=3)})
    assert loads(["web", "model"], observed(specs=(WEB, MODEL), routing=held)) == {
        "web": Load(waiting=12, held=12),
        "model": Load(),
    }
