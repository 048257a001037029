"""The plots of `make bench-llm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from tests.bench.llm.cases import POLICIES, WAYS
from tests.bench.llm.figures import Figure, Samples, cpu_ms, first_ms, rate
from tests.bench.plots import INK, LIMIT, OURS, PEER, STYLE

ROLES = {
    "replica": ("#66d9e8", "replica, the engine in it"),
    "child": ("#66d9e8", "replica, the engine in it"),
    "gateway": (OURS, "gateway, ingress"),
    "ingress": (OURS, "gateway, ingress"),
    "haproxy": ("#fcc419", "HAProxy"),
    "discovery": (PEER, "the rest"),
    "ray": (PEER, "Ray's own"),
}
LABELS = {
    "floor": "replica\nalone", "gateway": "gateway", "haproxy": "HAProxy,\ngateway", "relayed": "no shared\nmemory",
    "bare": "nothing\nof ours", "peer": "Ray Serve\nLLM",
}  # fmt: skip


def draw_all(samples: Samples, directory: Path) -> list[str]:
    """Write every plot there is data for; their file names."""
    drawn = []
    with mpl.rc_context(STYLE):
        for part, draw in (("overhead", _overhead), ("linear", _linear), ("prefix", _prefix), ("vllm", _vllm)):
            if samples.cases(part):
                figure = draw(samples)
                figure.tight_layout()
                figure.savefig(directory / f"{part}.png")
                plt.close(figure)
                drawn.append(f"{part}.png")
    return drawn


def _overhead(samples: Samples) -> Any:
    subjects = [each for each in LABELS if each in samples.cases("overhead")]
    figure, (first, cost) = plt.subplots(1, 2, figsize=(10, 4))
    for place, subject in enumerate(subjects):
        for percentile, colour, offset in ((50, OURS, -0.2), (99, LIMIT, 0.2)):
            spread = samples.spread(first_ms(percentile), "overhead", subject)
            assert spread is not None
            label = f"p{percentile}" if not place else None
            _bar(first, place + offset, spread.median, spread.low, spread.high, 0.38, colour, label)
        below = 0.0
        for role, (colour, label) in ROLES.items():
            used = samples.spread(cpu_ms(role), "overhead", subject)
            if used is not None and used.median:
                known = label in cost.get_legend_handles_labels()[1]
                cost.bar(place, used.median, 0.6, below, color=colour, label=None if known else label)
                below += used.median
    first.set_title("Time to first token, ms")
    cost.set_title("CPU ms per 1,000 streamed tokens")
    for ax in (first, cost):
        ax.set_xticks(range(len(subjects)), [LABELS[subject] for subject in subjects])
        ax.legend(loc="upper left")
        ax.margins(y=0.2)
    return figure


def _linear(samples: Samples) -> Any:
    figure, ax = plt.subplots(figsize=(5.5, 4))
    cases = sorted(samples.cases("linear"), key=int)
    spreads = [samples.spread(rate, "linear", case) for case in cases]
    xs = [int(case) for case in cases]
    ax.plot(xs, [2000 * x for x in xs], color=LIMIT, linestyle="--", label="2,000 for each replica")
    ax.plot(xs, [spread.median if spread else 0 for spread in spreads], color=OURS, marker="o", label="streamed")
    ax.set_title("Tokens/s")
    ax.set_xlabel("replicas")
    ax.set_xticks(xs)
    ax.legend()
    return figure


def _prefix(samples: Samples) -> Any:
    cases = samples.cases("prefix")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    figures: list[tuple[str, Figure]] = [
        ("Share of prompt tokens that were cached", lambda sample: sample.hit_rate),
        ("Mean time to first token, ms", lambda sample: sample.first_mean_ms),
    ]
    for ax, (title, figure_of) in zip(axes, figures, strict=True):
        for policy, colour, offset in zip(POLICIES, (LIMIT, OURS), (-0.2, 0.2), strict=True):
            for place, case in enumerate(cases):
                spread = samples.spread(figure_of, "prefix", case, policy)
                if spread is not None:
                    label = policy if not place else None
                    _bar(ax, place + offset, spread.median, spread.low, spread.high, 0.38, colour, label)
        ax.set_title(title)
        ax.set_xticks(range(len(cases)), [case.replace(" ", "\n", 1) for case in cases])
        ax.margins(y=0.3)
        ax.legend(loc="upper center", ncols=2)
    return figure


def _vllm(samples: Samples) -> Any:
    cases = samples.cases("vllm")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    figures: list[tuple[str, Figure]] = [("Tokens/s", rate), ("CPU ms per 1,000 tokens, without the model's", _front)]
    for ax, (title, figure_of) in zip(axes, figures, strict=True):
        for way, colour, offset in zip(WAYS, (OURS, PEER), (-0.2, 0.2), strict=True):
            for place, case in enumerate(cases):
                spread = samples.spread(figure_of, "vllm", case, way)
                if spread is not None:
                    label = WAYS[way].replace("`", "") if not place else None
                    _bar(ax, place + offset, spread.median, spread.low, spread.high, 0.38, colour, label)
        ax.set_title(title)
        ax.set_xticks(range(len(cases)), [f"{case} stream{'s' * (case != '1')}" for case in cases])
        ax.margins(y=0.25)
        ax.legend(loc="upper left")
    return figure


_front = cpu_ms(but=("engine",))


def _bar(
    ax: Any, x: float, median: float, low: float, high: float, width: float, colour: str, label: str | None
) -> None:
    ax.bar(x, median, width, color=colour, label=label)
    ax.errorbar(x, median, [[median - low], [high - median]], fmt="none", ecolor=INK, elinewidth=1, capsize=2)
