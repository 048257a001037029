"""What `make bench` was asked for: NAME=VALUE words, as make hands them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODES = ("containers", "processes")
APPS = ("echo", "stream", "dlrm")
PARTS = (*APPS, "open", "limits", "ablation", "eight", "triton")
THOROUGH = frozenset(("open", "limits", "ablation", "eight"))
"""What QUICK=1 leaves out."""
ON_DEMAND = frozenset(("triton",))
"""Only where ONLY names it: it needs an image more."""
NAMES = ("MODE", "ROUNDS", "SECONDS", "ONLY", "QUICK", "PEER", "WATCH", "DEVICE", "OUT")


class OptionsError(Exception):
    """What was asked for cannot be done; the message names every wrong word."""


@dataclass(frozen=True, slots=True)
class Options:
    """| word | meaning |
    |---|---|
    | MODE | containers: ours as `make up` starts it, the default. processes: ours as bare processes |
    | ROUNDS | alternating rounds; medians and spreads are over them. 3 |
    | SECONDS | of one measurement. 5 |
    | ONLY | parts, with commas: echo, stream, dlrm (closed loop), open, limits, ablation, eight: all; and triton |
    | QUICK | 1: one round of two seconds each with few cases, to see that it works |
    | PEER | 0: without the peer |
    | WATCH | 0: each request tells the peer not to watch for clients that leave, as in its makers' benchmark. 1 |
    | DEVICE | cpu, cuda, or auto (the default): the ranker's, on both sides |
    | OUT | directory of the results |
    """

    mode: str
    rounds: int
    seconds: float
    parts: frozenset[str]
    quick: bool
    peer: bool
    watch: bool
    device: str
    out: Path | None

    @property
    def apps(self) -> tuple[str, ...]:
        """The applications that are measured: those named, or all where only other parts were named."""
        named = tuple(app for app in APPS if app in self.parts)
        return named or APPS


def read(words: Sequence[str]) -> Options:
    """Options from NAME=VALUE words; an empty value is the default. Raises OptionsError."""
    problems: list[str] = []
    given: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or name not in NAMES:
            problems.append(f'"{word}": expected NAME=VALUE with one of {", ".join(NAMES)}')
        elif value.strip():
            given[name] = value.strip()
    quick = _flag(given, "QUICK", False, problems)
    options = Options(
        mode=_one_of(given, "MODE", MODES, "containers", problems),
        rounds=int(_number(given, "ROUNDS", 1 if quick else 3, 1, 99, problems)),
        seconds=_number(given, "SECONDS", 2 if quick else 5, 0.5, 600, problems),
        parts=_parts(given.get("ONLY", ""), quick, problems),
        quick=quick,
        peer=_flag(given, "PEER", True, problems),
        watch=_flag(given, "WATCH", True, problems),
        device=_one_of(given, "DEVICE", ("auto", "cpu", "cuda"), "auto", problems),
        out=Path(given["OUT"]) if "OUT" in given else None,
    )
    if "triton" in options.parts and options.mode == "processes":
        problems.append("ONLY: triton needs MODE=containers")
    if problems:
        raise OptionsError("\n".join(problems))
    return options


def _one_of(given: dict[str, str], name: str, known: Sequence[str], default: str, problems: list[str]) -> str:
    value = given.get(name, default)
    if value not in known:
        problems.append(f'{name}: expected {" or ".join(known)}, found "{value}"')
    return value


def _number(given: dict[str, str], name: str, default: float, low: float, high: float, problems: list[str]) -> float:
    raw = given.get(name, str(default))
    try:
        value = float(raw)
    except ValueError:
        value = low - 1
    if not low <= value <= high or (name == "ROUNDS" and value != int(value)):
        problems.append(f'{name}: expected a number from {low:g} to {high:g}, found "{raw}"')
        return default
    return value


def _flag(given: dict[str, str], name: str, default: bool, problems: list[str]) -> bool:
    value = given.get(name, "1" if default else "0")
    if value not in ("0", "1"):
        problems.append(f'{name}: expected 0 or 1, found "{value}"')
    return value == "1"


def _parts(raw: str, quick: bool, problems: list[str]) -> frozenset[str]:
    parts = [part.strip() for part in raw.split(",") if part.strip()]
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        problems.append(f'ONLY: expected some of {", ".join(PARTS)}, found "{", ".join(unknown)}"')
    return frozenset(parts or set(PARTS) - ON_DEMAND - (THOROUGH if quick else set()))
