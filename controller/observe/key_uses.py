"""When each key of a client was last used: HAProxy knows it for a while, the store keeps the day."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..errors import RoutingError
from ..model.keys import DAY_S, ServiceKey
from ..routing.base import Router
from ..storage.rows import RowKind

logger = logging.getLogger(__name__)

LOOK_S = 60.0
"""Between two looks: half of what HAProxy remembers (haproxy.cfg.j2, backend keys)."""
MOST_WRITES = 50
"""In a look: ten thousand keys that are used every day must not keep the loop for seconds at midnight."""


@dataclass(eq=False)
class KeyUses:
    """`_known`: the keys that there are. `_kept`: times in the store, by name. `_wall`: unix time."""

    _router: Router
    _known: Mapping[str, object]
    _kept: RowKind[str, float]
    _wall: Callable[[], float]
    _seen: dict[str, float] = field(default_factory=dict)

    def at(self, key: ServiceKey) -> float | None:
        """When the key was last used (unix time); None = never, as far as is known. Not an earlier key of its name."""
        at = self._seen.get(key.name) or self._kept.get(key.name)
        return at if at is not None and at >= key.made_at else None

    async def look(self) -> None:
        """Ask HAProxy once. Without an answer what was known stays."""
        try:
            ages = await self._router.key_ages()
        except RoutingError as error:
            logger.debug("the last uses of keys are not known: %s", error)
            return
        now = self._wall()
        self._seen.update({name: now - age for name, age in ages.items() if name in self._known})
        for gone in self._seen.keys() - self._known.keys():
            del self._seen[gone]

    def keep(self) -> None:
        """Have the store know the day of each. A clock that was in the future is corrected."""
        newer = (name for name, at in self._seen.items() if abs(at - self._kept.get(name, 0.0)) >= DAY_S)
        for name in list(itertools.islice(newer, MOST_WRITES)):
            self._kept.put(name, self._seen[name])

    async def run(self) -> None:
        """Look for ever, while there are keys."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._known:
                await self.look()
                self.keep()
