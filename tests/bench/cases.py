"""What is measured, in which order. Pure: the same options give the same schedule.

A visit starts one subject with one application, measures a few loads and stops it again: nothing that is not measured
runs beside what is. In each round the two sides take turns at each application, the other way round in the next round,
so that a machine that gets slower or faster meanwhile favours neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tests.bench.options import Options

OPEN_SHARE: Final = 0.7
"""Of the smaller peak: the arrival rate of the open loops."""


@dataclass(frozen=True, slots=True)
class App:
    """One application and the loads it gets. `{user_id}` in a path runs through 1 to 1000."""

    name: str
    path: str
    levels: tuple[int, ...]
    """Connections of the closed loops."""
    main_level: int
    """The one that the target speaks of."""
    unit: str


APPS: Final = {
    app.name: app
    for app in (
        App("echo", "/echo?message=", (1, 16, 64, 128), 64, "requests"),
        App("stream", "/echo/stream?message=Hello&num_tokens=50", (1, 8, 32, 64), 32, "responses"),
        App("dlrm", "/recsys/?user_id={user_id}", (10, 50, 100, 200), 100, "requests"),
    )
}

OPEN, FIRST, GRPC, MODEL_ALONE = 1.4, 0.5, 0.5, 0.6
"""Lengths of the other loads, as parts of a closed loop's: open loops need more for their tails, limits less."""

TOKENS: Final = 50
"""Events of one stream before its [DONE]; the number in the path above."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Something that is measured. `key` names it in the results."""

    key: str
    label: str
    kind: str
    """ours, peer, single_stage, asgi_stage, bare or model"""
    env: tuple[tuple[str, str], ...] = ()
    haproxy: bool = True
    setting: str = ""
    """The runtime's setting that the variant changes: one that it does not have is left out."""
    only: str = ""
    """The role whose processes `env` is for: ingress or child; "" = both."""

    def env_of(self, role: str) -> dict[str, str]:
        """The variables that this variant sets for the processes of a role."""
        return dict(self.env) if self.only in ("", role) else {}


OURS: Final = Subject("ours", "Pierhead", "ours")
PEER: Final = Subject("peer", "Ray Serve", "peer")
SINGLE_STAGE: Final = Subject("single_stage", "one aiohttp stage", "single_stage")
ASGI_STAGE: Final = Subject("asgi_stage", "one FastAPI stage", "asgi_stage")
BARE: Final = Subject("bare", "aiohttp + plain grpc.aio", "bare")
MODEL: Final = Subject("model", "model alone", "model")

VARIANTS: Final = (
    Subject("ours:grpc", "plain gRPC instead of lanes", "ours", (("PIERHEAD_TRANSPORT", "grpc"),), setting="transport"),
    Subject("ours:no-haproxy", "without HAProxy", "ours", haproxy=False),
    Subject(
        "ours:two-loops",
        "user code on a loop of its own",
        "ours",
        (("PIERHEAD_RUN_USER_CODE_IN_SEPARATE_THREAD", "true"),),
        setting="run_user_code_in_separate_thread",
        only="child",  # HTTP handlers stay on the server's loop
    ),
    Subject("ours:no-access-log", "without the log line per request", "ours", (("PIERHEAD_ACCESS_LOG", "false"),)),
)
"""The ablation: each is ours but for one thing."""


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement within a visit.

    closed: wrk with `level` connections. first: our generator with as many, for the time to the first event. open: our
    generator at a rate that the closed loops decide. grpc: h2load with `level` calls in flight, straight to the child.
    model: the model without any serving on `level` threads (0 = all cores).
    """

    load: str
    level: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Visit:
    """Start, measure, stop."""

    round: int
    subject: Subject
    app: str
    steps: tuple[Step, ...]


def schedule(options: Options, variants: Iterable[Subject] = VARIANTS) -> list[Visit]:
    """Every visit, in order. `variants`: those of the ablation that the runtime knows."""
    variants = tuple(variants)
    return [
        visit
        for number in range(1, options.rounds + 1)
        for app in options.apps
        for visit in _visits(options, number, APPS[app], variants)
        if visit.steps
    ]


def _visits(options: Options, number: int, app: App, variants: tuple[Subject, ...]) -> Iterator[Visit]:
    pair = [OURS, PEER] if options.peer else [OURS]
    # The peer first in the first round: its peak, the smaller one, decides the rate of both open loops.
    for subject in pair if number % 2 == 0 else reversed(pair):
        yield Visit(number, subject, app.name, _main_steps(options, app, subject))
    if "limits" in options.parts:
        yield from _limits(options, number, app)
    if "ablation" in options.parts:
        for variant in variants:
            yield Visit(number, variant, app.name, _variant_steps(options, app, variant))


def _main_steps(options: Options, app: App, subject: Subject) -> tuple[Step, ...]:
    steps: list[Step] = []
    closed = app.name in options.parts or not options.parts & set(APPS)
    if closed or "open" in options.parts:
        levels = app.levels if closed and not options.quick else (app.main_level,)
        if options.quick and app.name == "echo":
            levels = (1, app.main_level)
        steps += [Step("closed", level, options.seconds) for level in levels]
    if closed and app.name == "stream":
        steps += [Step("first", step.level, options.seconds * FIRST) for step in steps if step.load == "closed"]
    if "open" in options.parts:
        steps.append(Step("open", 0, options.seconds * OPEN))
    if closed and subject is OURS and app.name == "echo":
        steps += _grpc_steps(options)
    return tuple(steps)


def _limits(options: Options, number: int, app: App) -> Iterator[Visit]:
    if app.name == "echo":
        steps = (Step("closed", 1, options.seconds), Step("closed", app.main_level, options.seconds))
        yield Visit(number, SINGLE_STAGE, app.name, steps[1:])
        yield Visit(number, ASGI_STAGE, app.name, steps[:1])
        yield Visit(number, BARE, app.name, (*steps, *_grpc_steps(options)))
    elif app.name == "stream":
        levels = (1,) if options.quick else (1, app.main_level)
        firsts = [Step("first", level, options.seconds * FIRST) for level in levels]
        opened = [Step("open", 0, options.seconds * OPEN)] if "open" in options.parts else []
        yield Visit(number, BARE, app.name, (Step("closed", app.main_level, options.seconds), *firsts, *opened))
    else:
        yield Visit(
            number,
            MODEL,
            app.name,
            (Step("model", 1, options.seconds * MODEL_ALONE), Step("model", 0, options.seconds * MODEL_ALONE)),
        )


def _grpc_steps(options: Options) -> tuple[Step, ...]:
    return tuple(Step("grpc", calls, options.seconds * GRPC) for calls in (1, 64))


def _variant_steps(options: Options, app: App, variant: Subject) -> tuple[Step, ...]:
    main = Step("closed", app.main_level, options.seconds)
    # What is on a request's way shows in a lone request, too; the rest only under load.
    on_the_way = variant.setting == "transport" or not variant.haproxy
    if app.name == "echo":
        return (Step("closed", 1, options.seconds), main) if on_the_way else (main,)
    return (main,) if variant.setting == "transport" or (app.name == "stream" and on_the_way) else ()


# ------------------------------------------------------------------------------------------------------- time to come

_START_S: Final = {"ours": 4.0, "peer": 12.0, "single_stage": 3.0, "asgi_stage": 3.0, "bare": 3.0, "model": 6.0}
_DLRM_START_S: Final = 6.0
WARM_S: Final = {"closed": 1.0, "first": 0.5, "open": 1.0, "grpc": 0.5, "model": 0.5}
"""Load before each measurement that is not counted."""


def expected_seconds(visit: Visit) -> float:
    """How long a visit takes, roughly: for what the progress lines say."""
    start = _START_S[visit.subject.kind] + (_DLRM_START_S if visit.app == "dlrm" else 0)
    return start + sum(step.seconds + WARM_S[step.load] + 0.7 for step in visit.steps)
