"""How well a policy routes prompts, without a process: engines with a prefix cache, gateways with a policy each, users.

    users --> gateways (a policy object each, and what it can know of loads) --> engines (shared time, block cache)

A discrete-event simulation: the same seed gives the same run, and other policies see the same users. An engine shares
its time among the requests that it has; the part of a prompt that is in its cache costs it nothing. A gateway knows its
own calls, and of others' what replies say, for as long as the runtime trusts that (`pool.REPORT_TRUSTED_S`).
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import cast

from pierhead.calls.pool import REPORT_TRUSTED_S
from pierhead.policies.policy import Policy
from pierhead.policies.registry import make_policy

BLOCK = 64
"""Characters of a cached block: 16 tokens of four."""

CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Hardware:
    """One engine."""

    tokens_per_s: float = 2000.0
    """Generated for all of its requests together."""
    most_per_request: float = 50.0
    """Generated for one request at most: an engine with few requests is not fully used."""
    prefill_cost: float = 0.25
    """Of a token of the prompt that is read, in generated tokens."""
    cache_blocks: int = 4000
    """Blocks that it keeps: 4,000 are 64,000 tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user asks for."""

    text: str
    tokens: int
    """To be generated."""


@dataclass(frozen=True, slots=True)
class _Message:
    routing_text: str


@dataclass(frozen=True, slots=True)
class _Call:
    request: _Message
    path: str = "/pierhead.llm.v1.LLMServer/Chat"
    session_id: str | None = None
    model_id: str | None = None


class _Cache:
    """vLLM's: blocks known by all that is before them; when there is no room, those used longest ago go, ends first."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def read(self, text: str) -> int:
        """Characters of `text` that it had; from now on it has all of them."""
        keys, key = [], 0
        for start in range(0, len(text) - len(text) % BLOCK, BLOCK):
            key = hash((key, text[start : start + BLOCK]))
            keys.append(key)
        had = sum(1 for _ in itertools.takewhile(self._blocks.__contains__, keys))
        for key in reversed(keys):  # so that a text loses its end first
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return had * BLOCK


class _Engine:
    """Processor sharing, by virtual time: a request is done when so much work was given to each that is there."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._cache = _Cache(hardware.cache_blocks)
        self._given = 0.0
        self._at = 0.0
        self._waiting: list[tuple[float, int]] = []
        self.requests = 0
        self.busy_s = 0.0
        """Requests times seconds."""
        self.routed = 0

    def _rate(self) -> float:
        return min(self._hardware.most_per_request, self._hardware.tokens_per_s / max(1, self.requests))

    def advance(self, now: float) -> None:
        self._given += self._rate() * (now - self._at)
        self.busy_s += self.requests * (now - self._at)
        self._at = now

    def begin(self, prompt: Prompt, number: int, now: float) -> int:
        """Returns the characters that were cached."""
        self.advance(now)
        cached = self._cache.read(prompt.text)
        reading = (len(prompt.text) - cached) / CHARS_PER_TOKEN * self._hardware.prefill_cost + 1
        heapq.heappush(self._waiting, (self._given + reading, -number))
        heapq.heappush(self._waiting, (self._given + reading + prompt.tokens, number))
        self.requests += 1
        self.routed += 1
        return cached

    def due(self) -> float | None:
        """When something happens next, if nobody comes."""
        if not self._waiting:
            return None
        return self._at + max(0.0, self._waiting[0][0] - self._given) / self._rate()

    def pop(self, now: float) -> int:
        """What happens now: a request's number when it is done, less than 0 at its first token."""
        self.advance(now)
        number = heapq.heappop(self._waiting)[1]
        if number > 0:
            self.requests -= 1
        return number


class _Seen:
    """A replica as one gateway sees it: a Candidate."""

    models: frozenset[str] = frozenset()
    node = ""
    stats: Mapping[str, float] = {}

    def __init__(self, name: str, engine: _Engine) -> None:
        self.name = name
        self.engine = engine
        self.own = 0
        self.others = 0
        self.others_until = 0.0
        self.load = 0

    def look(self, now: float) -> None:
        if now >= self.others_until:
            self.others = 0
        self.load = self.own + self.others

    def replied(self, now: float) -> None:
        self.own -= 1
        self.others = max(0, self.engine.requests - self.own)
        self.others_until = now + REPORT_TRUSTED_S


@dataclass(slots=True)
class Result:
    """What came of it, the warm-up left out."""

    latencies: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    read: int = 0
    cached: int = 0
    routed: list[int] = field(default_factory=list)
    """Requests of each replica."""
    busy_s: list[float] = field(default_factory=list)
    """Requests in flight at each replica, times seconds."""

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' characters that were cached."""
        return self.cached / max(1, self.read)

    @property
    def latency(self) -> float:
        """Mean, in seconds."""
        return sum(self.latencies) / len(self.latencies)

    @property
    def ttft(self) -> float:
        """Mean seconds to the first token."""
        return sum(self.ttfts) / len(self.ttfts)

    @property
    def imbalance(self) -> float:
        """The busiest replica's mean requests in flight, in those of the mean replica."""
        return max(self.busy_s) * len(self.busy_s) / sum(self.busy_s)


Workload = Callable[[int, Random], Iterator[Prompt]]
"""A user's number and randomness -> what that user asks for, one after the other."""


class _Gateway:
    """A process that chooses: a policy, and what it sees of the engines."""

    def __init__(self, policy: Policy, engines: Sequence[_Engine]) -> None:
        self._policy = policy
        self._on_routed = getattr(policy, "on_routed", None)
        self._seen = [_Seen(f"replica-{number:02}", engine) for number, engine in enumerate(engines)]

    def choose(self, prompt: Prompt, now: float) -> _Seen:
        for one in self._seen:
            one.look(now)
        call = _Call(_Message(prompt.text))
        chosen = cast("_Seen", self._policy.choose(self._seen, call))  # these policies choose one, at once
        if self._on_routed is not None:
            self._on_routed(chosen, call)
        chosen.own += 1
        return chosen


class _World:
    """Users, gateways and engines, and what has come of it so far."""

    def __init__(self, engines: list[_Engine], gateways: list[_Gateway], prompts: list[Iterator[Prompt]]) -> None:
        self.engines = engines
        self.result = Result()
        self.ended = 0
        self.counts = False
        """Whether what happens counts."""
        self._gateways = gateways
        self._prompts = prompts
        self._flying: dict[int, tuple[int, _Seen, float]] = {}
        self._begun = 0
        self._marks = [(0, 0.0)] * len(engines)

    def due(self) -> tuple[float, _Engine] | None:
        """What happens next at the engines."""
        dues = [(at, number) for number, engine in enumerate(self.engines) if (at := engine.due()) is not None]
        if not dues:
            return None
        at, number = min(dues)
        return at, self.engines[number]

    def come(self, now: float, user: int) -> None:
        """A user asks."""
        prompt = next(self._prompts[user])
        chosen = self._gateways[user % len(self._gateways)].choose(prompt, now)
        self._begun += 1
        cached = chosen.engine.begin(prompt, self._begun, now)
        self._flying[self._begun] = (user, chosen, now)
        if self.counts:
            self.result.read += len(prompt.text)
            self.result.cached += cached

    def happen(self, now: float, engine: _Engine) -> int | None:
        """What is due at an engine: a first token, or an answer's end; then returns whose."""
        number = engine.pop(now)
        user, chosen, started = self._flying[abs(number)]
        if number < 0:
            if self.counts:
                self.result.ttfts.append(now - started)
            return None
        del self._flying[number]
        chosen.replied(now)
        self.ended += 1
        if self.counts:
            self.result.latencies.append(now - started)
        return user

    def mark(self, now: float) -> None:
        """From now on it counts."""
        self.counts = True
        self._marks = self._totals(now)

    def close(self, now: float) -> Result:
        """What has come of it since the mark."""
        found = zip(self._totals(now), self._marks, strict=True)
        since = [(routed - before, busy - busy_before) for (routed, busy), (before, busy_before) in found]
        self.result.routed = [routed for routed, _ in since]
        self.result.busy_s = [busy for _, busy in since]
        return self.result

    def _totals(self, now: float) -> list[tuple[int, float]]:
        for engine in self.engines:
            engine.advance(now)
        return [(engine.routed, engine.busy_s) for engine in self.engines]


def simulate(
    policy: str,
    workload: Workload,
    *,
    replicas: int = 4,
    gateways: int = 1,
    users: int = 128,
    requests: int = 6000,
    warm_up: int = 1000,
    think_s: float = 0.5,
    seed: int = 1,
    hardware: Hardware | None = None,
    kwargs: Mapping[str, object] | None = None,
) -> Result:
    """Have `users` ask `requests` times in all, each waiting for its answer and then for `think_s` on average."""
    engines = [_Engine(hardware or Hardware()) for _ in range(replicas)]
    policies = [make_policy(policy, Random(f"{seed} gateway {number}"), kwargs) for number in range(gateways)]
    rngs = [Random(f"{seed} user {user}") for user in range(users)]
    prompts = [workload(user, rng) for user, rng in enumerate(rngs)]
    world = _World(engines, [_Gateway(one, engines) for one in policies], prompts)
    coming = [(rngs[user].expovariate(1 / think_s), user) for user in range(users)]
    heapq.heapify(coming)
    now = 0.0
    while world.ended < requests:
        due = world.due()
        if due is None or (coming and coming[0][0] <= due[0]):
            now, user = heapq.heappop(coming)
            world.come(now, user)
            continue
        now = due[0]
        answered = world.happen(*due)
        if answered is not None:
            heapq.heappush(coming, (now + rngs[answered].expovariate(1 / think_s), answered))
            if world.ended == warm_up:
                world.mark(now)
    return world.close(now)


# ------------------------------------------------------------------------------------------------------------ workloads


def _text(rng: Random, length: int) -> str:
    return f"{rng.getrandbits(4 * length):0{length}x}"


def _system_prompt(number: int, length: int) -> str:
    return _text(Random(f"system prompt {number}"), length)


def shared_prefixes(
    user: int, rng: Random, *, prefixes: int = 8, shared: int = 768, length: int = 1024
) -> Iterator[Prompt]:
    """Each prompt begins with one of a few system prompts."""
    systems = [_system_prompt(number, shared) for number in range(prefixes)]
    while True:
        yield Prompt(rng.choice(systems) + _text(rng, length - shared), 128)


def one_hot_prefix(user: int, rng: Random) -> Iterator[Prompt]:
    """All prompts begin with the same system prompt."""
    return shared_prefixes(user, rng, prefixes=1)


def no_shared_prefixes(user: int, rng: Random) -> Iterator[Prompt]:
    """No prompt begins like another."""
    while True:
        yield Prompt(_text(rng, 1024), 128)


def sessions(user: int, rng: Random) -> Iterator[Prompt]:
    """A user talks for six turns: each prompt is the one before, its answer, and more. Then another conversation."""
    while True:
        text = _system_prompt(rng.randrange(8), 512)
        for _ in range(6):
            text += _text(rng, 256)
            yield Prompt(text, 128)
            text += _text(rng, 128 * CHARS_PER_TOKEN)


def half_hot(user: int, rng: Random) -> Iterator[Prompt]:
    """Half of the prompts begin with one system prompt, the others with one of thirty."""
    hot, others = _system_prompt(0, 768), [_system_prompt(number, 768) for number in range(1, 31)]
    while True:
        yield Prompt((hot if rng.random() < 0.5 else rng.choice(others)) + _text(rng, 256), 128)


SMALL = Hardware(cache_blocks=64)
"""Its cache holds five of the eight system prompts, and nothing else."""

CASES: Mapping[str, tuple[Workload, Hardware]] = {
    "8 system prompts, small cache": (shared_prefixes, SMALL),
    "8 system prompts": (shared_prefixes, Hardware()),
    "conversations": (sessions, Hardware()),
    "nothing shared": (no_shared_prefixes, Hardware()),
    "one hot prefix": (one_hot_prefix, Hardware()),
    "half hot, small cache": (half_hot, Hardware(cache_blocks=160)),
}


def table() -> Iterator[str]:
    """The figures of every case, one line each."""
    yield "workload | gateways | users | policy | hit rate | mean TTFT ms | mean latency s | max/mean load"
    for name, (workload, hardware) in CASES.items():
        for gateways, users in itertools.product((1, 3), (128, 256)):
            for policy in ("power_of_two", "prefix"):
                found = simulate(policy, workload, gateways=gateways, users=users, hardware=hardware, requests=4000)
                yield (
                    f"{name} | {gateways} | {users} | {policy} | {found.hit_rate:.1%} | {found.ttft * 1000:.0f} | "
                    f"{found.latency:.3f} | {found.imbalance:.2f}"
                )


if __name__ == "__main__":
    for line in table():
        print(line)
