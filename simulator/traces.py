"""Reads or generates the arrivals of requests: from a file, or by the name of a shape.

    requests.csv            t_s[,service_time_s]: one line a request
    rates.csv               t_s,rate_per_s: each rate holds until the next line; requests come at random (Poisson)
    step:10x                a rate, and ten times as much from `at` on
    spike:10x               the same, for `length` seconds
    ramp:10x                from the one to the other in a straight line, within `length` seconds
    diurnal:10x             between the two as a sine wave, once in `length` seconds
    noise                   the rate, up to `amplitude` more or less, another one in every `length` seconds

A shape's numbers stand behind its name: `step:10x,rate=20,at=300,duration=1800`.
"""

from __future__ import annotations

import csv
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from controller.errors import InvalidRequest

MOST_REQUESTS = 10_000_000
LONGEST_S = 7 * 86_400.0
"""A week. It takes some minutes, as there is at least one tick a second."""
MOST_PIECES = 1_000_000
"""How often a shape may change its rate."""
PIECE_S = 1.0
"""A rate that changes all the time is constant for this long."""
STEP = 2.0
"""A change of the rate by at least this factor at once is a step."""

Piece = tuple[float, float]
"""(seconds, requests per second from then on)."""

DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "step": {"factor": 10.0, "rate": 10.0, "at": 600.0, "duration": 3600.0},
    "spike": {"factor": 10.0, "rate": 10.0, "at": 600.0, "length": 60.0, "duration": 3600.0},
    "ramp": {"factor": 10.0, "rate": 10.0, "at": 600.0, "length": 1800.0, "duration": 3600.0},
    "diurnal": {"factor": 10.0, "rate": 10.0, "length": 3600.0, "duration": 3600.0},
    "noise": {"rate": 50.0, "amplitude": 0.3, "length": 2.0, "duration": 3600.0},
}
_POSITIVE = ("factor", "length", "duration")


@dataclass(frozen=True, slots=True)
class Step:
    """A moment at which the rate jumps; requests per second before and after."""

    at_s: float
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals, in order. Times are seconds from the beginning."""

    name: str
    times: Sequence[float]
    duration_s: float
    service_times: Sequence[float] | None = None
    """Seconds of work of each request, where the trace has them."""
    steps: tuple[Step, ...] = ()


def read_trace(text: str, rng: Random) -> Trace:
    """The trace that a command line names. Raises InvalidRequest."""
    name = text.partition(":")[0]
    if name in DEFAULTS:
        return _shaped(text, rng)
    if not text.endswith(".csv"):
        shapes = ", ".join(DEFAULTS)
        raise InvalidRequest(f'TRACE: expected a shape ({shapes}) such as step:10x, or a file *.csv, found "{text}"')
    return _from_file(Path(text), rng)


# -------------------------------------------------------------------------------------------------------------- shapes


def _shaped(text: str, rng: Random) -> Trace:
    name, _, words = text.partition(":")
    numbers = _numbers(name, words)
    duration_s = numbers["duration"]
    return _by_rates(text, list(_pieces(name, numbers, rng)), duration_s, rng)


def _numbers(name: str, words: str) -> dict[str, float]:
    numbers = dict(DEFAULTS[name])
    for word in (word for word in words.split(",") if word):
        key, _, value = word.partition("=") if "=" in word else ("factor", "", word.removesuffix("x"))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if key not in numbers:
            raise InvalidRequest(f'TRACE: {name} has no "{key}"; it has {", ".join(numbers)}')
        if not (0 < number < 1e9 or (number == 0 and key not in _POSITIVE)):
            least = "> 0" if key in _POSITIVE else ">= 0"
            raise InvalidRequest(f'TRACE: {name}: {key}: expected a number {least}, found "{value}"')
        numbers[key] = number
    _check_length(f"{name}: duration", numbers["duration"])
    if name == "noise" and numbers["duration"] / numbers["length"] > MOST_PIECES:
        shortest = numbers["duration"] / MOST_PIECES
        raise InvalidRequest(
            f"TRACE: noise: length: expected at least {shortest:g} s for a duration of {numbers['duration']:g} s "
            f"(the rate changes {MOST_PIECES:,} times at most), found {numbers['length']:g}"
        )
    return numbers


def _check_length(what: str, duration_s: float) -> None:
    if duration_s > LONGEST_S:
        raise InvalidRequest(
            f"TRACE: {what}: the simulator takes {LONGEST_S:,.0f} s (a week) at most, found {duration_s:,.0f}"
        )


def _pieces(name: str, numbers: Mapping[str, float], rng: Random) -> Iterator[Piece]:
    rate, duration_s = numbers["rate"], numbers["duration"]
    high = rate * numbers.get("factor", 1.0)
    at, length_s = numbers.get("at", 0.0), numbers.get("length", 0.0)
    match name:
        case "step":
            yield from ((0.0, rate), (at, high))
        case "spike":
            yield from ((0.0, rate), (at, high), (at + length_s, rate))
        case "ramp":
            for now in _seconds(duration_s, PIECE_S):
                yield now, rate + (high - rate) * min(max((now - at) / length_s, 0.0), 1.0)
        case "diurnal":
            for now in _seconds(duration_s, PIECE_S):
                yield now, rate + (high - rate) * (1 - math.cos(2 * math.pi * now / length_s)) / 2
        case _:
            amplitude = numbers["amplitude"]
            for now in _seconds(duration_s, length_s):
                yield now, max(0.0, rate * rng.uniform(1 - amplitude, 1 + amplitude))


def _seconds(duration_s: float, every_s: float) -> Iterator[float]:
    return (number * every_s for number in range(math.ceil(duration_s / every_s)))


def _by_rates(name: str, pieces: Sequence[Piece], duration_s: float, rng: Random) -> Trace:
    ends = [at for at, _ in pieces[1:]] + [duration_s]
    expected = sum(rate * max(min(end, duration_s) - at, 0.0) for (at, rate), end in zip(pieces, ends, strict=True))
    if expected > MOST_REQUESTS:
        raise InvalidRequest(f"TRACE: {name} has about {expected:,.0f} requests; the simulator takes {MOST_REQUESTS:,}")
    times = array("d")
    for (at, rate), end in zip(pieces, ends, strict=True):
        now = at
        while rate > 0 and (now := now + rng.expovariate(rate)) < min(end, duration_s):
            times.append(now)
    return Trace(name, times, duration_s, steps=tuple(_steps(pieces, duration_s)))


def _steps(pieces: Iterable[Piece], duration_s: float) -> Iterator[Step]:
    for (_, before), (at, after) in itertools.pairwise(pieces):
        jumps = max(before, after) >= STEP * min(before, after) and before != after
        if jumps and at < duration_s:
            yield Step(at, before, after)


# --------------------------------------------------------------------------------------------------------------- files


def _from_file(path: Path, rng: Random) -> Trace:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            header = [word.strip() for word in next(lines, [])]
            rows = list(_rows(path, header, lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidRequest(f"TRACE: {path} cannot be read: {reason}") from error
    if not rows:
        raise InvalidRequest(f"TRACE: {path} has no line after its header")
    columns = [array("d", column) for column in zip(*rows, strict=True)]
    _check_length(f"{path}: last t_s", columns[0][-1])
    if header == ["t_s", "rate_per_s"]:
        pieces = list(zip(columns[0], columns[1], strict=True))
        # The last rate holds for as long as the one before it.
        last_s = pieces[-1][0] - pieces[-2][0] if len(pieces) > 1 else 60.0
        return _by_rates(str(path), pieces, pieces[-1][0] + last_s, rng)
    service_times = columns[1] if len(columns) > 1 else None
    return Trace(str(path), columns[0], columns[0][-1] + PIECE_S, service_times)


def _rows(path: Path, header: list[str], lines: Iterable[list[str]]) -> Iterator[list[float]]:
    if header not in (["t_s"], ["t_s", "service_time_s"], ["t_s", "rate_per_s"]):
        raise InvalidRequest(
            f'TRACE: {path}:1: expected "t_s", "t_s,service_time_s" or "t_s,rate_per_s", found "{",".join(header)}"'
        )
    before = 0.0
    for number, words in enumerate(lines, start=2):
        if not words:
            continue
        if number > MOST_REQUESTS + 1:
            raise InvalidRequest(f"TRACE: {path} has more than {MOST_REQUESTS:,} lines")
        try:
            row = [float(word) for word in words]
        except ValueError:
            row = []
        if len(row) != len(header) or not all(0 <= value < 1e9 for value in row):
            raise InvalidRequest(
                f'TRACE: {path}:{number}: expected {len(header)} number(s) >= 0, found "{",".join(words)}"'
            )
        if row[0] < before:
            raise InvalidRequest(
                f"TRACE: {path}:{number}: {row[0]:g} s comes after {before:g} s; sort the lines by t_s"
            )
        before = row[0]
        yield row
