"""Swarm's configs in memory. It asks `fault` before each write how that call is to go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from controller.errors import StateChanged, StateUnreachable, StoreError
from controller.swarm.names import LONGEST_NAME
from controller.swarm.state.configs import LIMIT, Config, SwarmConfigs

Fault = Literal["", "lost", "answer lost"]
"""How a call goes wrong: it does not arrive, or it is carried out and its answer does not arrive."""


class FakeSwarm:
    """What all managers have in common."""

    def __init__(self) -> None:
        self.configs: dict[str, Config] = {}
        self.version = 10
        self.is_down = False
        self.writes = 0
        self.fault: Callable[[], Fault] = lambda: ""

    def manager(self) -> FakeConfigs:
        """One more client."""
        return FakeConfigs(self)


class FakeConfigs(SwarmConfigs):
    """`is_cut`: this client gets no answer, others do."""

    def __init__(self, swarm: FakeSwarm) -> None:
        self.is_cut = False
        self._swarm = swarm

    async def create(self, name: str, labels: Mapping[str, str], data: bytes) -> None:
        if not (0 < len(data) <= LIMIT and len(name) <= LONGEST_NAME):
            raise StoreError("config data or name out of bounds")
        await self._write(lambda: self._put(name, labels, data))

    async def inspect(self, name: str) -> Config | None:
        await self._read()
        return self._swarm.configs.get(name)

    async def update(self, name: str, version: int, labels: Mapping[str, str]) -> None:
        await self._write(lambda: self._relabel(name, version, labels))

    async def remove(self, name: str) -> None:
        await self._write(lambda: self._swarm.configs.pop(name, None))

    async def labelled(self, label: str, value: str) -> list[Config]:
        await self._read()
        return [config for config in self._swarm.configs.values() if config.labels.get(label) == value]

    async def _read(self) -> None:
        await asyncio.sleep(0)
        if self._swarm.is_down or self.is_cut:
            raise StateUnreachable("the swarm does not have a leader")

    async def _write(self, write: Callable[[], object]) -> None:
        await self._read()
        fault = self._swarm.fault()
        if fault != "lost":
            self._swarm.writes += 1
            write()
        if fault:
            raise StateUnreachable(fault)
        await asyncio.sleep(0)

    def _put(self, name: str, labels: Mapping[str, str], data: bytes) -> None:
        if name in self._swarm.configs:
            raise StateChanged(f"config {name} already exists")
        self._swarm.version += 1
        self._swarm.configs[name] = Config(name, self._swarm.version, dict(labels), data)

    def _relabel(self, name: str, version: int, labels: Mapping[str, str]) -> None:
        found = self._swarm.configs.get(name)
        if found is None or found.version != version:
            raise StateChanged("update out of sequence")
        self._swarm.version += 1
        self._swarm.configs[name] = replace(found, version=self._swarm.version, labels=dict(labels))
