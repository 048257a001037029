"""Applications written for Ray Serve, with another import line: their answers are those that Ray Serve gave.

`recorded.json` holds what Ray Serve 2.60 answered. The long tests ask it again, and ask our services in processes of
their own, as containers have them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness.rayserve_apps import answers, applications, own_python, rays_python, recorded

SLOW = {"backpressure", "cancel", "http_backpressure", "unhealthy"}
"""They take seconds, of time that passes."""

IN_ONE_PROCESS = {
    "async_generator_http": "a replica puts the request's id on every response",
    "failed_deployment": "asks for the applications of serve.run, of which it is none",
    "http_backpressure": "HAProxy keeps the line",
    "root_path": "HAProxy answers what no route takes",
    "plain_prefix": "HAProxy answers what no route takes",
    "two_applications": "asks for the applications of serve.run, of which it is none",
}
"""Applications whose answers as services need a stack, and why."""

APPS = applications()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `serve.run` of ours answers."""
    names = [name for name in APPS if name not in SLOW]
    return answers("pierhead", own_python(), names, tmp_path_factory.mktemp("rayserve") / "quick.json")


@pytest.mark.parametrize("name", [name for name in APPS if name not in SLOW])
def test_serve_run_answers_as_ray_serve_did(quick: dict[str, Any], name: str) -> None:
    assert quick[name] == recorded()[name]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return answers("pierhead", own_python(), sorted(SLOW), tmp_path_factory.mktemp("rayserve") / "slow.json")


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(SLOW))
def test_serve_run_answers_as_ray_serve_did_where_time_passes(slow: dict[str, Any], name: str) -> None:
    assert slow[name] == recorded()[name]


@pytest.mark.parametrize("name", ["disconnect", "errors", "fastapi_class", "many_replicas"])
def test_services_in_processes_answer_as_ray_serve_did(name: str, tmp_path: Path) -> None:
    assert answers("services", own_python(), [name], tmp_path / "services.json")[name] == recorded()[name]


@pytest.mark.parametrize("name", ["fastapi_stream", "websocket"])
def test_dev_answers_as_ray_serve_did(name: str, tmp_path: Path) -> None:
    found = answers("dev", own_python(), [name], tmp_path / "dev.json")
    assert found[name]["requests"] == recorded()[name]["requests"]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in APPS if name not in IN_ONE_PROCESS])
def test_every_application_answers_as_services(name: str, tmp_path: Path) -> None:
    assert answers("services", own_python(), [name], tmp_path / "services.json")[name] == recorded()[name]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ray_serve_answers_as_recorded(tmp_path: Path) -> None:
    """With PIERHEAD_RECORD=1 the answers are written down in place of being compared.

    What differs is asked once more: Ray Serve has races of its own (a deployment that is removed while its application
    is deployed again, how requests spread over replicas).
    """
    python = rays_python()
    if python is None:
        pytest.skip("Ray Serve is not installed; `python -m tests.environments.ray_serve` installs it")
    found = answers("ray", python, APPS, tmp_path / "ray.json")
    if os.environ.get("PIERHEAD_RECORD"):
        Path(__file__).with_name("recorded.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    differ = [name for name in APPS if found[name] != recorded()[name]]
    again = answers("ray", python, differ, tmp_path / "again.json") if differ else {}
    assert again == {name: recorded()[name] for name in differ}


def test_there_are_answers_of_every_application_and_of_no_other() -> None:
    assert sorted(recorded()) == APPS
    assert len(APPS) >= 40
