"""One picture of a simulation: the rate, the replicas, the requests and the latency over time. Needs matplotlib."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from controller.desired.policies import query_words
from controller.model.spec import AutoscaleSpec, FunctionPolicy, PrometheusPolicy

from .report import Summary, percentile, span_words
from .simulation import Result, Sample

mpl.use("Agg")

BINS = 240
LEFT = 0.085
"""Where the panels begin, as a part of the picture's width."""
INK, FAINT, TEAL, PALE, ORANGE, RED = "#212529", "#dee2e6", "#0b7285", "#99e9f2", "#e8590c", "#c92a2a"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": "#adb5bd",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.facecolor": "white",
}


def draw(result: Result, summary: Summary, file: Path) -> None:
    """Write the picture; the file's ending is its format."""
    panels: list[tuple[Callable[[Any, Result, _Axis], None], float]] = [
        (_rate, 1.0),
        (_replicas, 1.7),
        (_requests, 1.2),
        (_latency, 1.4),
    ]
    if summary.refused or summary.lost:
        panels.append((_refusals, 0.8))
    axis = _Axis.of(result.trace.duration_s)
    with mpl.rc_context(STYLE):
        heights = [height for _, height in panels]
        figure, axes = plt.subplots(
            len(panels), 1, figsize=(12.0, 1.5 + 1.65 * sum(heights)), sharex=True, height_ratios=heights
        )
        for ax, (panel, _) in zip(axes, panels, strict=True):
            panel(ax, result, axis)
            ax.margins(x=0)
            if ax.get_legend_handles_labels()[0]:
                # Next to the panel: inside, it would hide a burst.
                ax.legend(loc="upper left", bbox_to_anchor=(1.005, 1.04), fontsize=9, handlelength=1.4)
        axes[-1].set_xlabel(f"time, {axis.unit}")
        axes[-1].set_xlim(0, axis.at(result.trace.duration_s))
        figure.align_ylabels(axes)
        figure.suptitle(_title(result), x=LEFT, y=0.985, ha="left", weight="bold", fontsize=12)
        figure.text(
            LEFT, 1 - 0.48 / figure.get_figheight(), _subtitle(result, summary), va="top", fontsize=9, color=INK
        )
        top = 1 - 0.98 / figure.get_figheight()
        figure.subplots_adjust(left=LEFT, right=0.86, top=top, bottom=0.55 / figure.get_figheight(), hspace=0.16)
        figure.savefig(file)
        plt.close(figure)


class _Axis:
    """Seconds -> what the time axis counts."""

    def __init__(self, unit: str, seconds: float) -> None:
        self.unit = unit
        self._seconds = seconds

    @classmethod
    def of(cls, duration_s: float) -> _Axis:
        if duration_s <= 600:
            return cls("seconds", 1.0)
        return cls("minutes", 60.0) if duration_s <= 4 * 3600 else cls("hours", 3600.0)

    def at(self, at_s: float) -> float:
        return at_s / self._seconds

    def of_samples(self, samples: Sequence[Sample]) -> list[float]:
        return [self.at(sample.at_s) for sample in samples]


def _title(result: Result) -> str:
    return f"{result.spec.name}: {result.trace.name} over {span_words(result.trace.duration_s)}"


def _subtitle(result: Result, summary: Summary) -> str:
    parts = [f"{summary.target_changes} target changes, {summary.reversals} back"]
    parts.append(f"{summary.ready_replica_seconds / 3600:.2f} replica hours")
    parts.append(f"{summary.refused / max(summary.requests, 1):.2%} refused")
    parts += [
        f"step to {step.rate_after:g}/s: {step.allowed} ready "
        + ("never" if step.ready_after_s is None else f"after {step.ready_after_s:.0f} s")
        for step in summary.steps[:2]
    ]
    return f"{_autoscale_words(result.autoscale)}\n{'; '.join(parts)}"


def _autoscale_words(autoscale: AutoscaleSpec) -> str:
    bounds = f"{autoscale.min} to {autoscale.max} replicas"
    delays = f"up after {autoscale.upscale_delay_s:g} s, down after {autoscale.downscale_delay_s:g} s"
    match autoscale.policy:
        case FunctionPolicy(path):
            return f"{bounds} by {path}; {delays}"
        case PrometheusPolicy(query, target):
            return f"{bounds}, {target:g} of {query_words(query)} (here: utilisation in percent); {delays}"
        case None:
            return f"{bounds}, {autoscale.target_ongoing_requests:g} requests each; {delays}"


# -------------------------------------------------------------------------------------------------------------- panels


def _rate(ax: Any, result: Result, axis: _Axis) -> None:
    width_s, counts = _counted(result, result.requests.arrived)
    rates = [count / width_s for count in counts]
    _steps(ax, axis, width_s, rates, color=INK, linewidth=1.2)
    ax.set_ylabel("requests/s")
    ax.set_ylim(bottom=0)


def _replicas(ax: Any, result: Result, axis: _Axis) -> None:
    samples = result.samples
    at = axis.of_samples(samples)
    ready = [sample.ready for sample in samples]
    present = [sample.present for sample in samples]
    ax.fill_between(at, present, step="post", color=PALE, label="starting, draining", linewidth=0)
    ax.fill_between(at, ready, step="post", color=TEAL, label="ready", linewidth=0)
    width_s, bins = _binned(result)
    _steps(ax, axis, width_s, _means(bins, lambda sample: sample.wanted), color=INK, linewidth=0.9, label="asked for")
    ax.step(
        at, [sample.target for sample in samples], where="post", color=ORANGE, linewidth=1.8, label="target", zorder=4
    )
    ax.set_ylabel("replicas")
    ax.set_ylim(0, max([*present, 1]) * 1.12)
    ax.yaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True, nbins=6))


def _requests(ax: Any, result: Result, axis: _Axis) -> None:
    width_s, bins = _binned(result)
    in_work = _means(bins, lambda sample: sample.in_work)
    # The longest queue of a bin, not the mean: bursts are short.
    total = [
        busy + max((sample.waiting for sample in each), default=0) for busy, each in zip(in_work, bins, strict=True)
    ]
    edges = [axis.at(number * width_s) for number in range(BINS + 1)]
    in_work.append(in_work[-1])
    total.append(total[-1])
    ax.fill_between(edges, in_work, total, step="post", color=ORANGE, label="waiting (most)", linewidth=0)
    ax.fill_between(edges, in_work, step="post", color=TEAL, label="at replicas", linewidth=0)
    if result.autoscale.policy is None:
        each = result.autoscale.target_ongoing_requests
        room = [sample.ready * each for sample in result.samples]
        ax.step(axis.of_samples(result.samples), room, where="post", color=INK, linewidth=1, label=f"ready x {each:g}")
    ax.set_ylabel("requests")
    ax.set_ylim(bottom=0)


def _latency(ax: Any, result: Result, axis: _Axis) -> None:
    width_s = result.trace.duration_s / BINS
    bins: list[list[float]] = [[] for _ in range(BINS)]
    for at, latency in zip(result.requests.finished_at, result.requests.latency, strict=True):
        bins[min(int(at / width_s), BINS - 1)].append(latency)
    for each in bins:
        each.sort()
    for part, colour, label in ((0.99, ORANGE, "p99"), (0.5, TEAL, "p50")):
        values = [found if (found := percentile(each, part)) is not None else float("nan") for each in bins]
        _steps(ax, axis, width_s, values, color=colour, linewidth=1.3, label=label)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.set_ylim(low / 1.2, max(high, 10 * low) * 1.2)
    ax.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1.0, 3.0)))
    ax.yaxis.set_major_formatter(mpl.ticker.FuncFormatter(_time_words))
    ax.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    ax.set_ylabel("latency, log")


def _refusals(ax: Any, result: Result, axis: _Axis) -> None:
    width_s, counts = _counted(result, result.requests.refused_at)
    _steps(ax, axis, width_s, [count / width_s for count in counts], color=RED, linewidth=1.2)
    ax.set_ylabel("refused/s")
    ax.set_ylim(bottom=0)


def _steps(ax: Any, axis: _Axis, width_s: float, values: Sequence[float], **style: Any) -> None:
    edges = [axis.at(number * width_s) for number in range(len(values) + 1)]
    ax.step(edges, [*values, values[-1]], where="post", **style)


def _counted(result: Result, times: array[float]) -> tuple[float, list[int]]:
    """(seconds of one bin, how many of the times are in each)."""
    width_s = result.trace.duration_s / BINS
    counts = [0] * BINS
    for at in times:
        counts[min(int(at / width_s), BINS - 1)] += 1
    return width_s, counts


def _binned(result: Result) -> tuple[float, list[list[Sample]]]:
    """(seconds of one bin, the samples in each)."""
    width_s = result.trace.duration_s / BINS
    bins: list[list[Sample]] = [[] for _ in range(BINS)]
    for sample in result.samples:
        bins[min(int(sample.at_s / width_s), BINS - 1)].append(sample)
    return width_s, bins


def _means(bins: Sequence[Sequence[Sample]], of: Callable[[Sample], int]) -> list[float]:
    """The mean of each bin; a bin without a sample (in a short trace) repeats the one before."""
    means: list[float] = []
    for each in bins:
        means.append(sum(map(of, each)) / len(each) if each else means[-1] if means else 0.0)
    return means


def _time_words(seconds: float, _position: int) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"
