"""A small store that all replicas and callers of a stack share, for policies that ask a central place.

    from pierhead import shared_store

    await shared_store.set(f"load/{name}", "3", ttl_s=5)     # at a replica
    loads = await shared_store.get_many([f"load/{one.name}" for one in candidates])    # in `async def choose`

It is in the controller's memory and reached through Discovery (PIERHEAD_DISCOVERY); without a controller it is in the
memory of this process. It is empty after a restart of the controller, and each key ends after its `ttl_s`: keep nothing
here that cannot be missing.

Every function raises StoreUnavailable when the controller is down or does not answer within 0.1 s (and then at once
for a second), when the store is full (100,000 keys, 32 MiB), and when this process has 256 requests in flight. Raises
ValueError for a key of more than 256 bytes, a value of more than 4 KiB, more than 512 keys or 128 KiB at once, and a
`ttl_s` of more than a day. All services share the keys: begin them with a name of your own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pierhead.calls.clients import Clients

TTL_S = 60.0
"""How long a key lives, in seconds, unless the caller says otherwise."""


async def get(key: str) -> str | None:
    """The value of a key; None where it does not exist, or its time is over."""
    return (await Clients.current().store.get([key])).get(key)


async def get_many(keys: Sequence[str]) -> dict[str, str]:
    """The values of those keys that exist, in one request."""
    return await Clients.current().store.get(keys)


async def set(key: str, value: str, *, ttl_s: float = TTL_S) -> None:  # noqa: A001 - as in other stores
    """Set a key for `ttl_s` seconds from now on."""
    await Clients.current().store.set({key: value}, ttl_s)


async def set_many(values: Mapping[str, str], *, ttl_s: float = TTL_S) -> None:
    """Set several keys in one request: all of them or, where this raises, none."""
    await Clients.current().store.set(values, ttl_s)


async def incr(key: str, by: int = 1, *, ttl_s: float = TTL_S) -> int:
    """Add `by`, which may be negative, to a key that holds a whole number (0 where it does not exist). Returns the sum.

    The key then lives `ttl_s` seconds from now on. Raises ValueError where it holds something else.
    """
    return await Clients.current().store.incr(key, by, ttl_s)
