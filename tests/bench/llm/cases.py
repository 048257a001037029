"""What `make bench-llm` measures: engines, users, and the order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PARTS: Final = ("overhead", "linear", "prefix", "vllm")
NAMES: Final = ("ROUNDS", "SECONDS", "ONLY", "QUICK", "PEER", "OUT")
MODEL: Final = "mock"
POLICIES: Final = ("power_of_two", "prefix")


class OptionsError(Exception):
    """What was asked for cannot be done; the message names every wrong word."""


@dataclass(frozen=True, slots=True)
class Options:
    """| word | meaning |
    |---|---|
    | ROUNDS | alternating rounds of `overhead`; what takes longer, `linear`, `prefix` and the peer, has one less. 3 |
    | SECONDS | of one measurement. 6 |
    | ONLY | parts, separated by commas: overhead, linear, prefix, vllm. All |
    | QUICK | 1: one short round of few cases, without the peer and vLLM, to see that it works |
    | PEER | 0: without the peer |
    | OUT | directory of the results |
    """

    rounds: int = 3
    seconds: float = 6.0
    parts: tuple[str, ...] = PARTS
    quick: bool = False
    peer: bool = True
    out: Path | None = None


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
    quick = _one_of("0 or 1", given.get("QUICK", "0"), "QUICK", ("0", "1"), problems) == "1"
    every = [part for part in PARTS if part != "vllm" or not quick]  # it takes minutes to start
    parts = tuple(part.strip() for part in given.get("ONLY", ",".join(every)).split(",") if part.strip())
    for part in parts:
        _one_of(f"some of {', '.join(PARTS)}", part, "ONLY", PARTS, problems)
    options = Options(
        rounds=int(_number(given, "ROUNDS", 1 if quick else 3, 1, 99, problems)),
        seconds=_number(given, "SECONDS", 1.5 if quick else 6, 0.5, 600, problems),
        parts=parts,
        quick=quick,
        peer=_one_of("0 or 1", given.get("PEER", "0" if quick else "1"), "PEER", ("0", "1"), problems) == "1",
        out=Path(given["OUT"]) if "OUT" in given else None,
    )
    if problems:
        raise OptionsError("\n".join(problems))
    return options


def _one_of(expected: str, value: str, name: str, known: Sequence[str], problems: list[str]) -> str:
    if value not in known:
        problems.append(f'{name}: expected {expected}, found "{value}"')
    return value


def _number(given: Mapping[str, str], name: str, default: float, low: float, high: float, problems: list[str]) -> float:
    raw = given.get(name, str(default))
    try:
        value = float(raw)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        problems.append(f'{name}: expected a number from {low:g} to {high:g}, found "{raw}"')
    return value


@dataclass(frozen=True, slots=True)
class Users:
    """Who asks: each sends its next request when its answer is complete and `think_s` (on average) have passed."""

    count: int
    workload: str
    """One of load.WORKLOADS."""
    tokens: int
    """Of each answer."""
    warm_s: float
    think_s: float = 0.0
    slow_s: float = 1.0
    """Answers whose first token takes longer are no goodput."""
    answers: int = 0
    """Of each user, who begin at the same time; the measurement ends with the last one. 0: as long as is measured."""
    model: str = MODEL


STREAMS: Final = Users(64, "nothing shared", 128, warm_s=3.0)
OVERHEAD_ENGINE: Final[Mapping[str, Any]] = {
    "tokens_per_s": 3200.0, "request_tokens_per_s": 50.0, "ttft_s": 0.05, "max_num_seqs": 256, "step_s": 0.02,
}  # fmt: skip
"""64 streams have 50 tokens a second each: one in each of the engine's steps, as with continuous batching."""

FREE: Final = "free"
"""The variant of `overhead` in which the engine is never what limits."""
FREE_ENGINE: Final[Mapping[str, Any]] = {
    "tokens_per_s": 1e6, "request_tokens_per_s": 2000.0, "max_num_seqs": 256, "step_s": 0.002,
}  # fmt: skip
"""It makes tokens faster than anybody passes them on."""
FREE_SUBJECTS: Final = ("haproxy", "peer")

SUBJECTS: Final = {
    "floor": "the replica alone, asked over a lane",
    "gateway": "gateway, replica",
    "haproxy": "HAProxy, gateway, replica",
    "relayed": "HAProxy, gateway, replica, without shared memory",
    "bare": "the same packages with nothing of ours",
    "peer": "Ray Serve LLM",
}

LINEAR_ENGINE: Final[Mapping[str, Any]] = {"tokens_per_s": 2000.0, "max_num_seqs": 256}
LINEAR_USERS: Final = 256
"""For each replica."""
REPLICAS: Final = (1, 2, 4, 8)


def linear_users(replicas: int, *, quick: bool) -> Users:
    """Prompts of 512 tokens; each answer takes 16 s, as 256 users share 2,000 tokens a second."""
    if quick:
        return Users(16 * replicas, "512 tokens", 128, warm_s=1.0)
    return Users(LINEAR_USERS * replicas, "512 tokens", 128, warm_s=6.0)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prompts that begin alike, or not, and the cache of each engine."""

    workload: str
    kv_blocks: int
    """Of 16 tokens. The requests that run need 20 of them each, less what they share."""
    users: int = 64


PREFIX_REPLICAS: Final = 4
PREFIX_USERS: Final = Users(64, "", 64, warm_s=3.0, think_s=0.1, slow_s=0.25)
PREFIXES: Final = (
    # Few users and caches for half of the prompts: what runs would else hold all of them in every replica.
    Prefixes("8 system prompts", 96, users=16),
    Prefixes("conversations", 1200),
    Prefixes("nothing shared", 448),
    Prefixes("one hot prefix", 448),
)


def prefix_engine(case: Prefixes) -> dict[str, Any]:
    """Reads 8,000 tokens a second, so that a prompt of 256 tokens that is not cached costs 32 ms."""
    return {
        "tokens_per_s": 1000.0, "prefill_tokens_per_s": 8000.0, "max_num_seqs": 64, "kv_blocks": case.kv_blocks,
        "max_model_len": min(2048, 16 * case.kv_blocks),
    }  # fmt: skip


VLLM_MODEL: Final = "smollm2"
VLLM_ENGINE: Final[Mapping[str, Any]] = {
    "max_model_len": 2048, "enforce_eager": True, "dtype": "float32", "gpu_memory_utilization": 0.2,
}  # fmt: skip
"""As in compose/apps/llm.yaml; two of them have to fit into memory."""
VLLM_STREAMS: Final = (1, 8)
VLLM_PAIRS: Final = 2
"""Comparisons in a round: one way after the other, and the other way round."""
WAYS: Final = {"ours": "HAProxy, gateway, LLM server", "alone": "`vllm serve`, asked directly"}


def vllm_users(streams: int, *, quick: bool) -> Users:
    """Prompts of some 60 tokens, one answer for each user."""
    return Users(streams, "questions", 16 if quick else 128, warm_s=0.0, answers=1, model=VLLM_MODEL)


def order(names: Sequence[str], round_number: int) -> list[str]:
    """One after the other, the next round the other way round."""
    return list(names) if round_number % 2 else list(reversed(names))
