"""Spec plus what operators asked for = desired. Pure.

Autoscaling will take its place here: the same function, with the load as one more argument.
"""

from __future__ import annotations

from collections.abc import Mapping

from controller.model import Desired, Spec


def desire(spec: Spec, overrides: Mapping[str, int], routing_hash: str = "") -> Desired:
    """Return how many replicas each service shall have: the override of `make scale` if any, else the spec's number.

    Overrides of services that the spec no longer has are ignored.
    """
    targets = {name: overrides.get(name, service.replicas) for name, service in spec.services.items()}
    return Desired(project=spec.project, services=spec.services, targets=targets, routing_hash=routing_hash)
