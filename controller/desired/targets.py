"""How many replicas each service shall have: the compose files, what operators asked for, the autoscaler. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ..model.spec import ServiceSpec, Spec


def targets_of(
    spec: Spec, overrides: Mapping[str, int], autoscaled: Mapping[str, int] | None = None
) -> Mapping[str, int]:
    """Return how many replicas each service shall have: what `make scale` set, else what the autoscaler decided, else
    the spec's number.

    What is set or decided for services that the spec no longer has is ignored.
    """
    decided = autoscaled or {}
    return {name: overrides.get(name, decided.get(name, service.replicas)) for name, service in spec.services.items()}


def switched_off(
    services: Mapping[str, ServiceSpec], targets: Mapping[str, int], overrides: Mapping[str, int]
) -> frozenset[str]:
    """Return the services that shall have no replica even if requests come: an operator or the files say 0.

    Where the autoscaler decides, 0 lasts until the next request.
    """
    return frozenset(
        name
        for name, service in services.items()
        if targets.get(name) == 0 and (service.autoscale is None or name in overrides)
    )
