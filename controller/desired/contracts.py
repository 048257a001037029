"""Whether two versions of a service can serve at the same time, by their contracts.

A contract is a `pierhead.contract.v1.Application`, serialized; b"" = there is none. What a replica tells of its own
outranks what its image carries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from google.protobuf.message import DecodeError
from pierhead.classes.compare import incompatible

from ..model.desired import Revision

ContractOf = Callable[[str], bytes | None]
"""The contract that an image carries, by the image's id; None = it is being read."""

MOST_NAMED = 3
"""Changes that a sentence names; the others are counted."""


@dataclass(eq=False)
class Contracts:
    """The contracts of a service's versions at one moment.

    `told`: by version, what its replicas tell. `records`: the versions' records, which name their images.
    """

    _service: str
    _told: Mapping[str, bytes]
    _records: Mapping[str, Revision | None]
    _of_image: ContractOf

    def __post_init__(self) -> None:
        self.is_reading = False
        """Whether the answers so far are None because an image is being read."""

    def why_not(self, version: str, others: Iterable[str]) -> str | None:
        """Why replicas of a version must not serve together with replicas of the others, and what to do; "" = they may.

        None: that is not known before one of them tells its contract, or an image was read.
        """
        whys = [self._why_not(version, other) for other in sorted(others)]
        return next(filter(None, whys), None if None in whys else "")

    def _why_not(self, version: str, other: str) -> str | None:
        serving = self._of(other)
        if serving == b"":
            return ""
        following = self._of(version)
        if serving is None or following is None:
            return None
        if following == b"":
            return "" if version in self._told else None
        old, new = (following, serving) if self._is_older(version, other) else (serving, following)
        changed = changes(old, new, self._service)
        return changed and (
            f"{changed}; version {version} is incompatible with {other} during a rollout. Keep what the other one "
            "uses, and add at the end, with a default. Or accept failed calls "
            "(x-serve.rollout: {incompatible: allow}), or "
            f"a gap (`pierhead scale {self._service} 0`, then the number again)"
        )

    def _of(self, version: str) -> bytes | None:
        if version in self._told:
            return self._told[version]
        record = self._records.get(version)
        found = self._of_image(record.image_id) if record else b""
        self.is_reading |= found is None
        return found

    def _is_older(self, version: str, other: str) -> bool:
        """Whether a version was there first: what is compared does not depend on where a service goes."""
        mine, theirs = self._records.get(version), self._records.get(other)
        return mine is not None and theirs is not None and mine.first_at < theirs.first_at


@lru_cache(maxsize=256)  # each tick compares the same ones
def changes(old: bytes, new: bytes, service: str) -> str:
    """The changes that make two versions incompatible; "" where there are none, or where one cannot be read."""
    try:
        found = [str(change) for change in incompatible(old, new, service)]
    except (DecodeError, KeyError, RecursionError):
        return ""
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return "; ".join(found[:MOST_NAMED]) + more
