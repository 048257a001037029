"""Decides how many replicas a service needs for its load, once a tick, by Ray Serve's formula and delays. Pure.

    samples of the load --> LoadHistory --(mean, max or min over look_back_period_s)--> load
    load, running replicas --> wanted_replicas --(held for upscale_delay_s or downscale_delay_s)--> target

The load is the number of requests in flight in the service's replicas plus the requests that wait for the service in
its callers and in HAProxy. A stream counts as long as it is open.

Two things differ from Ray Serve. A burst does not wait for `upscale_delay_s` (Knative's panic mode). It is a mean load
over `panic_window_s` of at least `panic_threshold` times what the running replicas are sized for. It raises the target
at once, and again whenever the mean of that window asks for more. Until the burst has been over for
`look_back_period_s`, the target is not lowered. And decisions outlive the controller: the store keeps `Decided`.

Another policy may replace the formula (`controller/desired/policies.py`). Bounds, factors, delays and bursts still
apply.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..model.spec import Aggregation, AutoscaleSpec

SETTLE_S = 1.0
"""A first replica receives all waiting requests at once when it takes traffic; its load is measured from then on."""
MIN_GAP_S = 0.25
"""Samples closer together than this are merged: ticks come in bursts, and the history must not grow with them."""


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """The load of one service at one moment: requests, each counted once."""

    running: float = 0.0
    """In flight in replicas."""
    waiting: float = 0.0
    """Waiting for a replica, in callers and in HAProxy."""
    held: float = 0.0
    """The part of `waiting` that HAProxy holds because no replica takes traffic; set only for a single moment."""

    @property
    def total(self) -> float:
        """In flight and waiting."""
        return self.running + self.waiting


class LoadHistory:
    """The load of one service in the last `keep_s` seconds. A sample holds until the next one."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, ServiceLoad]] = deque()

    def add(self, now: float, load: ServiceLoad, keep_s: float) -> None:
        """Add a sample. `now` never goes back."""
        samples = self._samples
        if samples and now - samples[-1][0] < MIN_GAP_S:
            samples[-1] = (samples[-1][0], load)
        else:
            samples.append((now, load))
        # The last sample before the window is valid at its beginning.
        while len(samples) > 1 and samples[1][0] <= now - keep_s:
            samples.popleft()

    def over(
        self, window_s: float, now: float, aggregation: Aggregation = "mean", since: float = -math.inf
    ) -> ServiceLoad:
        """The load over the window that ends `now`, or over the part of it that has samples; no samples = no load.

        Samples from before `since` do not count, even for the time between them and the next sample.
        """
        begin = now - window_s
        spans: list[tuple[float, ServiceLoad]] = []
        end = now
        for at, load in reversed(self._samples):
            if at < since:
                break
            spans.append((end - max(at, begin), load))
            end = at
            if at <= begin:
                break
        if not spans:
            return ServiceLoad()
        if aggregation != "mean":
            choose = max if aggregation == "max" else min
            return choose((load for _, load in spans), key=lambda load: load.total)
        length = sum(seconds for seconds, _ in spans)
        if length <= 0:
            return spans[0][1]
        return ServiceLoad(
            sum(seconds * load.running for seconds, load in spans) / length,
            sum(seconds * load.waiting for seconds, load in spans) / length,
        )


Direction = Literal["up", "down", "zero", ""]


@dataclass(frozen=True, slots=True)
class Decided:
    """The decided target of one service, and since when another one is wanted. The store keeps the target."""

    target: int
    direction: Direction = ""
    """The change that has been wanted without interruption since `since`; "" = none."""
    since: float = 0.0
    panic_until: float = 0.0
    """The target is not lowered before this time."""
    measured_from: float = -math.inf
    """Requests that waited before this time waited for the first replica, so they do not show how many are needed.
    inf = no replica takes traffic."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of a decision, and of a user's policy."""

    spec: AutoscaleSpec
    load: ServiceLoad
    """Over `look_back_period_s`."""
    recent: ServiceLoad
    """Over `panic_window_s`."""
    latest: ServiceLoad
    """At the latest tick."""
    running: int
    """Replicas that are ready."""
    target: int
    """Replicas wanted so far."""
    now: float
    """Seconds since 1970. A user's policy receives the machine's wall clock, so that it can use the hour of the day."""
    used: bool = False
    """A request has ended since the tick before: a short one is in flight at no tick."""


Policy = Callable[..., int]
"""A user's function: (Situation, **policy_kwargs) -> the number of replicas wanted.

It is called about once a second, in a thread outside the controller's loop. Bounds, factors and delays are applied to
its result. `running` is 0 while no replica is ready: any load starts the first replica, whatever the policy returns.
"""


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """A policy's result for one situation."""

    wanted: int
    because: str
    """The reason, in words with numbers."""


def by_load(situation: Situation) -> PolicyAnswer:
    """The default policy's answer."""
    spec = situation.spec
    because = (
        f"{_load_words(situation.load)} over {spec.look_back_period_s:g} s ({spec.aggregation_function}), "
        f"{spec.target_ongoing_requests:g} per replica wanted"
    )
    return PolicyAnswer(wanted_replicas(situation), because)


def wanted_replicas(situation: Situation) -> int:
    """The default policy: Ray Serve's `_calculate_desired_num_replicas`, within the bounds.

    ratio = load / (target_ongoing_requests * running); wanted = ceil(running * (1 + factor * (ratio - 1))). A downscale
    that the factor rounds back to `running` removes one replica. Without a running replica any load asks for the first.
    """
    spec, running, load = situation.spec, situation.running, situation.load.total
    if running == 0:
        return spec.clamp(max(math.ceil(spec.upscaling_factor), situation.target)) if load > 0 else situation.target
    return smoothed(spec, running, load / spec.target_ongoing_requests)


def smoothed(spec: AutoscaleSpec, running: int, wanted: float) -> int:
    """Go a factor of the way from the running replicas to the wanted ones, within the bounds.

    A downscale that the factor rounds back to `running` removes one replica.
    """
    factor = spec.upscaling_factor if wanted > running else spec.downscaling_factor
    replicas = _ceil(running + factor * (wanted - running))
    if replicas == running and _ceil(wanted) < running:
        replicas -= 1
    return spec.clamp(replicas)


def decide(decided: Decided, situation: Situation, answer: PolicyAnswer | None = None) -> tuple[Decided, str]:
    """The next state, and why the target changed: one sentence with its numbers, "" when it did not change.

    Pure. `answer` is the policy's result; None = the default policy's. A `decided.target` outside the bounds (after an
    edit of them) moves inside at once.
    """
    spec, now = situation.spec, situation.now
    inside = spec.clamp(decided.target)
    if inside != decided.target:
        bounds = f"the bounds are {spec.min} to {spec.max} now"
        return Decided(inside, measured_from=_measured_from(decided, situation)), bounds
    decided = replace(decided, measured_from=_measured_from(decided, situation))
    if situation.running and now < decided.measured_from + spec.panic_window_s:
        # Requests that waited for the first replica are no reason for a second one: its measured load decides that.
        return replace(decided, direction="", since=0.0), ""
    if _is_burst(situation):
        decided = replace(decided, panic_until=now + spec.look_back_period_s)
    if now < decided.panic_until:
        # Also when the first replicas have ended the burst by the formula: its window may still ask for more of them.
        at_once = _wanted_at_once(situation)
        if at_once > decided.target:
            found = Decided(at_once, panic_until=decided.panic_until, measured_from=decided.measured_from)
            return found, _burst_words(situation)
    answer = answer or by_load(situation)
    wanted = spec.clamp(answer.wanted)
    if wanted == decided.target or (wanted < decided.target and now < decided.panic_until):
        return replace(decided, direction="", since=0.0), ""
    direction: Direction = "up" if wanted > decided.target else "zero" if decided.target == 1 else "down"
    if direction == "down":
        wanted = max(wanted, 1)  # the last replica has its own delay
    if decided.direction != direction or (direction == "zero" and situation.used):
        decided = replace(decided, direction=direction, since=now)
    if now - decided.since < _delay_s(spec, direction):
        return decided, ""
    side = "above" if direction == "up" else "below"
    why = f"{answer.because}, {situation.running} running; {side} for {now - decided.since:.0f} s"
    return Decided(wanted, panic_until=decided.panic_until, measured_from=decided.measured_from), why


def due_in_s(decided: Decided, spec: AutoscaleSpec, now: float) -> float | None:
    """Seconds until the current delay is over; None without a delay."""
    return max(0.0, decided.since + _delay_s(spec, decided.direction) - now) if decided.direction else None


def _measured_from(decided: Decided, situation: Situation) -> float:
    """Since when load counts: SETTLE_S after the first replica takes traffic."""
    if situation.running == 0 or situation.latest.held:
        return math.inf
    return min(decided.measured_from, situation.now + SETTLE_S)


def _delay_s(spec: AutoscaleSpec, direction: Direction) -> float:
    if direction == "up":
        return spec.upscale_delay_s
    to_zero_s = spec.downscale_to_zero_delay_s if direction == "zero" else None
    return spec.downscale_delay_s if to_zero_s is None else to_zero_s


def _is_burst(situation: Situation) -> bool:
    """Whether the load is too high to wait for the delay. Without a running replica any load is a burst."""
    spec = situation.spec
    if situation.running == 0:
        return situation.latest.total > 0
    if spec.panic_threshold is None:
        return False
    return situation.recent.total >= spec.panic_threshold * spec.target_ongoing_requests * situation.running


def _wanted_at_once(situation: Situation) -> int:
    """The replicas that a burst asks for."""
    spec = situation.spec
    if situation.running == 0:
        return wanted_replicas(replace(situation, load=situation.latest)) if situation.latest.total > 0 else 0
    if spec.panic_threshold is None:
        return 0
    return spec.clamp(_ceil(situation.recent.total / spec.target_ongoing_requests))


def _ceil(replicas: float) -> int:
    """math.ceil that ignores floating-point error: 3.0000000000000004 gives 3, not 4."""
    return math.ceil(replicas - 1e-9)


def _burst_words(situation: Situation) -> str:
    spec = situation.spec
    if situation.running == 0:
        held = situation.latest.held
        woken = f"woken by {held:.0f} held request{'' if held == 1 else 's'}: " if held else ""
        return f"{woken}{_load_words(situation.latest)}, no replica running"
    return (
        f"a burst: {_load_words(situation.recent)} over {spec.panic_window_s:g} s, "
        f"{spec.target_ongoing_requests:g} per replica wanted, {situation.running} running"
    )


def _load_words(load: ServiceLoad) -> str:
    return f"{load.total:.1f} requests ({load.running:.1f} in work, {load.waiting:.1f} waiting)"


def situation_of(
    spec: AutoscaleSpec,
    history: LoadHistory,
    running: int,
    target: int,
    now: float,
    measured_from: float = -math.inf,
    *,
    used: bool = False,
) -> Situation:
    """Return the input of a decision. Once a replica runs, load before `measured_from` does not count."""
    since = measured_from if running else -math.inf
    return Situation(
        spec,
        load=history.over(spec.look_back_period_s, now, spec.aggregation_function, since),
        recent=history.over(spec.panic_window_s, now, since=since),
        latest=history.over(0.0, now),
        running=running,
        target=target,
        now=now,
        used=used,
    )


def longest_window_s(specs: Sequence[AutoscaleSpec]) -> float:
    """The seconds of history that decisions for these specs need."""
    return max((max(spec.look_back_period_s, spec.panic_window_s) for spec in specs), default=0.0)
