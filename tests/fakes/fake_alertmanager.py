"""A Silencer in memory, that passes the contract suite of the real one (tests/contract/test_alertmanager.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from controller.errors import AlertmanagerError, InvalidRequest
from controller.observe.alertmanager import Silence, SilencedAlerts


class FakeAlertmanager:
    """`alerts`: the labels of those that it was sent."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self.alerts: list[Mapping[str, str]] = []
        self.is_away = False
        self._wall, self._numbers = wall, itertools.count(1)
        self._made: dict[str, Silence] = {}

    async def silences(self) -> Sequence[Silence]:
        self._answer()
        return [one for one in self._made.values() if one.ends_at > self._wall()]

    async def silenced(self) -> SilencedAlerts:
        found = {
            frozenset(labels.items()): tuple(
                one.id for one in await self.silences() if one.labels.items() <= labels.items()
            )
            for labels in self.alerts
        }
        return {labels: ids for labels, ids in found.items() if ids}

    async def silence(self, wanted: Silence) -> str:
        self._answer()
        made = replace(wanted, id=f"silence-{next(self._numbers)}")
        self._made[made.id] = made
        return made.id

    async def end(self, identity: str) -> None:
        if identity not in {one.id for one in await self.silences()}:
            raise InvalidRequest(f"there is no silence {identity!r}; `pierhead silence` lists them")
        del self._made[identity]

    def _answer(self) -> None:
        if self.is_away:
            raise AlertmanagerError("Alertmanager cannot be reached (test)")
