"""A policy that sends a prompt to the replica that has read the same beginning, so that its prefix cache is hit.

    load gate     a replica with too many calls is not chosen for the text that it has read
    affinity      of the others, the replica that was sent most of this text before, if that is a large enough share
    first sight   for a text that no replica has read, the less loaded of two replicas that its beginning draws, the
                  same two in every caller. New texts spread as with power of two choices

Each handle remembers the texts that it has sent to each replica (`prefix_tree`); callers do not exchange them. They
still agree: a beginning that is new to a caller draws the same replicas as in every other caller. When these are too
busy and the beginning needs one more replica, it is the next one drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random

from pierhead.policies.balanced import PowerOfTwo, load_of, two_of
from pierhead.policies.hash_ring import position
from pierhead.policies.policy import C, Candidate, RoutedCall
from pierhead.policies.prefix_tree import PrefixTree

MOST_CHARS = 8192

GRAIN = 16
"""Texts are compared in steps of this many characters; engines cache blocks of 16 tokens, some 64 characters."""

BEGINNING = 128
"""Characters that draw replicas for a new text: this many, doubled until they exceed what two texts may share without
being a match. So texts with less in common draw different replicas: new texts spread as if by chance."""

CHARS_PER_NODE = 128
"""Least characters that a remembered text counts as, to bound the number of short texts. An engine's cache keeps little
of them, and here each costs as much as a long one.
"""

EQUAL_LOADS = 0.1
"""Loads that differ by less than this share of the mean are equal."""


class PrefixAware:
    """Reads `routing_text` of the request message; calls without it, and with less than GRAIN characters, go by load.

    - match_rate_threshold: a replica that was sent less than this share of the text is not preferred.
    - balance: a replica is not preferred once it has this many times its share of the calls, this one counted: the
      bounded loads of Mirrokni, Thorup, Zadimoghaddam (arXiv:1608.01350), which
      `policies.ConsistentHash` keeps, too. So a prefix of many calls spreads to as many replicas as it needs.
    - imbalance_threshold: nor once it has this many calls more than the least loaded replica.
    - max_chars: characters remembered for each replica: about as many as its cache holds.

    Raises ValueError.
    """

    NEVER_CROWDED = 2
    """A replica with fewer calls is never passed over; as in `policies.ConsistentHash`."""

    def __init__(
        self,
        rng: Random,
        *,
        match_rate_threshold: float = 0.1,
        balance: float = 1.25,
        imbalance_threshold: float = 32,
        max_chars: int = 2_000_000,
    ) -> None:
        if not 0 <= match_rate_threshold <= 1:
            raise ValueError(f"match_rate_threshold: expected a number from 0 to 1, found {match_rate_threshold}")
        if not (1 < balance < math.inf and 1 <= imbalance_threshold < math.inf):
            raise ValueError(
                "balance, imbalance_threshold: expected finite numbers above 1, and from 1 on, found "
                f"{balance}, {imbalance_threshold}"
            )
        if max_chars < MOST_CHARS:
            raise ValueError(f"max_chars: expected {MOST_CHARS}, which is one text, or more, found {max_chars}")
        self._threshold = match_rate_threshold
        self._balance = balance
        self._imbalance = imbalance_threshold
        self._random = rng.random
        self._power_of_two = PowerOfTwo(rng)
        self._tree = PrefixTree(max_chars, max_chars - max_chars // 50, GRAIN, max_chars // CHARS_PER_NODE)
        self._places: dict[str, int] = {}
        """Hashes of replicas' names, for their ranks."""

    def choose(self, candidates: Sequence[C], call: RoutedCall) -> C:
        """The replica that has read most of the text; see above."""
        text, own = _text(call)
        if len(text) < GRAIN or len(candidates) == 1:
            return self._power_of_two.choose(candidates, call)
        matches = self._tree.match(own + text)
        least = len(own) + max(GRAIN, math.ceil(self._threshold * len(text)))
        start = position(own + text[: self._beginning(len(text))])
        holders = _best(candidates, matches, least)
        if not holders and all(length < least for length in matches.values()):
            return self._drawn(candidates, start)
        mean = sum(map(load_of, candidates)) / len(candidates)
        most = self._most(candidates)
        if holders:
            one = self._one_of(holders, start, mean)
            if one.load <= most:
                return one
        uncrowded = [candidate for candidate in candidates if candidate.load <= most]
        holders = _best(uncrowded, matches, least)
        if holders:
            return self._one_of(holders, start, mean)
        # The replicas that have read it are crowded or full. The next one drawn is the same in every caller.
        return max(uncrowded, key=lambda candidate: self._rank(start, candidate))

    def on_routed(self, candidate: Candidate, call: RoutedCall) -> None:
        """It reads the text now."""
        text, own = _text(call)
        if len(text) >= GRAIN:
            self._tree.insert(own + text, candidate.name)

    def on_replica_gone(self, name: str) -> None:
        """Forget the texts that it has read."""
        self._tree.remove(name)
        self._places.pop(name, None)

    def _most(self, candidates: Sequence[C]) -> float:
        """The load gate: how many calls a preferred replica may have. The least loaded replica never has more."""
        loads: list[int] = list(map(load_of, candidates))
        bound = max(self.NEVER_CROWDED, math.ceil(self._balance * (sum(loads) + 1) / len(candidates)))
        return min(bound - 1.0, min(loads) + self._imbalance)

    def _beginning(self, length: int) -> int:
        beginning = BEGINNING
        while beginning < self._threshold * length:
            beginning *= 2
        return beginning

    def _one_of(self, holders: Sequence[C], start: int, mean: float) -> C:
        """The less loaded of two at random; if their loads are about equal, the one that the text draws first: else
        each prefix would in time be cached by every replica.
        """
        if len(holders) == 1:
            return holders[0]
        one, other = two_of(holders, self._random)
        if self._rank(start, one) < self._rank(start, other):
            one, other = other, one
        return other if one.load > other.load + EQUAL_LOADS * mean else one

    def _drawn(self, candidates: Sequence[C], start: int) -> C:
        """The less loaded of two; the first drawn when both are equal."""
        ranks = [self._rank(start, candidate) for candidate in candidates]
        first = ranks.index(max(ranks))
        ranks[first] = -1
        one, other = candidates[first], candidates[ranks.index(max(ranks))]
        return other if other.load < one.load else one

    def _rank(self, start: int, candidate: Candidate) -> int:
        """Rendezvous hashing (Thaler, Ravishankar, 1998): the highest rank is drawn first. Ranks are the same in every
        caller, and a replica that comes or goes moves only its own texts.
        """
        place = self._places.get(candidate.name)
        if place is None:
            place = self._places[candidate.name] = position(candidate.name)
        return _mixed(start ^ place)


def _best(candidates: Sequence[C], matches: Mapping[str, int], least: int) -> Sequence[C]:
    """The candidates with the longest match; none if it is shorter than `least`."""
    found: list[C] = []
    for candidate in candidates:
        matched = matches.get(candidate.name, 0)
        if matched > least:
            least, found = matched, [candidate]
        elif matched == least:
            found.append(candidate)
    return found


def _text(call: RoutedCall) -> tuple[str, str]:
    """The prompt, and the adapter's name before it: prompts match only for the same adapter."""
    text = getattr(call.request, "routing_text", "")
    if not isinstance(text, str):
        return "", ""
    text = text[:MOST_CHARS]
    adapter = call.model_id
    return text, "" if adapter is None else adapter[:64].ljust(64, "\0") + "\0" * GRAIN


def _mixed(number: int) -> int:
    """64 bits whose every bit depends on each of the number's (the finaliser of SplitMix64)."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ number >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return number ^ number >> 31
