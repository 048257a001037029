"""Spec plus what operators asked for plus what the autoscaler decided = desired. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from controller.model import Desired, Spec


def desire(
    spec: Spec, overrides: Mapping[str, int], routing_hash: str = "", autoscaled: Mapping[str, int] | None = None
) -> Desired:
    """Return how many replicas each service shall have: what `make scale` set, else what the autoscaler decided, else
    the spec's number.

    What is set or decided for services that the spec no longer has is ignored.
    """
    decided = autoscaled or {}
    targets = {
        name: overrides.get(name, decided.get(name, service.replicas)) for name, service in spec.services.items()
    }
    return Desired(project=spec.project, services=spec.services, targets=targets, routing_hash=routing_hash)
