"""Makes, lists and revokes the keys of clients. The loop brings the change to HAProxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ..errors import InvalidRequest, UnknownKey
from ..model.keys import DAY_S, ServiceKey, digest_of, random_key
from ..model.text import did_you_mean
from ..observe.key_uses import KeyUses
from ..status.records.changes import MakeKey
from ..storage.store import StateStore

MOST_KEYS, MOST_KEYS_OF_NODES = 10_000, 2_000
"""Where there are several nodes the engine keeps the state, in 500 kB."""
TOLD_WITHIN_S = 3.0
"""How long an answer waits for HAProxy."""
_LOOK_S = 0.02


@dataclass(eq=False)
class KeyCommands:
    """`known` raises UnknownService for what is no service. `is_in_force`: whether HAProxy has the keys of the store.
    `wall` is the machine's clock. `most`: how many keys there may be.
    """

    _store: StateStore
    _uses: KeyUses
    _known: Callable[[str], object]
    _is_in_force: Callable[[], bool]
    _wake: Callable[[], None]
    _wall: Callable[[], float]
    _most: int

    async def listed(self) -> list[tuple[ServiceKey, float | None]]:
        """All keys by name, also those that have ended, and when each was last used."""
        await self._uses.look()
        return [(key, self._uses.at(key)) for _, key in sorted(self._store.service_keys.items())]

    def make(self, wanted: MakeKey) -> tuple[ServiceKey, str]:
        """A new key, and what its owner sends. Raises InvalidRequest, UnknownService, StoreError."""
        keys = self._store.service_keys
        if wanted.name in keys:
            raise InvalidRequest(
                f"there is a key {wanted.name} already; revoke it first, or choose another name and revoke this key "
                "when its clients have the new one"
            )
        if len(keys) >= self._most:
            raise InvalidRequest(f"there are {len(keys)} keys, as many as there may be; revoke some first")
        for service in wanted.services:
            self._known(service)
        now, key, terms = self._wall(), random_key(), asdict(wanted)
        days = terms.pop("days")
        made = ServiceKey(digest=digest_of(key), made_at=now, ends_at=now + days * DAY_S if days else None, **terms)
        keys.put(wanted.name, made, asked=True)
        self._wake()
        return made, key

    def revoke(self, name: str) -> None:
        """Forget a key, also where the state cannot be written at the moment. Raises UnknownKey."""
        keys = self._store.service_keys
        if name not in keys:
            raise UnknownKey(
                f"there is no key {name[:80]!r}; {did_you_mean(name, keys)}`pierhead keys list` lists them"
            )
        keys.drop(name)
        self._store.key_uses.drop(name)
        self._wake()

    async def told(self) -> bool:
        """Wait until HAProxy has the change, for a while; whether it has."""
        try:
            async with asyncio.timeout(TOLD_WITHIN_S):
                while not self._is_in_force():  # noqa: ASYNC110  a look of the loop sends no event
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            return False
        return True
