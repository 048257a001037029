"""The keys of clients at HAProxy: a map from the SHA-256 of each key to what it opens, read by haproxy.cfg.j2.

HAProxy's process has the map in memory and changes it by the runtime API; the file is what the next process begins
with. The map itself has the digest of all keys, so whatever a process begins with, or was given in part, is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from ..errors import RoutingError, RoutingUnreachable
from ..model.keys import NAME, KeySet, ServiceKey
from .haproxy_socket import CommandRefused, MasterSocket, RuntimeSocket
from .haproxy_text import matching

FILE = "keys.map"
MAP = f"/run/haproxy/{FILE}"
"""In HAProxy's container. The file is always there. With "opt@", HAProxy 3.0 would do without, and have a map of its
own for each line that names it."""
DIGEST = "digest"
"""The map's entry with the digest of all keys; no SHA-256 is written so."""
ASK_DIGEST = f"get map {MAP} {DIGEST}"
KEPT_S = 120
"""How long HAProxy knows what a key has used, and when."""
_IN_PART = "-"
"""In the place of the digest while entries are changed."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIST = re.compile(r"[A-Za-z0-9._:/@*?\[\]!,-]*")
_ABSENT = "Unknown map identifier"
_VALUE = re.compile(r'value="([^"]*)"')
_USE = re.compile(r"key=(\S+) use=\d+ exp=(\d+)")
_AT_ONCE = 8_000
"""Bytes of commands on one connection: HAProxy reads at most tune.bufsize, 16 kB, at once."""


@lru_cache(maxsize=1)
def entries(keys: KeySet) -> Mapping[str, str]:
    """The map that these keys need, its digest last. Raises RoutingError for a key that may not be put into it."""
    return {**dict(map(_entry, keys.keys)), DIGEST: keys.digest}


def _entry(key: ServiceKey) -> tuple[str, str]:
    """The SHA-256, as HAProxy's converter `hex` writes it, and name|services|models, perhaps |limits|end."""
    sha256 = matching(_SHA256, key.digest, "digest of a key").upper()
    services, models = (
        matching(_LIST, ",".join(names) or "*", "scope of a key") for names in (key.services, key.models)
    )
    bounds = (key.per_minute, key.tokens_per_minute, key.concurrent, int(key.ends_at or 0))
    parts = [
        matching(NAME, key.name, "name of a key"),
        f",{services},",
        models,
        *map(str, bounds if any(bounds) else ()),
    ]
    return sha256, "|".join(parts)


def file_text(wanted: Mapping[str, str]) -> str:
    """The map as its file."""
    return "".join(f"{sha256} {entry}\n" for sha256, entry in wanted.items())


def commands(found: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    """Those that lead from one map to another. What ends goes first: a revoked key must not wait for new ones."""
    if found == wanted:
        return
    yield f"{'set' if DIGEST in found else 'add'} map {MAP} {DIGEST} {_IN_PART}"
    yield from less(found, wanted)
    for sha256, entry in wanted.items():
        if sha256 not in found and sha256 != DIGEST:
            yield f"add map {MAP} {sha256} {entry}"
    yield f"set map {MAP} {DIGEST} {wanted[DIGEST]}"


def less(found: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    """Those commands that take keys away, or change what they open."""
    yield from (f"del map {MAP} {sha256}" for sha256 in found if sha256 not in wanted)
    for sha256, entry in wanted.items():
        if sha256 != DIGEST and sha256 in found and found[sha256] != entry:
            yield f"set map {MAP} {sha256} {entry}"


async def write(runtime: RuntimeSocket, master: MasterSocket, wanted: Mapping[str, str]) -> None:
    """Have the process know these entries and no others. Nothing where its configuration has no map, as an earlier
    build's: the next one has it. Raises RoutingError, RoutingUnreachable; no message has an entry.
    """
    try:
        found = await known(runtime)
        if found is None:
            return
        steps, ends = list(commands(found, wanted)), any(less(found, wanted))
        for lines in _together(steps[:-1]):
            await runtime.ask_all(lines)
        await _forget(runtime, {found[sha256].partition("|")[0] for sha256 in found.keys() - wanted.keys()})
        if ends or found.get(DIGEST) == _IN_PART:
            await _take_from_leaving(master, wanted)
        for line in steps[-1:]:  # the digest comes last: until HAProxy has it, all of this is tried again
            await runtime.ask(line)
    except RoutingUnreachable:
        raise RoutingUnreachable("HAProxy does not answer, and has not all keys of clients yet") from None
    except RoutingError:
        raise RoutingError("HAProxy refused a key of a client; its container's log says more") from None


async def _forget(runtime: RuntimeSocket, names: Iterable[str]) -> None:
    """Another key of the same name begins from nothing. What is in use stays."""
    for name in names:
        try:
            await runtime.ask(f"clear table keys key {name}")
        except CommandRefused:
            continue


async def _take_from_leaving(master: MasterSocket, wanted: Mapping[str, str]) -> None:
    """Workers that a reload has replaced still serve the connections that they have."""
    for pid in await master.leaving_workers():
        found = _entries_in(await master.ask_worker(pid, f"show map {MAP}"))
        for line in less(found, wanted):
            await master.ask_worker(pid, line)


async def known(runtime: RuntimeSocket) -> dict[str, str] | None:
    """The entries that the process has; None where it has no map. Raises RoutingError, RoutingUnreachable."""
    try:
        shown = await runtime.ask(f"show map {MAP}")
    except CommandRefused as error:
        if _ABSENT not in error.answer:
            raise
        return None
    return _entries_in(shown)


def _entries_in(shown: str) -> dict[str, str]:
    """Of the answer to `show map`: each line has an address, the key and the value."""
    return {parts[1]: parts[2] for line in shown.splitlines() if len(parts := line.split()) == 3}


def digest_in(answer: str) -> str:
    """The digest in the answer to `get map`; "" where there is none."""
    found = _VALUE.search(answer)
    return found.group(1) if found and found.group(1) != _IN_PART else ""


def digest_of_file(text: str) -> str:
    """The digest in a file; "" where there is none."""
    return next((line.split()[1] for line in text.splitlines() if line.startswith(f"{DIGEST} ")), "")


def ages(table: str) -> dict[str, float]:
    """By name, for each key in `show table keys`: seconds since its last use."""
    return {name: max(0.0, KEPT_S - int(left_ms) / 1000) for name, left_ms in _USE.findall(table)}


def _together(lines: Iterable[str]) -> Iterator[list[str]]:
    chosen: list[str] = []
    for line in lines:
        if chosen and sum(map(len, chosen)) + len(line) > _AT_ONCE:
            yield chosen
            chosen = []
        chosen.append(line)
    if chosen:
        yield chosen
