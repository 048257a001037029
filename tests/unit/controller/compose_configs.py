"""Small projects as `docker compose config` prints them, and how the tests read them."""

from __future__ import annotations

from typing import Any

from controller.errors import SpecError
from controller.files.parse import parse
from controller.model.spec import ServiceSpec, Spec
from controller.swarm.files.dialect import DIALECTS

PROJECT = "shop"


def service(x_serve: Any = None, **definition: Any) -> dict[str, Any]:
    """A service that is right, with what is given put over it; a key given as None is left out."""
    whole = {"image": "shop/ranker", "scale": 0, "networks": {"default": None}, **definition}
    return {key: value for key, value in whole.items() if value is not None} | {
        "x-serve": {} if x_serve is None else x_serve
    }


def config(**services: Any) -> dict[str, Any]:
    """A project of these services; a name's "_" stands for "-"."""
    return {
        "name": PROJECT,
        "services": {name.replace("_", "-"): definition for name, definition in services.items()},
        "networks": {"default": {"name": "shop_default"}},
    }


def read(**services: Any) -> Spec:
    """The spec of these services."""
    return parse(PROJECT, config(**services), DIALECTS)


def ranker(x_serve: Any = None, **definition: Any) -> ServiceSpec:
    """The only service of a project."""
    return read(ranker=service(x_serve, **definition)).services["ranker"]


def problems_of(whole: Any, project: str = PROJECT) -> list[str]:
    """The problems that reading tells; empty when there are none."""
    try:
        parse(project, whole, DIALECTS)
    except SpecError as error:
        return list(error.problems)
    return []


def problems(x_serve: Any = None, **definition: Any) -> list[str]:
    """The problems of a project with this one service, "ranker"."""
    return problems_of(config(ranker=service(x_serve, **definition)))
