"""The parts of a dashboard, and Grafana's JSON made of them.

    build_overview.py  the stack          build_llm.py  language models

A page is sections of panels; a panel is a line or a few. Rates look back over `$__rate_interval`, which Grafana derives
from the scrape interval; `$service` is the variable at the top of a page (one, several or all services).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DASHBOARDS = Path(__file__).parent / "grafana" / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "pierhead-prometheus"}
COLUMNS = 24
"""Width of Grafana's grid."""

S = 'service=~"$service"'
W = "[$__rate_interval]"
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Query:
    """One PromQL expression and the legend of its series (`{{label}}` is replaced by Grafana)."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel. `unit`: Grafana's name of the unit; `stacked`: series are drawn on top of each other."""

    title: str
    queries: Sequence[Query]
    description: str
    unit: str = "short"
    width: int = 8
    kind: Literal["timeseries", "stat"] = "timeseries"
    stacked: bool = False
    warn_above: float | None = None
    """A stat turns red above this value."""

    @property
    def height(self) -> int:
        """In rows of Grafana's grid (30 pixels each)."""
        return 4 if self.kind == "stat" else 8


@dataclass(frozen=True)
class Section:
    """A titled row and its panels, laid out left to right. `collapsed`: Grafana asks its queries once it is opened."""

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


@dataclass(frozen=True)
class Page:
    """One dashboard. `services`: a metric whose label `service` has the values of the variable `$service`."""

    uid: str
    title: str
    description: str
    services: str
    sections: Sequence[Section]

    @property
    def file(self) -> Path:
        """The file that Grafana reads."""
        return DASHBOARDS / f"{self.uid.removeprefix('pierhead-')}.json"


def rate(metric: str, by: str = "service", where: str = "", of: str = S) -> str:
    """Rate per second, summed by labels. `of`: the selector for the chosen services."""
    return f"sum by ({by}) (rate({metric}{{{of}{where}}}{W}))"


def quantile(q: float, histogram: str, by: str = "service", of: str = S) -> str:
    """The q-quantile of a histogram by labels."""
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', f'le, {by}', of=of)})"


def quantiles(histogram: str, by: str = "service", of: str = S) -> list[Query]:
    """p50, p90 and p99 of a histogram, one series each per value of `by`."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return [Query(quantile(q, histogram, by, of), f"p{q * 100:g} {legend}") for q in QUANTILES]


def render(page: Page) -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    return {
        "uid": page.uid,
        "title": page.title,
        "description": page.description,
        "tags": ["pierhead"],
        "schemaVersion": 41,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_service_variable(page.services)]},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_place(page.sections)),
    }


def _service_variable(services: str) -> dict[str, Any]:
    query = f"label_values({services}, service)"
    return {
        "name": "service",
        "label": "Service",
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "service"},
        "refresh": 2,  # at a change of the time range: services are added and removed
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",  # not ".*": that also matches series without the label
        "current": {"text": ["All"], "value": ["$__all"]},
        "options": [],
    }


def _place(sections: Sequence[Section]) -> Iterator[dict[str, Any]]:
    """Panels from left to right, on a new line if one does not fit. Ids and places follow from the order."""
    identifier, y = 1, 0
    for section in sections:
        row = _row(section, identifier, y)
        identifier, y, x, line = identifier + 1, y + 1, 0, 0
        panels = []
        for panel in section.panels:
            if x + panel.width > COLUMNS:
                x, y, line = 0, y + line, 0
            panels.append(_panel(panel, identifier, {"h": panel.height, "w": panel.width, "x": x, "y": y}))
            identifier, x, line = identifier + 1, x + panel.width, max(line, panel.height)
        y += line
        if section.collapsed:  # the row then holds its panels
            yield row | {"panels": panels}
        else:
            yield row
            yield from panels


def _row(section: Section, identifier: int, y: int) -> dict[str, Any]:
    place, collapsed = {"h": 1, "w": COLUMNS, "x": 0, "y": y}, section.collapsed
    return {
        "id": identifier,
        "type": "row",
        "title": section.title,
        "collapsed": collapsed,
        "gridPos": place,
        "panels": [],
    }


def _panel(panel: Panel, identifier: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": identifier,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "gridPos": place,
        "datasource": DATASOURCE,
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": DATASOURCE, "expr": query.expr, "legendFormat": query.legend}
            | ({"instant": True, "range": False} if panel.kind == "stat" else {})
            for n, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _STAT_OPTIONS if panel.kind == "stat" else _TIMESERIES_OPTIONS,
    }


_STAT_OPTIONS = {
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "colorMode": "value",
    "graphMode": "none",
    "textMode": "auto",
}
_TIMESERIES_OPTIONS = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
    "tooltip": {"mode": "multi", "sort": "desc"},
}


def _field_defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "stat":
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if panel.warn_above is not None:
            steps.append({"color": "red", "value": panel.warn_above})
        return defaults | {"thresholds": {"mode": "absolute", "steps": steps}}
    return defaults | {
        "custom": {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    }


def write(page: Page) -> None:
    """Write the page's JSON file."""
    page.file.write_text(json.dumps(render(page), indent=2) + "\n", encoding="utf-8")
