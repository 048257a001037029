"""The stored record of a version is read back unchanged, also one of an earlier controller."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.desired.revisions import made_as, recorded, written
from controller.files.parse import parse
from controller.model.desired import Revision
from controller.model.spec import ServiceSpec


def spec(**x_serve: object) -> ServiceSpec:
    block = {"route": "/web", **x_serve}
    return parse("p", {"services": {"web": {"image": "web:1", "scale": 0, "x-serve": block}}}).services["web"]


def prometheus() -> dict[str, object]:
    return {"prometheus": {"query": "up", "target": 1}}


@pytest.mark.parametrize(
    "made",
    [
        spec(),
        spec(autoscale={"min": 1, "max": 4}),
        spec(autoscale={"min": 1, "max": 4, "policy": "night:wanted", "policy_kwargs": {"spare": 1}}),
        spec(autoscale={"min": 1, "max": 4, "policy": prometheus()}),
        spec(canary={"weight": 5}, gpu={"fraction": 0.5}, protocol="grpc", route=None),
    ],
)
def test_a_version_is_read_back_as_it_was(made: ServiceSpec) -> None:
    revision = recorded(made, "v1", "sha256:1", 1.0)
    assert written(revision) == made
    back = made_as(replace(made, container={"Image": "other"}), revision)
    assert back is not None
    assert back.container == {**made.container, "Image": "sha256:1"}


@pytest.mark.parametrize("managed", [{}, {"managed": False, "health": {"probe": {"path": "/", "port": 80}}}])
def test_limits_come_back_where_replicas_have_them_from_their_environment(managed: dict[str, object]) -> None:
    """Those of HAProxy alone are as the files say, as is what the service is to be."""
    then = spec(request_timeout_s=300, max_ongoing_requests=10, backpressure={"status_code": 429}, **managed)
    now = spec(request_timeout_s=1, max_ongoing_requests=100, replicas=7, **managed)
    back = made_as(now, recorded(then, "v1", "sha256:1", 1.0))
    assert back is not None
    limits = now if managed else then
    assert back.replicas == 7
    for name in ("request_timeout_s", "max_ongoing_requests", "backpressure"):
        assert getattr(back, name) == getattr(limits, name)
    for name in ("graceful_shutdown_timeout_s", "stop_grace_period_s"):
        assert getattr(back, name) == getattr(limits, name)


@pytest.mark.parametrize("had_socket", [True, False])
def test_replicas_of_a_version_listen_where_they_did(had_socket: bool) -> None:
    """Their containers have the mount for a socket, or none."""
    then, now = (replace(spec(), has_socket=has) for has in (had_socket, not had_socket))
    back = made_as(now, recorded(then, "v1", "sha256:1", 1.0))
    assert back is not None
    assert back.has_socket is had_socket


def test_a_record_that_is_none_is_no_spec() -> None:
    assert written(Revision("web", "v1", 1.0, "web:1", "sha256:1", '{"name": 7}')) is None
