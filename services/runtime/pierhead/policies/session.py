"""The policy that keeps each session at one replica."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from random import Random

from pierhead.policies.balanced import load_of, name_of
from pierhead.policies.hash_ring import BITS, HashRing, position
from pierhead.policies.policy import C, RoutedCall


class ConsistentHash:
    """Keeps each session at one replica, which may have state for it, as long as that replica is not crowded.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018, arXiv:1608.01350): the session's
    place on the ring names its replica; one whose load has reached `ceil(BALANCE * calls / candidates)`, this call
    counted, is passed over for the next one on the ring. So no replica gets more than BALANCE times its share, and each
    session has a second choice of its own. Calls without a session go to a random place on the ring.
    """

    BALANCE = 1.25
    """A replica may have this many times its share of the calls; the paper's 1 + epsilon."""

    NEVER_CROWDED = 2
    """A replica with fewer calls is never passed over. The paper's bound is 1 while there are fewer calls than
    replicas: a session would lose its replica because of a single other call there."""

    def __init__(self, rng: Random) -> None:
        self._getrandbits = rng.getrandbits
        self._ring = HashRing()

    def choose(self, candidates: Sequence[C], call: RoutedCall) -> C:
        """The first candidate from the session's place on that is not crowded."""
        ring = self._ring
        if not ring.names.issuperset(map(name_of, candidates)):
            ring.add(map(name_of, candidates))
        calls = sum(map(load_of, candidates)) + 1
        bound = max(self.NEVER_CROWDED, math.ceil(self.BALANCE * calls / len(candidates)))
        session = call.session_id
        start = position(session) if session else self._getrandbits(BITS)
        for name in ring.walk(start):
            at = bisect_left(candidates, name, key=name_of)
            # The ring also has replicas that are full or away at present.
            if at < len(candidates) and candidates[at].name == name and candidates[at].load < bound:
                return candidates[at]
        raise AssertionError("every candidate is at the bound, which exceeds the mean load: impossible")

    def on_replica_gone(self, name: str) -> None:
        """Take it off the ring."""
        self._ring.remove(name)
