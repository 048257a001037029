"""What is measured, in which order. Pure: the same options give the same schedule.

A visit starts one subject with one chain of services, measures a few loads and stops it again: nothing else
runs during a measurement. In each round the two sides take turns at each chain, in the other order in the next round,
so that a machine that gets slower or faster favours neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.bench.options import Options

OPEN_SHARE: Final = 0.7
"""Of the smaller peak: the arrival rate of the open loops."""


@dataclass(frozen=True, slots=True)
class App:
    """One application and the loads it gets. `{user_id}` in a path runs through 1 to 1000."""

    name: str
    chain: str
    """The services that answer it: echo and stream have the same."""
    path: str
    levels: tuple[int, ...]
    """Connections of the closed loops."""
    main_level: int
    """The one that the target speaks of."""
    unit: str

    @property
    def first_path(self) -> str:
        """The path of one request."""
        return self.path.replace("{user_id}", "1")


APPS: Final = {
    app.name: app
    for app in (
        App("echo", "echo", "/echo?message=", (1, 16, 64, 128), 64, "requests"),
        App("stream", "echo", "/echo/stream?message=Hello&num_tokens=50", (1, 8, 32, 64), 32, "responses"),
        App("dlrm", "dlrm", "/recsys/?user_id={user_id}", (10, 50, 100, 200), 100, "requests"),
    )
}

OPEN, FIRST, MODEL_ALONE, EIGHT_LONGER = 1.4, 0.5, 0.6, 2
"""Lengths of the other loads, as parts of a closed loop's: open loops need more for their tails, slow subjects more for
any answers, limits less."""

TOKENS: Final = 50
"""Events of one stream before its [DONE]; the number in the path above."""

REPLICAS: Final = 8
"""Of each service, in the part `eight`: as in the peer's own benchmark."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Something that is measured. `key` names it in the results."""

    key: str
    label: str
    kind: str
    """ours and bare (both as MODE says), processes (ours as such), peer (at its best), peer_default or model"""
    env: tuple[tuple[str, str], ...] = ()
    """Of its replicas."""
    stack: tuple[tuple[str, str], ...] = ()
    """Words of .env, where it is a stack in containers."""
    replicas: int = 0
    """Of each service; 0: as many as the chain has."""
    has_key: bool = False
    """Whether clients come with a key that has a limit."""
    has_tls: bool = False


OURS: Final = Subject("ours", "Pierhead", "ours")
PEER: Final = Subject("peer", "Ray Serve", "peer")
BARE: Final = Subject("bare", "the same chain with nothing of ours", "bare")
MODEL: Final = Subject("model", "model alone", "model")

PROCESSES: Final = Subject("ours:processes", "bare processes behind the peer's HAProxy", "processes")
ALL_LINES: Final = Subject("ours:all-lines", "a line of every request", "ours", stack=(("PIERHEAD_ACCESS_LOG", "all"),))
SAMPLED: Final = (("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "0.01"))
VARIANTS: Final = (
    ALL_LINES,
    Subject("ours:key", "a key with a limit", "ours", has_key=True),
    Subject("ours:tls-key", "TLS, a key with a limit", "ours", has_key=True, has_tls=True),
    Subject("ours:untraced", "without traces", "ours", stack=(("OTEL_SDK_DISABLED", "true"),)),
    Subject("ours:sampled", "1 % of the requests in the sample", "ours", stack=SAMPLED),
    Subject("ours:tcp", "ports in place of sockets", "ours", stack=(("PIERHEAD_LISTEN", "tcp"),)),
    PROCESSES,
    Subject("ours:grpc", "plain gRPC instead of lanes", "ours", (("PIERHEAD_TRANSPORT", "grpc"),)),
)
"""The ablation: each is ours but for one thing."""
TRITON: Final = Subject("ours:triton", "Triton in place of the PyTorch ranker", "ours")
"""The part `triton`."""

EIGHT: Final = (
    Subject("ours:eight", "Pierhead", "ours", replicas=REPLICAS),
    Subject("peer:eight", "Ray Serve at its best", "peer", replicas=REPLICAS),
    Subject("peer:eight-default", "Ray Serve as it comes", "peer_default", replicas=REPLICAS),
)

WAYS: Final = {
    "closed": "127.0.0.1, the published port",
    "remote": "another network namespace, the published port",
    "address": "HAProxy's container address",
    "alone": "a handler without a call",
}
"""Closed loops by the way that their requests take; the last one is the bare chain's. MODE=processes has the first and
the last, the peer the first two."""


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement within a visit.

    Those of WAYS: wrk with `level` connections. first: our generator with as many, for the time to the first event.
    open: our generator at a rate that the closed loops decide. model: the model without any serving on `level` threads
    (0 = all cores).
    """

    app: str
    load: str
    level: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Visit:
    """Start, measure, stop."""

    round: int
    subject: Subject
    chain: str
    steps: tuple[Step, ...]

    @property
    def apps(self) -> tuple[str, ...]:
        """Those that its steps ask."""
        return tuple(dict.fromkeys(step.app for step in self.steps))


def schedule(options: Options) -> list[Visit]:
    """Every visit, in order."""
    return [
        visit
        for number in range(1, options.rounds + 1)
        for chain in ("echo", "dlrm")
        for visit in _visits(options, number, chain)
        if visit.steps
    ]


def _visits(options: Options, number: int, chain: str) -> Iterator[Visit]:
    apps = [app for app in APPS.values() if app.chain == chain and app.name in options.apps]
    pair = [OURS, PEER] if options.peer else [OURS]
    # The peer first in the first round: its peak, the smaller one, decides the rate of both open loops.
    for subject in pair if number % 2 == 0 else reversed(pair):
        yield _visit(number, subject, chain, [_main_steps(options, app, subject) for app in apps])
    if "limits" in options.parts:
        limits = BARE if chain == "echo" else MODEL
        yield _visit(number, limits, chain, [_limit_steps(options, app) for app in apps])
    if "ablation" in options.parts:
        for variant in VARIANTS if options.mode == "containers" else VARIANTS[-1:]:
            yield _visit(number, variant, chain, [_variant_steps(options, app, variant) for app in apps])
    if "triton" in options.parts and chain == "dlrm":
        yield _visit(number, TRITON, chain, [_closed(options, app, app.main_level) for app in apps])
    if "eight" in options.parts and chain == "echo" and number == 1:
        for subject in EIGHT if options.peer else EIGHT[:1]:
            steps = [[Step(app.name, "closed", app.main_level, options.seconds * EIGHT_LONGER)] for app in apps]
            yield _visit(number, subject, chain, steps)


def _visit(number: int, subject: Subject, chain: str, steps: list[list[Step]]) -> Visit:
    return Visit(number, subject, chain, tuple(step for of_app in steps for step in of_app))


def _closed(options: Options, app: App, *levels: int) -> list[Step]:
    return [Step(app.name, "closed", level, options.seconds) for level in levels]


def _main_steps(options: Options, app: App, subject: Subject) -> list[Step]:
    closed = app.name in options.parts or not options.parts & set(APPS)
    steps: list[Step] = []
    if closed or "open" in options.parts:
        levels = app.levels if closed and not options.quick else (app.main_level,)
        if options.quick and app.name == "echo":
            levels = (1, app.main_level)
        steps += _closed(options, app, *levels)
    if closed and app.name == "echo" and options.mode == "containers":
        ways = ("remote", "address") if subject is OURS else ("remote",)
        steps += [Step(app.name, way, app.main_level, options.seconds) for way in ways]
    if closed and app.name == "stream":
        steps += _first(options, app)
    if "open" in options.parts:
        steps.append(Step(app.name, "open", 0, options.seconds * OPEN))
    return steps


def _first(options: Options, app: App) -> list[Step]:
    levels = (app.main_level,) if options.quick else (1, app.main_level)
    return [Step(app.name, "first", level, options.seconds * FIRST) for level in levels]


def _limit_steps(options: Options, app: App) -> list[Step]:
    if app.name == "echo":
        return [*_closed(options, app, 1, app.main_level), Step(app.name, "alone", app.main_level, options.seconds)]
    if app.name == "stream":
        opened = [Step(app.name, "open", 0, options.seconds * OPEN)] if "open" in options.parts else []
        return [*_closed(options, app, app.main_level), *_first(options, app), *opened]
    return [Step(app.name, "model", threads, options.seconds * MODEL_ALONE) for threads in (1, 0)]


def _variant_steps(options: Options, app: App, variant: Subject) -> list[Step]:
    if app.name == "echo":
        return _closed(options, app, 1, app.main_level)
    return _closed(options, app, app.main_level) if app.name == "stream" or variant is PROCESSES else []


# ------------------------------------------------------------------------------------------------------- time to come

_START_S: Final = {"ours": 25.0, "processes": 4.0, "peer": 15.0, "peer_default": 15.0, "bare": 8.0, "model": 6.0}
_DLRM_START_S: Final = 6.0
_REPLICA_START_S: Final = 2.0
WARM_S: Final = {"first": 0.5, "open": 1.0, "model": 0.5}
"""Load before each measurement that is not counted; before those of wrk 1 s."""


def expected_seconds(visit: Visit) -> float:
    """How long a visit takes, roughly: for what the progress lines say."""
    start = _START_S[visit.subject.kind] + _REPLICA_START_S * 2 * visit.subject.replicas
    start += _DLRM_START_S if visit.chain == "dlrm" else 0
    return start + sum(step.seconds + WARM_S.get(step.load, 1.0) + 0.7 for step in visit.steps)
