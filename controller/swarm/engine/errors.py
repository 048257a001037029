"""Swarm's words on a task that cannot run, and what to do about it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...engines.docker_errors import LEADERLESS, with_hint
from ...model.nodes import Node, fits
from ..names import Json

_UNFIT = "scheduling constraints not satisfied"
_FULL = "insufficient resources"
_FULL_REMEDY = "reserve less (deploy.resources.reservations), or add a node: `pierhead node token`"
_PLATFORM = "unsupported platform"

OF_MANAGERS = (
    (r"not a swarm manager", "with PIERHEAD_ENGINE=swarm the controller runs on a manager of the Swarm"),
    (LEADERLESS, "more than half of the Swarm's managers must be up: `docker node ls`"),
)
"""What a manager says -> remedy."""
# Pattern in the error of a node -> remedy, with the pattern's group as {0}. The first match counts.
_HINTS = (
    (
        r"bind source path does not exist: (\S+)",
        "make {0} on all nodes that the service may run on, or name those that have it in deploy.placement.constraints",
    ),
    (
        r"No such image: (\S+)",
        "`docker pull {0}` on that node says why; PIERHEAD_REGISTRY names a registry that all nodes reach and trust",
    ),
    (r"([Uu]nknown|invalid) runtime", "the node's daemon.json lacks that runtime: repeat `pierhead node join` there"),
)


def end_explained(error: str) -> str:
    """Why a node could not start a task, and in brackets what to do, where that is known."""
    found = ((re.search(pattern, error), hint) for pattern, hint in _HINTS)
    hint = next((hint.format(*match.groups()) for match, hint in found if match), "")
    return f"{error} ({hint})" if hint else with_hint(error)


# ----------------------------------------------------------------------------------------------------- no suitable node


def wait_explained(words: str, task: Json, nodes: Sequence[Node]) -> str:
    """Why a task has no node, and what to do about each reason that Swarm counts the nodes of."""
    if not words.startswith("no suitable node"):
        return words
    reasons = []
    if _UNFIT in words and (unmet := _unmet(task, nodes)):
        reasons.append(unmet)
    if _FULL in words:
        reasons.append(f"it reserves {_reserved(task)}: {_FULL_REMEDY}")
    if _PLATFORM in words:
        reasons.append("its image is of another architecture: build it for that of the nodes")
    return ": ".join([words, "; ".join(reasons)]) if reasons else words


def _reserved(task: Json) -> str:
    found = ((task.get("Spec") or {}).get("Resources") or {}).get("Reservations") or {}
    discrete = [one.get("DiscreteResourceSpec") or {} for one in found.get("GenericResources") or ()]
    parts = [f"{one['Value']} {one['Kind']}" for one in discrete if one]
    if found.get("NanoCPUs"):
        parts.append(f"{found['NanoCPUs'] / 1e9:g} CPUs")
    if found.get("MemoryBytes"):
        parts.append(f"{found['MemoryBytes'] / 2**20:.0f} MiB of memory")
    return ", ".join(parts) or "something that no node has free"


# ---------------------------------------------------------------------------------------------------------- constraints


def _unmet(task: Json, nodes: Sequence[Node]) -> str:
    """The constraints that no node fulfils, each one alone; all of them if their combination is the obstacle."""
    wanted = ((task.get("Spec") or {}).get("Placement") or {}).get("Constraints") or ()
    nowhere = [one for one in wanted if not any(fits(node, [one]) for node in nodes)]
    named = ", ".join(map(repr, nowhere or wanted))
    if not named:
        return ""
    remedy = "change deploy.placement.constraints"
    label = next((one for one in nowhere if one.startswith("node.labels.") and "!=" not in one), "")
    if label:
        key, _, value = (part.strip() for part in label.removeprefix("node.labels.").partition("=="))
        remedy = f"`pierhead node label NODE {key}={value}` gives a node that label, or {remedy}"
    return f"no node fulfils {named}: {remedy}"
