"""The plots of a report. Each function draws one picture from a run's samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import matplotlib.ticker
from hdrh.histogram import HdrHistogram

from tests.bench.cases import APPS, VARIANTS, App
from tests.bench.results import Results
from tests.bench.statistics import Samples, Spread, latency, rate
from tests.bench.tables import ROLES as ROLE_NAMES

mpl.use("Agg")

OURS, PEER, LIMIT, INK, FAINT = "#0b7285", "#e8590c", "#868e96", "#212529", "#dee2e6"
ROLES = {
    "haproxy": "#fcc419",
    "ingress": "#0b7285",
    "child": "#66d9e8",
    "docker-proxy": "#f03e3e",
    "dockerd": "#c2255c",
    "containerd": "#e599f7",
    "controller": "#7048e8",
    "prometheus": "#4c6ef5",
    "ray": "#e8590c",
    "rest": "#868e96",
    "generator": "#ced4da",
}
SIDES = (("ours", "Pierhead", OURS), ("peer", "Ray Serve", PEER))
TITLES = {
    "echo": "Echo: ingress, child",
    "stream": "Stream of 50 events: ingress, child",
    "dlrm": "DLRM: 2 ingresses, 1 ranker",
}
SIZE = (12.5, 4.4)
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": "#adb5bd",
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.bbox": "tight",
    "savefig.facecolor": "white",
}

Panel = Callable[[Any, Samples, App], bool]
"""Draws into the axes; False where there is nothing to draw."""


def draw_all(results: Results, directory: Path) -> list[str]:
    """Write every plot that the results have data for; their file names."""
    samples = Samples(results.samples)
    with mpl.rc_context(STYLE):
        figures = {
            "throughput.png": _panels(samples, _throughput),
            "latency.png": _panels(samples, _latency),
            "open-loop.png": _panels(samples, _open_loop),
            "cpu.png": _cpu(samples),
            "ablation.png": _ablation(samples),
        }
        drawn = [name for name, figure in figures.items() if figure is not None]
        for name in drawn:
            figures[name].savefig(directory / name)
    plt.close("all")
    return drawn


def _panels(samples: Samples, panel: Panel) -> Any:
    """One panel for each application that has data."""
    apps = [app for app in APPS.values() if samples.levels(app.name, "closed")]
    if not apps:
        return None
    figure, axes = plt.subplots(1, len(apps), figsize=(SIZE[0] * len(apps) / 3 + 0.5, SIZE[1]), squeeze=False)
    found = [panel(ax, samples, app) for ax, app in zip(axes[0], apps, strict=True)]
    for ax, app in zip(axes[0], apps, strict=True):
        ax.set_title(TITLES[app.name], pad=12)
    if not any(found):
        plt.close(figure)
        return None
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), bbox_to_anchor=(0.5, 1.02))
    figure.tight_layout(rect=(0, 0, 1, 0.95), w_pad=2.5)
    return figure


# --------------------------------------------------------------------------------------------------------- throughput


def _throughput(ax: Any, samples: Samples, app: App) -> bool:
    levels = samples.levels(app.name, "closed")
    width = 0.38
    for side, (subject, label, colour) in enumerate(SIDES):
        spreads = [samples.spread(rate, subject, app.name, "closed", level) for level in levels]
        places = [place + (side - 0.5) * width for place in range(len(levels))]
        _bars(ax, places, spreads, width, label, colour)
    for place, level in enumerate(levels):
        ratio = samples.ratio(rate, "ours", "peer", app.name, "closed", level)
        ours = samples.spread(rate, "ours", app.name, "closed", level)
        if ratio and ours:
            where = (place - width / 2, ours.high)
            label = f"{ratio.median:.1f}x"
            ax.annotate(
                label, where, (0, 13), textcoords="offset points", ha="center", weight="bold", color=OURS, fontsize=9.5
            )
    _limit_line(ax, samples, app)
    ax.set_xticks(range(len(levels)), [str(level) for level in levels])
    ax.set_xlabel("connections")
    ax.set_ylabel(f"{app.unit} per second")
    ax.set_xlim(-0.6, len(levels) - 0.4)
    ax.margins(y=0.16)
    ax.yaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:,.0f}"))
    return bool(levels)


def _bars(
    ax: Any, places: Sequence[float], spreads: Sequence[Spread | None], width: float, label: str, colour: str
) -> None:
    have = [(place, spread) for place, spread in zip(places, spreads, strict=True) if spread is not None]
    if not have:
        return
    heights = [spread.median for _, spread in have]
    below = [spread.median - spread.low for _, spread in have]
    above = [spread.high - spread.median for _, spread in have]
    xs = [place for place, _ in have]
    ax.bar(xs, heights, width * 0.94, label=label, color=colour)
    ax.errorbar(xs, heights, [below, above], fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    for x, spread in have:
        ax.annotate(
            _short(spread.median), (x, spread.high), (0, 3), textcoords="offset points", ha="center", fontsize=7.5
        )


def _limit_line(ax: Any, samples: Samples, app: App) -> None:
    limits = {
        "echo": ("bare", "closed", 64, "the same chain with nothing of ours"),
        "dlrm": ("model", "model", 0, "the model alone on all cores"),
    }
    if app.name in limits:
        subject, load, level, label = limits[app.name]
        found = samples.spread(rate, subject, app.name, load, level)
        if found:
            ax.axhline(found.median, color=LIMIT, linestyle=(0, (4, 3)), linewidth=1.2, zorder=0)
            ax.annotate(
                f"{label}: {_short(found.median)}/s",
                (0.01, found.median),
                (0, 4),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color=INK,
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


# ------------------------------------------------------------------------------------------------------------ latency


def _latency(ax: Any, samples: Samples, app: App) -> bool:
    """A bar from p50 to p99 for each side at each level."""
    levels = samples.levels(app.name, "closed")
    for side, (subject, label, colour) in enumerate(SIDES):
        for place, level in enumerate(levels):
            x = place + (side - 0.5) * 0.3
            half = samples.spread(latency("p50"), subject, app.name, "closed", level)
            tail = samples.spread(latency("p99"), subject, app.name, "closed", level)
            if half is None or tail is None:
                continue
            shown = label if place == 0 else None
            ax.plot([x, x], [half.median, tail.median], color=colour, linewidth=9, solid_capstyle="butt", label=shown)
            for value, offset, where in ((half.median, -4, "top"), (tail.median, 4, "bottom")):
                ax.annotate(
                    _short(value),
                    (x, value),
                    (0, offset),
                    textcoords="offset points",
                    ha="center",
                    va=where,
                    fontsize=7.5,
                )
    _log_scale(ax)
    ax.set_xticks(range(len(levels)), [str(level) for level in levels])
    ax.set_xlim(-0.6, len(levels) - 0.4)
    ax.set_xlabel("connections")
    ax.set_ylabel("ms, from p50 to p99")
    ax.margins(y=0.12)
    return bool(levels)


def _log_scale(ax: Any) -> None:
    """Decades with 2 and 5 between them, written as plain numbers."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5), numticks=20))
    ax.yaxis.set_minor_locator(mpl.ticker.NullLocator())
    ax.yaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:,g}"))


# ---------------------------------------------------------------------------------------------------------- open loop


def _open_loop(ax: Any, samples: Samples, app: App) -> bool:
    """Latency by percentile, one more nine with each step to the right."""
    drawn = False
    for subject, label, colour in SIDES:
        found = samples.of(subject, app.name, "open")
        if not found:
            continue
        merged = HdrHistogram.decode(found[0].histogram.encode())
        for sample in found[1:]:
            merged.add(HdrHistogram.decode(sample.histogram.encode()))
        tails = _tails(merged.get_total_count())
        values = [merged.get_value_at_percentile(100 * (1 - tail)) / 1e3 for tail in tails]
        ax.plot([1 / tail for tail in tails], values, color=colour, linewidth=2.2, label=label)
        ax.set_xlabel(f"percentile, at {found[0].offered_rate:,.0f} arrivals per second")
        drawn = True
    _log_scale(ax)
    ax.set_xscale("log")
    ax.set_xticks([2, 10, 100, 1000], ["p50", "p90", "p99", "p99.9"])
    ax.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    ax.margins(y=0.1)
    ax.grid(axis="x")
    ax.set_ylabel("ms since the request was due")
    return drawn


def _tails(count: int) -> list[float]:
    """Shares of slower requests, from 0.9 to what ten requests stand for, evenly on a logarithmic axis."""
    smallest = max(10 / max(count, 1), 1e-4)
    steps = 120
    return [0.9 * (smallest / 0.9) ** (step / steps) for step in range(steps + 1)]


# ------------------------------------------------------------------------------------------------------ cpu, ablation


def _cpu(samples: Samples) -> Any:
    """CPU microseconds of a request, stacked by process group; one panel for each application: the scales differ."""
    apps = [app for app in APPS.values() if samples.costs("ours", app.name, "closed", app.main_level)]
    if not apps:
        return None
    figure, axes = plt.subplots(1, len(apps), figsize=(SIZE[0] * len(apps) / 3 + 0.5, 2.6), squeeze=False)
    for ax, app in zip(axes[0], apps, strict=True):
        for place, (subject, _, _) in enumerate(SIDES):
            _stack(ax, place, samples.costs(subject, app.name, "closed", app.main_level))
        ax.set_yticks([0, 1], [label for _, label, _ in SIDES])
        ax.invert_yaxis()
        ax.set_title(f"{app.name}, {app.main_level} connections")
        ax.set_xlabel("CPU microseconds of a request")
        ax.grid(axis="y", visible=False)
        ax.grid(axis="x")
        ax.margins(x=0.38)
    handles = [mpl.patches.Patch(color=colour, label=ROLE_NAMES[role]) for role, colour in ROLES.items()]
    figure.legend(handles=handles, loc="upper center", ncols=6, bbox_to_anchor=(0.5, 1.14))
    figure.tight_layout(rect=(0, 0, 1, 0.94), w_pad=2.5)
    return figure


def _stack(ax: Any, place: int, costs: dict[str, float]) -> None:
    start = 0.0
    for role, colour in ROLES.items():
        ax.barh(place, costs.get(role, 0.0), 0.55, left=start, color=colour)
        start += costs.get(role, 0.0)
    served = start - costs.get("generator", 0.0)
    if start:
        ax.annotate(
            f"{served:,.0f} + load", (start, place), (5, 0), textcoords="offset points", va="center", fontsize=8
        )


def _ablation(samples: Samples) -> Any:
    """Rates of the variants at the main level, as shares of ours."""
    rows: list[tuple[str, Spread]] = []
    for app in APPS.values():
        for variant in VARIANTS:
            ratio = samples.ratio(rate, variant.key, "ours", app.name, "closed", app.main_level)
            if ratio is not None:
                rows.append((f"{app.name}: {variant.label}", ratio))
    if not rows:
        return None
    figure, ax = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.1))
    for place, (_, ratio) in enumerate(rows):
        colour = OURS if ratio.median >= 1 else LIMIT
        ax.barh(place, ratio.median, 0.6, color=colour)
        spread = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        ax.errorbar(ratio.median, place, xerr=spread, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
        ax.annotate(
            f"{ratio.median:.2f}", (ratio.high, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    ax.axvline(1, color=INK, linewidth=1)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x")
    ax.set_xlabel("rate, as a share of Pierhead as it comes (1)")
    ax.margins(x=0.08)
    figure.tight_layout()
    return figure
