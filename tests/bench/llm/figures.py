"""From samples to the page: medians over rounds, ratios within a round, and whether promises were kept. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hdrh.histogram import HdrHistogram

from tests.bench.llm.cases import FREE, POLICIES, SUBJECTS, WAYS
from tests.bench.llm.measure import Sample
from tests.bench.record import Table
from tests.bench.statistics import Spread
from tests.bench.targets import Line, shown, told

Figure = Callable[[Sample], float | None]

FULL = 0.95
"""Of the machine's cores: from here on they are full."""


def rate(sample: Sample) -> float:
    """Streamed tokens a second."""
    return sample.tokens / sample.seconds


def goodput(sample: Sample) -> float:
    """Tokens a second of complete answers whose first token was not slow."""
    return sample.good_tokens / sample.seconds


def first_ms(percentile: float) -> Figure:
    """Time to the first token."""
    return lambda sample: HdrHistogram.decode(sample.first.encode()).get_value_at_percentile(percentile) / 1e3


def cpu_ms(*roles: str, but: Sequence[str] = ()) -> Figure:
    """CPU milliseconds per 1,000 streamed tokens: of some roles, or of all but some."""

    def figure(sample: Sample) -> float | None:
        used = [s for role, s in sample.cpu_s.items() if (role in roles or not roles) and role not in but]
        return 1e6 * sum(used) / sample.tokens if used and sample.tokens else None

    return figure


def error_rate(sample: Sample) -> float:
    """Of the requests that ended."""
    errors = sum(sample.errors.values())
    return errors / (errors + sample.answers) if errors else 0.0


def imbalance(sample: Sample) -> float | None:
    """The busiest replica's mean requests in those of the mean replica."""
    return max(sample.in_work) * len(sample.in_work) / sum(sample.in_work) if sum(sample.in_work) else None


@dataclass(frozen=True)
class Samples:
    """A run's, asked by what was measured."""

    all: Sequence[Sample]

    def by_round(self, figure: Figure, part: str, case: str, variant: str = "") -> dict[int, float]:
        found = {s.round: figure(s) for s in self.all if (s.part, s.case, s.variant) == (part, case, variant)}
        return {number: value for number, value in found.items() if value is not None}

    def spread(self, figure: Figure, part: str, case: str, variant: str = "") -> Spread | None:
        """Median and spread over the rounds."""
        return Spread.of(self.by_round(figure, part, case, variant).values())

    def compared(
        self, how: Callable[[float, float], float], figure: Figure, part: str, one: tuple[str, str],
        other: tuple[str, str],
    ) -> Spread | None:  # fmt: skip
        """`how` of two cases' figures, round by round. A case: its name and variant."""
        ours, theirs = self.by_round(figure, part, *one), self.by_round(figure, part, *other)
        return Spread.of(how(ours[n], theirs[n]) for n in sorted(ours.keys() & theirs.keys()) if theirs[n])

    def cases(self, part: str) -> list[str]:
        """In the order of the first round."""
        return list(dict.fromkeys(s.case for s in self.all if s.part == part))

    def errors(self) -> dict[str, int]:
        """All of them."""
        total: dict[str, int] = {}
        for sample in self.all:
            for kind, count in sample.errors.items():
                name = " ".join((sample.part, sample.case, sample.variant, kind)).replace("  ", " ")
                total[name] = total.get(name, 0) + count
        return total


def _over(one: float, other: float) -> float:
    return one / other


def _beyond(one: float, other: float) -> float:
    return one - other


# ----------------------------------------------------------------------------------------------------------- promises


def lines(samples: Samples, cores: int) -> list[Line]:
    """What the product promises, as far as it was measured."""
    found = [*_overhead_lines(samples), *_linear_lines(samples, cores), *_prefix_lines(samples)]
    return [*found, *_vllm_lines(samples)]


def added(samples: Samples, percentile: float, subject: str = "gateway") -> Spread | None:
    """Milliseconds that the way adds to the time to the first token."""
    return samples.compared(_beyond, first_ms(percentile), "overhead", (subject, ""), ("floor", ""))


def _overhead_lines(samples: Samples) -> list[Line]:
    if "gateway" not in samples.cases("overhead"):
        return []
    found = [
        _line(f"64 streams: the gateway adds to the first token, {name}", f"<= {bound} ms", spread, "{:.1f} ms",
              lambda value, bound=bound: value <= bound)  # type: ignore[misc]
        for name, bound, spread in (("p50", 3, added(samples, 50)), ("p99", 15, added(samples, 99)))
    ]  # fmt: skip
    for variant, words in (("", "64 streams"), (FREE, "64 streams as fast as they come")):
        ratio = samples.compared(_over, cpu_ms(), "overhead", ("haproxy", variant), ("peer", variant))
        what = f"{words}: CPU per 1,000 streamed tokens, HAProxy, gateway and replica"
        met = None if ratio is None else ratio.median <= 1
        if ratio is not None or not variant:
            found.append(Line(what, "<= Ray Serve LLM's; aim 1/2", shown(ratio), met))
    beyond = samples.compared(_beyond, first_ms(50), "overhead", ("haproxy", ""), ("peer", ""))
    what = "64 streams: the first token, p50, behind HAProxy and gateway"
    found.append(_line(what, "<= Ray Serve LLM's", beyond, "{:+.1f} ms", lambda value: value <= 0))
    for one, other, words in (("bare", "peer", "of Ray Serve LLM's"), ("haproxy", "bare", "and that of ours in it")):
        ratio = samples.compared(_over, cpu_ms(), "overhead", (one, ""), (other, ""))
        if ratio is not None:
            what = f"64 streams: the CPU of the same packages with nothing of ours, {words}"
            found.append(Line(what, "none: what can be had", shown(ratio), None))
    return found


def _linear_lines(samples: Samples, cores: int) -> list[Line]:
    cases = samples.cases("linear")
    return [
        _line(f"{case} replicas of 2,000 tokens/s: share of linear", ">= 95 %" if free else "none: the cores are full",
              share_of_linear(samples, case), "{:.1%}", (lambda value: value >= 0.95) if free else None)
        for case in cases if case != "1"
        for free in [not is_full(samples, case, cores)]
    ]  # fmt: skip


def share_of_linear(samples: Samples, case: str) -> Spread | None:
    """Rate of so many replicas in that of one, times as many."""
    return samples.compared(lambda one, other: one / (int(case) * other), rate, "linear", (case, ""), ("1", ""))


def is_full(samples: Samples, case: str, cores: int) -> bool:
    """Whether the machine had nothing left."""
    busy = samples.spread(lambda sample: sample.busy_cores, "linear", case)
    return busy is not None and busy.median >= FULL * cores


def _prefix_lines(samples: Samples) -> list[Line]:
    found = []
    for case in samples.cases("prefix"):
        one, other = (case, "prefix"), (case, "power_of_two")
        tokens = samples.compared(_over, rate, "prefix", one, other)
        first = samples.compared(_over, lambda sample: sample.first_mean_ms, "prefix", one, other)
        if case == "nothing shared":
            found.append(_line(f"{case}: rate in power of two's", ">= 0.97", tokens, "{:.3f}", lambda v: v >= 0.97))
            found.append(_line(f"{case}: mean TTFT in power of two's", "<= 1.03", first, "{:.3f}", lambda v: v <= 1.03))
        elif case == "one hot prefix":
            spread = samples.spread(imbalance, "prefix", *one)
            found.append(_line(f"{case}: max/mean load", "<= 1.5", spread, "{:.2f}", lambda v: v <= 1.5))
        else:
            hits = samples.compared(_beyond, lambda sample: sample.hit_rate, "prefix", one, other)
            found.append(_line(f"{case}: hit rate beyond power of two's", "> 0", hits, "{:+.1%}", lambda v: v > 0))
            found.append(_line(f"{case}: mean TTFT in power of two's", "< 1", first, "{:.2f}", lambda v: v < 1))
    return found


def _vllm_lines(samples: Samples) -> list[Line]:
    return [
        _line(f"a real vLLM, {streams} at a time: tokens/s of those of `vllm serve` asked directly", ">= 95 %",
              of_vllm(samples, rate, streams), "{:.1%}", lambda value: value >= 0.95)
        for streams in samples.cases("vllm")
    ]  # fmt: skip


def of_vllm(samples: Samples, figure: Figure, streams: str) -> Spread | None:
    """A figure of ours in that of `vllm serve`, pair by pair."""
    return samples.compared(_over, figure, "vllm", (streams, "ours"), (streams, "alone"))


def _line(what: str, wanted: str, spread: Spread | None, form: str, met: Callable[[float], bool] | None) -> Line:
    if spread is None:
        return Line(what, wanted, "not measured", None)
    return Line(what, wanted, told(spread, form), None if met is None else met(spread.median))


# ------------------------------------------------------------------------------------------------------------- tables


def tables(samples: Samples, cores: int) -> list[Table]:
    """One for each part that was measured."""
    makers = {
        "overhead": overhead_table, "linear": lambda found: linear_table(found, cores), "prefix": prefix_table,
        "vllm": vllm_table,
    }  # fmt: skip
    return [make(samples) for part, make in makers.items() if samples.cases(part)]


def overhead_table(samples: Samples) -> Table:
    """64 streams."""
    rows = []
    for subject, variant in [
        (subject, variant)
        for variant in ("", FREE)
        for subject in SUBJECTS
        if samples.spread(rate, "overhead", subject, variant) is not None
    ]:

        def say(figure: Figure, form: str, subject: str = subject, variant: str = variant) -> str:
            return told(samples.spread(figure, "overhead", subject, variant), form)

        paced = subject not in ("floor", "bare") and not variant  # what is bare has another engine
        rows.append(
            [
                SUBJECTS[subject] + (", as fast as it goes" if variant else ""),
                say(rate, "{:,.0f}"),
                say(first_ms(50), "{:.1f}"),
                say(first_ms(99), "{:.1f}"),
                told(added(samples, 50, subject), "{:.1f}") if paced else "",
                told(added(samples, 99, subject), "{:.1f}") if paced else "",
                say(cpu_ms(), "{:,.1f}"),
                say(cpu_ms("replica", "child"), "{:,.1f}"),
                say(cpu_ms(but=("replica", "child")), "{:,.1f}"),
                say(_per_core_second, "{:,.0f}"),
                say(error_rate, "{:.2%}"),
            ]
        )  # fmt: skip
    head = [
        "", "tokens/s", "TTFT p50 ms", "p99 ms", "added p50 ms", "added p99 ms", "CPU ms per 1,000 tokens",
        "of the replica", "of the rest", "tokens per core-second of the rest", "errors",
    ]  # fmt: skip
    words = (
        "64 streams of 128 tokens, 50 tokens a second each; what the way to the engine adds and costs. As fast as it "
        "goes: of an engine that is never what limits."
    )
    return Table("Overhead", head, rows, words)


def _per_core_second(sample: Sample) -> float | None:
    """Streamed tokens for each second of CPU that is not the replica's."""
    cost = cpu_ms(but=("replica", "child"))(sample)
    return 1e6 / cost if cost else None


def linear_table(samples: Samples, cores: int) -> Table:
    """1, 2, 4, 8 replicas."""
    rows = [
        [
            case,
            told(samples.spread(rate, "linear", case), "{:,.0f}"),
            "" if case == "1" else told(share_of_linear(samples, case), "{:.1%}"),
            told(samples.spread(lambda s: rate(s) / (2000 * int(s.case)), "linear", case), "{:.1%}"),
            told(samples.spread(lambda sample: sample.busy_cores, "linear", case), "{:.2f}")
            + (" (full)" if is_full(samples, case, cores) else ""),
            told(samples.spread(lambda s: s.cpu_s.get("gateway", 0) / s.seconds, "linear", case), "{:.2f}"),
            told(samples.spread(error_rate, "linear", case), "{:.2%}"),
        ]
        for case in samples.cases("linear")
    ]
    head = ["replicas", "tokens/s", "of linear", "of 2,000 each", f"busy cores of {cores}", "gateway's", "errors"]
    words = "256 users for each replica, prompts of 512 tokens, answers of 128; engines and users use the same cores."
    return Table("Linearity", head, sorted(rows, key=lambda row: int(row[0])), words)


def prefix_table(samples: Samples) -> Table:
    """Policies compared with each other."""
    rows = [
        [
            case,
            policy,
            told(samples.spread(lambda sample: sample.hit_rate, "prefix", case, policy), "{:.1%}"),
            told(samples.spread(lambda sample: sample.first_mean_ms, "prefix", case, policy), "{:.0f}"),
            told(samples.spread(first_ms(99), "prefix", case, policy), "{:.0f}"),
            told(samples.spread(rate, "prefix", case, policy), "{:,.0f}"),
            told(samples.spread(goodput, "prefix", case, policy), "{:,.0f}"),
            told(samples.spread(imbalance, "prefix", case, policy), "{:.2f}"),
            told(samples.spread(error_rate, "prefix", case, policy), "{:.2%}"),
        ]
        for case in samples.cases("prefix")
        for policy in POLICIES
    ]
    head = [
        "workload", "policy", "hit rate", "TTFT mean ms", "p99 ms", "tokens/s", "goodput tokens/s", "max/mean load",
        "errors",
    ]  # fmt: skip
    words = (
        "4 replicas, 64 users (8 system prompts: 16), answers of 64 tokens, caches that hold little more than what "
        "runs. Goodput: tokens of complete answers whose first token came within 250 ms."
    )
    return Table("Routing by prefix", head, rows, words)


ENGINE = ("engine",)


def vllm_table(samples: Samples) -> Table:
    """A real vLLM, both ways."""
    rows = []
    for streams in samples.cases("vllm"):
        for way, words in WAYS.items():

            def say(figure: Figure, form: str, streams: str = streams, way: str = way) -> str:
                return told(samples.spread(figure, "vllm", streams, way), form)

            ours = way == "ours"
            rows.append(
                [
                    streams,
                    words,
                    say(rate, "{:.1f}"),
                    told(of_vllm(samples, rate, streams), "{:.1%}") if ours else "",
                    say(first_ms(50), "{:.0f}"),
                    say(cpu_ms(*ENGINE), "{:,.0f}"),
                    say(cpu_ms("replica"), "{:,.0f}"),
                    say(cpu_ms(but=(*ENGINE, "replica")), "{:,.0f}") if ours else "",
                    told(of_vllm(samples, cpu_ms(), streams), "{:.2f}") if ours else "",
                    say(lambda sample: sample.busy_cores, "{:.2f}"),
                ]
            )
    head = [
        "streams", "way", "tokens/s", "of vLLM's own", "TTFT p50 ms", "CPU ms per 1,000 tokens: the model's processes",
        "the server's own", "gateway, HAProxy, Discovery", "all, in vLLM's own", "busy cores",
    ]  # fmt: skip
    words = "SmolLM2-135M on the CPU, answers of 128 tokens; medians of pairs."
    return Table("A real vLLM", head, rows, words)
