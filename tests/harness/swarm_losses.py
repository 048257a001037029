"""Which requests a fault on a Swarm may cost, and which failures of a load it explains. Pure.

A failure is explained by what its request was begun on, or by the edge that it was sent to. A third class stands apart,
because it counts at every edge: Docker's own gap after an engine has returned to the gossip of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.harness.load import Failure

EDGE = "at the edge of a lost node"
BEGUN = "begun on a lost node or replica"
GOSSIP = "in a gossip window"
UNEXPLAINED = "unexplained"
CLASSES = (EDGE, BEGUN, GOSSIP, UNEXPLAINED)
"""A failure is of the first class that some fault gives it."""

CLEAN_AFTER_S = 5.0
"""A node's power goes off: so long afterwards, requests at other edges may still be given to its replicas."""
BEFORE_S = 2.0
"""A request that was begun so long before a fault may still have been in progress."""
NEVER_S = float("-inf")
"""As `others_for_s`: requests at other edges are not lost."""
GOSSIP_S = 90.0
"""An engine that was cut off from the gossip returns: for so long, overlay networks may miss nodes that were well
(moby/moby#53141). Each engine exchanges all that it knows with another one, chosen by chance, every 30 s."""
GOSSIP_NOTICED_S = 10.0
"""An engine is cut off from the gossip alone: its network works until the others take it for lost, 5 to 7 s later."""
_BEHIND_THE_EDGE = re.compile(r"5\d\d |TimeoutError|IncompleteReadError: 0 bytes")
"""A gap in the overlay is behind an edge: it answers with an error, or waits. Where the request went over a connection
to the replica that had served others, HAProxy closes the client's and gives no answer (haproxy/haproxy#1109)."""


@dataclass
class Lost:
    """A fault at a node: requests begun around its beginning, at any edge, and later at its own edge, may be lost."""

    kind: str
    edge: str
    """The address of its node; "" where its edge is well."""
    begun_at: float
    over_at: float = float("inf")
    others_for_s: float = CLEAN_AFTER_S
    """For how long after its beginning other edges may lose requests."""
    gossips_at: float = float("inf")
    """When its engine returned to the gossip of the others: these then forget each other for a while (GOSSIP_S)."""

    def explains(self, failure: Failure) -> str:
        """The class that it gives a failure."""
        late_s = failure.begun_at - self.begun_at
        if self.edge and f"//{self.edge}:" in failure.url:
            mine = late_s >= -BEFORE_S and failure.begun_at <= self.over_at + CLEAN_AFTER_S
            return EDGE if mine else UNEXPLAINED
        if -BEFORE_S <= late_s <= self.others_for_s:
            return BEGUN
        is_in_window = 0 <= failure.begun_at - self.gossips_at <= GOSSIP_S
        return GOSSIP if is_in_window and _BEHIND_THE_EDGE.match(failure.what) else UNEXPLAINED


@dataclass(frozen=True)
class Judged:
    """A failure with its class, and the kind of the fault that gave it this class."""

    failure: Failure
    of: str
    kind: str = ""


def judged(failures: Iterable[Failure], faults: Sequence[Lost]) -> list[Judged]:
    """Every failure with its class."""
    return [_judged(one, faults) for one in failures]


def unexplained(failures: Iterable[Failure], faults: Sequence[Lost]) -> list[Failure]:
    return [one.failure for one in judged(failures, faults) if one.of == UNEXPLAINED]


def gossip_s(faults: Iterable[Lost], until: float) -> float:
    """For how many seconds, up to a unix time, some gossip window was open."""
    total, end = 0.0, 0.0
    for start in sorted(one.gossips_at for one in faults if one.gossips_at < until):
        close = min(start + GOSSIP_S, until)
        total += max(0.0, close - max(start, end))
        end = max(end, close)
    return total


def _judged(failure: Failure, faults: Sequence[Lost]) -> Judged:
    found = [Judged(failure, fault.explains(failure), fault.kind) for fault in faults]
    best = min(found, key=lambda one: CLASSES.index(one.of), default=Judged(failure, UNEXPLAINED))
    return best if best.of != UNEXPLAINED else Judged(failure, UNEXPLAINED)
