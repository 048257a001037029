"""The keys of clients at HAProxy: a map from the SHA-256 of each key to what it opens, read by haproxy.cfg.j2.

HAProxy's process has the map in memory and changes it by the runtime API; the file is what the next process begins
with. The digest of the keys in force is a variable of the process, so a new process has none and is compared once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from ..model.keys import KeySet, ServiceKey
from .haproxy_socket import CommandRefused, RuntimeSocket
from .haproxy_text import matching

FILE = "keys.map"
MAP = f"/run/haproxy/{FILE}"
"""In HAProxy's container. The file is always there (haproxy/entrypoint.sh). With "opt@", HAProxy 3.0 would do without,
and have a map of its own for each line that names it."""
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIST = re.compile(r"[A-Za-z0-9._:/@*?\[\]!,-]*")
_USE = re.compile(r"key=(\S+) use=\d+ exp=(\d+)")
KEPT_S = 120
"""How long HAProxy knows of a use: `expire` in haproxy.cfg.j2."""
_ABSENT = "Unknown map identifier"
_AT_ONCE = 8_000
"""Bytes of commands on one connection: HAProxy reads at most tune.bufsize, 16 kB, at once."""


def entries(keys: KeySet) -> dict[str, str]:
    """The map that these keys need. Raises RoutingError for a key that may not be put into it."""
    return dict(map(_entry, keys.keys))


def _entry(key: ServiceKey) -> tuple[str, str]:
    """Digest, as HAProxy's converter `hex` writes it, and name|services|models|limits."""
    digest = matching(_DIGEST, key.digest, "digest of a key").upper()
    services, models = (
        matching(_LIST, ",".join(names) or "*", "scope of a key") for names in (key.services, key.models)
    )
    limits = (key.per_minute, key.tokens_per_minute, key.concurrent)
    parts = [
        matching(_NAME, key.name, "name of a key"),
        f",{services},",
        models,
        *map(str, limits if any(limits) else ()),
    ]
    return digest, "|".join(parts)


def file_text(wanted: Mapping[str, str]) -> str:
    """The map as its file."""
    return "".join(f"{digest} {entry}\n" for digest, entry in sorted(wanted.items()))


async def write(runtime: RuntimeSocket, wanted: Mapping[str, str], digest: str) -> None:
    """Have the process know these entries and no others. Nothing where its configuration has no map, as an earlier
    build's: the next one has it. Raises RoutingError, RoutingUnreachable.
    """
    found = await known(runtime)
    if found is None:
        return
    for lines in _together(commands(found, wanted)):
        await runtime.ask_all(lines)
    await runtime.ask_all(("experimental-mode on", f"set var proc.pierhead_keys str({digest})"))


async def known(runtime: RuntimeSocket) -> dict[str, str] | None:
    """The entries that the process has; None where it has no map. Raises RoutingError, RoutingUnreachable."""
    try:
        shown = await runtime.ask(f"show map {MAP}")
    except CommandRefused as error:
        if _ABSENT not in error.answer:
            raise
        return None
    # Each line has an address, the key and the value.
    return {parts[1]: parts[2] for line in shown.splitlines() if len(parts := line.split()) == 3}


def ages(table: str) -> dict[str, float]:
    """By name, for each key in `show table keys`: seconds since its last use."""
    return {name: max(0.0, KEPT_S - int(left_ms) / 1000) for name, left_ms in _USE.findall(table)}


def commands(found: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    """Those that lead from one map to another. What ends goes first: a revoked key must not wait for new ones."""
    yield from (f"del map {MAP} {key}" for key in found if key not in wanted)
    for key, entry in wanted.items():
        if key not in found:
            yield f"add map {MAP} {key} {entry}"
        elif found[key] != entry:
            yield f"set map {MAP} {key} {entry}"


def _together(commands: Iterable[str]) -> Iterator[list[str]]:
    chosen: list[str] = []
    for line in commands:
        if chosen and sum(map(len, chosen)) + len(line) > _AT_ONCE:
            yield chosen
            chosen = []
        chosen.append(line)
    if chosen:
        yield chosen
