"""Makes, lists and revokes the keys of clients. The loop brings the change to HAProxy."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InvalidRequest, UnknownKey
from ..model.keys import DAY_S, NewKey, ServiceKey, digest_of, random_key
from ..observe.key_uses import KeyUses
from ..storage.store import StateStore

MOST_KEYS = 10_000


@dataclass(eq=False)
class KeyCommands:
    """`known` raises UnknownService for what is no service. `wall` is the machine's clock."""

    _store: StateStore
    _uses: KeyUses
    _known: Callable[[str], object]
    _wake: Callable[[], None]
    _wall: Callable[[], float]

    async def listed(self) -> list[tuple[ServiceKey, float | None]]:
        """All keys by name, also those that have ended, and when each was last used."""
        await self._uses.look()
        return [(key, self._uses.at(name)) for name, key in sorted(self._store.service_keys.items())]

    def make(self, wanted: NewKey) -> tuple[ServiceKey, str]:
        """A new key, and what its owner sends. Raises InvalidRequest, UnknownService, StoreError."""
        keys = self._store.service_keys
        if wanted.name in keys:
            raise InvalidRequest(
                f"there is a key {wanted.name} already; revoke it first, or take another name: clients may have both "
                "while they change to the new one"
            )
        if len(keys) >= MOST_KEYS:
            raise InvalidRequest(f"there are {MOST_KEYS} keys already, as many as there may be; revoke some first")
        for service in wanted.services:
            self._known(service)
        now, key = self._wall(), random_key()
        made = ServiceKey(
            name=wanted.name,
            digest=digest_of(key),
            made_at=now,
            services=wanted.services,
            models=wanted.models,
            per_minute=wanted.per_minute,
            tokens_per_minute=wanted.tokens_per_minute,
            concurrent=wanted.concurrent,
            ends_at=now + wanted.days * DAY_S if wanted.days else None,
        )
        keys.put(wanted.name, made)
        self._wake()
        return made, key

    def revoke(self, name: str) -> None:
        """Forget a key. Raises UnknownKey, StoreError."""
        keys = self._store.service_keys
        if name not in keys:
            near = difflib.get_close_matches(name, keys, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownKey(f"there is no key {name[:80]!r}; {hint}`pierhead keys list` names all")
        keys.drop(name)
        self._store.key_uses.drop(name)
        self._wake()
