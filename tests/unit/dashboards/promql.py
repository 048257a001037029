"""Reads PromQL just well enough to tell which metrics an expression asks for; promtool checks the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client.core import Metric

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_LABELS = re.compile(r"\{[^}]*\}")
_RANGES = re.compile(r"\[[^\]]*\]")
_NAMES = re.compile(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])")
_COMMENTS = re.compile(r"#.*")
_OPERATORS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}


def metrics_in(expr: str) -> set[str]:
    """The names of the metrics that a PromQL expression reads."""
    for noise in (_STRINGS, _COMMENTS, _GROUPING, _LABELS, _RANGES):
        expr = noise.sub(" ", expr)
    return {name for name in _NAMES.findall(expr) if name.lower() not in _OPERATORS}


def selectors_in(expr: str) -> list[tuple[str, str]]:
    """Each metric of an expression with what stands between the braces behind it."""
    return re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expr)


def exported_names(families: Iterable[Metric]) -> set[str]:
    """The names that samples of these metric families have on the page that Prometheus scrapes."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("", "_sum", "_count")}
    return {family.name + suffix for family in families for suffix in suffixes.get(family.type, ("",))}
