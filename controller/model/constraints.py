"""Placement constraints, as far as the planner has to know which nodes a replica may be on. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .nodes import Node

_CONSTRAINT = re.compile(r"\s*(?P<key>[A-Za-z0-9_.-]+)\s*(?P<operator>==|!=)\s*(?P<value>.*?)\s*")
LABEL = "node.labels."


def fits(node: Node, constraints: Iterable[str]) -> bool:
    """Whether a node fulfils constraints about its name, id, role and labels; other ones are left to the engine."""
    for match in filter(None, map(_CONSTRAINT.fullmatch, constraints)):
        value = value_of(node, match["key"])
        if value is not None and (value.lower() == match["value"].lower()) != (match["operator"] == "=="):
            return False
    return True


def value_of(node: Node, key: str) -> str | None:
    """What a constraint or a preference of that key looks at; None = it is not known here."""
    if key.startswith(LABEL):
        return node.labels.get(key.removeprefix(LABEL), "")
    known = {"node.id": node.id, "node.hostname": node.name, "node.role": "manager" if node.is_manager else "worker"}
    return known.get(key)
