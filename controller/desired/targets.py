"""The target number of replicas of each service: from the compose files, operators and the autoscaler. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ..model.spec import ServiceSpec, Spec


def targets_of(
    spec: Spec, overrides: Mapping[str, int], autoscaled: Mapping[str, int] | None = None
) -> Mapping[str, int]:
    """Return the target of each service: the number set by `pierhead scale`, else the autoscaler's, else the spec's.

    Numbers for services that the spec no longer has are ignored.
    """
    decided = autoscaled or {}
    return {name: overrides.get(name, decided.get(name, service.replicas)) for name, service in spec.services.items()}


def switched_off(
    services: Mapping[str, ServiceSpec], targets: Mapping[str, int], overrides: Mapping[str, int]
) -> frozenset[str]:
    """Return the services that stay at 0 replicas even if requests arrive: an operator or the files set 0.

    A 0 that the autoscaler decided lasts until the next request.
    """
    return frozenset(
        name
        for name, service in services.items()
        if targets.get(name) == 0 and (service.autoscale is None or name in overrides)
    )
