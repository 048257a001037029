"""Each request counts once, where it is."""

from __future__ import annotations

from controller.desired.autoscale import ServiceLoad
from controller.desired.loads import loads
from controller.model.world import ContainerState, HeldRequests
from tests.unit.controller.worlds import observed, replica, retirement, routing, server, service

WEB = service("web")
MODEL = service("model", route=None, protocol="grpc")


def test_running_and_waiting_requests_of_each_service() -> None:
    first, second = replica(WEB, 1, ongoing=3, waiting={"model": 4, "other": 1}), replica(WEB, 2, ongoing=5)
    model = replica(MODEL, 1, ongoing=8, waiting={"web": 2})
    held = {"svc_web": HeldRequests(now=12, served=100), "svc_model": HeldRequests(left=3)}
    queued = {"svc_web": 7, "svc_model": 0}
    servers = routing(server(first, queued=6), server(second, sessions=9), queued=queued, held=held)
    world = observed(first, second, model, specs=(WEB, MODEL), routing=servers)
    assert loads(["web", "model"], world) == {
        "web": ServiceLoad(running=8, waiting=7 + 6 + 2 + 12, held=12),
        "model": ServiceLoad(running=8, waiting=4),
    }


def test_an_image_that_reports_nothing_has_what_haproxy_sent_it() -> None:
    silent = replica(WEB, 1, ongoing=None)
    world = observed(silent, specs=(WEB,), routing=routing(server(silent, sessions=5)))
    assert loads(["web"], world) == {"web": ServiceLoad(running=5)}


def test_of_a_draining_replica_only_its_waiting_calls_count_and_of_an_ended_one_nothing() -> None:
    leaving = replica(WEB, 1, ongoing=3, waiting={"model": 2})
    world = observed(leaving, specs=(WEB,), retirements=retirement(leaving))
    assert loads(["web", "model"], world) == {"web": ServiceLoad(), "model": ServiceLoad(waiting=2)}
    ended = replica(WEB, 1, ongoing=3, waiting={"model": 2}, state=ContainerState.EXITED)
    assert loads(["web", "model"], observed(ended, specs=(WEB,), routing=None)) == {
        "web": ServiceLoad(),
        "model": ServiceLoad(),
    }
