"""The target number of replicas of each service: from the compose files, operators and the autoscaler. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..model.desired import Desired
from ..model.spec import ServiceSpec, Spec


def targets_of(
    spec: Spec, overrides: Mapping[str, int], autoscaled: Mapping[str, int] | None = None
) -> Mapping[str, int]:
    """Return the target of each service: the number set by `pierhead scale`, else the autoscaler's, else the spec's.

    Numbers for services that the spec no longer has are ignored.
    """
    decided = autoscaled or {}
    return {name: overrides.get(name, decided.get(name, service.replicas)) for name, service in spec.services.items()}


def together(
    services: Mapping[str, ServiceSpec], targets: Mapping[str, int], yielding: Collection[str]
) -> Mapping[str, int]:
    """Return the targets in which each service of a group that gives way together has a replica while one of them has.

    `yielding`: the services that give way.
    """
    groups = {name: services[name].yields for name in yielding if name in services}
    wanted = {rule.group for name, rule in groups.items() if rule and rule.group and targets[name]}
    raised = {name: max(targets[name], 1) for name, rule in groups.items() if rule and rule.group in wanted}
    return {**targets, **raised}


def rehearsed(desired: Desired, wanted: Mapping[str, int]) -> Desired:
    """Return the desired state that there would be if an operator had set these numbers of replicas."""
    demands = {name: demand for name, demand in desired.demands.items() if name not in wanted}
    targets = together(desired.services, {**desired.targets, **wanted}, demands)
    off = (desired.switched_off - wanted.keys()) | switched_off(desired.services, targets, wanted) & wanted.keys()
    return replace(desired, targets=targets, demands=demands, switched_off=off)


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
