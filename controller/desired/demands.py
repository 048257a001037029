"""How services that take turns on GPUs are used, and how long requests have waited for one of them. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from ..model.desired import Demand
from ..model.observed import Observed
from ..model.phases import staying
from ..model.spec import ServiceSpec
from .loads import Uses, loads


@dataclass(eq=False)
class Demands:
    """Remembers between ticks when each service had its last request, and since when requests wait for it."""

    now: Mapping[str, Demand] = field(default_factory=dict)
    """What `look` found last."""
    _uses: Uses = field(default_factory=Uses)

    def look(
        self, services: Mapping[str, ServiceSpec], set_by_hand: Container[str], observed: Observed, now: float
    ) -> Mapping[str, Demand]:
        """Return the use of each service that gives way: it has `yields`, and no operator has set its number.

        While HAProxy does not answer, what waits there is not known, and what was found last stays.
        """
        names = [name for name, one in services.items() if one.yields and one.autoscale and name not in set_by_hand]
        if observed.routing is None:
            self.now = {name: self.now[name] for name in names if name in self.now}
            return self.now
        found, used = {}, self._uses.look(names, observed)
        for name, load in loads(names, observed).items():
            before = self.now.get(name, Demand(now))
            is_used = load.total > 0 or name in used
            waits = load.waiting > 0 and not staying(services[name], observed, now)
            since = now if before.waiting_since is None else before.waiting_since
            found[name] = Demand(
                used_at=now if is_used else before.used_at,
                waiting=round(load.waiting) if waits else 0,
                waiting_since=since if waits else None,
            )
        self.now = found
        return found
