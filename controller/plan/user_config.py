"""Compares each replica's user_config with the wanted one, and plans to send it where they differ. Pure.

With each response of /readyz a replica reports the user_config it received last and the one in force, by their digests.
If the last one is not the wanted one, the wanted one is sent (`GiveUserConfig`), so a change continues where an earlier
controller left it. A replica that refuses a user_config reports why, keeps the former one, and tries again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..model.actions import GiveUserConfig
from ..model.desired import VersionGoal
from ..model.phases import Phase, is_ready, phase_of
from ..model.reports import UserConfigStatus
from ..model.spec import NO_USER_CONFIG, ServiceSpec, digest
from ..model.world import ReplicaContainer, Retirement, probe_address
from .draft import Draft
from .outlook import ServiceOutlook

LONGEST = 60
MOST_KNOWN = 1000
NOT_TAKEN = "the runtime in its image is older than user_config; build the image again"
MOST_CHANGES = 20


def wanted_in(container: ReplicaContainer, spec: ServiceSpec, goal: VersionGoal) -> str | None:
    """The user_config (its text) that a replica is to have. None: it keeps its own, because its version is being
    replaced and may not understand the user_config that the files have for the next one.
    """
    if goal.version is None or container.version == goal.version:
        return (goal.spec or spec).user_config
    if container.version == goal.keep and goal.keep_spec is not None:
        return goal.keep_spec.user_config
    return None


def is_due(container: ReplicaContainer, text: str | None) -> bool:
    """Whether that user_config has to be sent to a replica."""
    return text is not None and container.user_config is not None and container.user_config.wanted != digest(text)


def remembered(texts: Mapping[str, str], specs: Iterable[ServiceSpec | None]) -> Mapping[str, str]:
    """The user_configs seen so far, by digest, and those of these services; the oldest are forgotten.

    They serve only to describe a change as a difference.
    """
    seen = {digest(text): text for text in {spec.user_config for spec in specs if spec is not None}}
    if seen.keys() <= texts.keys():
        return texts
    return dict([*{digest(NO_USER_CONFIG): NO_USER_CONFIG, **texts, **seen}.items()][-MOST_KNOWN:])


def user_config_status(
    containers: Iterable[ReplicaContainer],
    spec: ServiceSpec,
    goal: VersionGoal,
    retirements: Mapping[str, Retirement],
    texts: Mapping[str, str],
    now: float,
) -> UserConfigStatus | None:
    """In how many replicas a service's user_config is in force; None if none is set and none is in force. `texts`: the
    user_configs seen so far, by digest.
    """
    text = (goal.spec or spec).user_config
    wanted = digest(text)
    applied, serving, others = 0, 0, set()
    refused: dict[str, str] = {}
    for container in containers:
        report = container.user_config
        phase, _ = phase_of(container, spec, retirements.get(container.id), now)
        serves = is_ready(container, phase)
        if wanted_in(container, spec, goal) != text or not (serves or phase is Phase.STARTING):
            continue
        if report is None:
            if serves and container.ongoing is not None and text != NO_USER_CONFIG:
                serving += 1
                refused[container.name] = f"{container.name}: {NOT_TAKEN}"
            continue
        serving += serves
        applied += serves and report.applied == wanted
        if report.applied != wanted and report.applied:
            others.add(report.applied)
        if report.wanted == wanted and report.error:
            stays = "the former user_config stays in force" if serves else "it is not ready without it"
            refused[container.name] = f"{container.name}: {report.error}; {stays}"
    if text == NO_USER_CONFIG and not others and not refused:
        return None
    changes = tuple(_changes([texts.get(other) for other in sorted(others)], text))
    shown = changes if applied < serving or refused else ()
    value = json.loads(spec.user_config)
    return UserConfigStatus(value, wanted, applied, serving, tuple(refused.values()), shown, tuple(refused))


def progress_words(status: UserConfigStatus) -> str:
    """Progress: "in force in 2 of 3 replicas"."""
    return f"user_config {status.wanted} is in force in {status.applied} of {status.replicas} replicas"


def differences(then: str, now: str) -> list[str]:
    """The differences between two user_configs, one line each: "model.threshold: 0.5 -> 0.7"."""
    before, after = (dict(_flat(json.loads(text), "")) for text in (then, now))
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    lines = [f"{key}: {before.get(key, 'nothing')} -> {after.get(key, 'nothing')}" for key in keys[:MOST_CHANGES]]
    return [*lines, f"and {len(keys) - MOST_CHANGES} more"] if len(keys) > MOST_CHANGES else lines


def _changes(others: list[str | None], now: str) -> Iterator[str]:
    """The differences from each other user_config that is in force in a replica."""
    for then in others:
        if then is None:
            yield "from a user_config that this controller has not seen"
        else:
            yield from differences(then, now)


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every value by its path, as JSON; long ones are cut."""
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else key)
    else:
        text = json.dumps(value, ensure_ascii=False)
        short = text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({digest(text)})"
        yield path, short


# ----------------------------------------------------------------------------------------------------
# The wanted user_config is sent to replicas that have another one, without a restart.


def configure(draft: Draft, outlook: ServiceOutlook) -> None:
    """Send the wanted user_config to each replica that stays and has another one."""
    spec = outlook.spec
    for replica in outlook.alive():
        container = replica.container
        text = None if spec is None else wanted_in(container, spec, outlook.goal)
        address = None if spec is None else probe_address(container, spec)
        if text is None or replica.busy or address is None or not (container.is_awake and is_due(container, text)):
            continue
        former = container.user_config.wanted if container.user_config else "none"
        draft.add(
            GiveUserConfig(
                target=replica.name,
                service=outlook.name,
                container_id=container.id,
                address=address,
                text=text,
                cause=f"its user_config {former} becomes {digest(text)}; no restart",
            )
        )
