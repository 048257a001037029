"""The keys of clients that are in force: those in the store, until each ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..model.keys import NO_KEYS, KeySet, ServiceKey
from ..model.spec import ServiceSpec


class KeysInForce:
    """What HAProxy is to know. It is asked for in each tick and seldom changes."""

    def __init__(self, keys: Mapping[str, ServiceKey], wall: Callable[[], float]) -> None:
        """`keys`: the store's, by name. `wall`: unix time."""
        self._keys, self._wall = keys, wall
        self._last = NO_KEYS

    def now(self, services: Collection[ServiceSpec]) -> KeySet:
        """The keys; NO_KEYS where none of the services asks for one."""
        if not any(service.auth == "key" for service in services):
            return NO_KEYS
        wall_now = self._wall()
        keys = tuple(key for key in self._keys.values() if key.ends_at is None or key.ends_at > wall_now)
        if self._last is NO_KEYS or keys != self._last.keys:
            self._last = KeySet.of(keys)
        return self._last
