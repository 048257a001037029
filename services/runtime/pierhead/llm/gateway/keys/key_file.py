"""The API keys of this process: read from their file, read again when it changes, each with its limits."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import NamedTuple

from pierhead.errors import SettingsError
from pierhead.llm.gateway.keys.api_keys import ApiKey, find_key, parse_keys
from pierhead.llm.gateway.keys.limits import Clock, Limits

logger = logging.getLogger("pierhead.llm.gateway")

LOOK_S = 1.0
"""Seconds between two checks of the file."""


class KeyHolder(NamedTuple):
    """A key and the state of its limits."""

    key: ApiKey
    limits: Limits


class KeyFile:
    """The keys of one file. A reload keeps the used part of a key's limits, if their numbers are unchanged."""

    def __init__(self, path: str, gateways: int = 1, clock: Clock = time.monotonic) -> None:
        """`gateways`: processes that share the limits. Raises SettingsError where the file cannot be used."""
        self._path = path
        self._gateways = gateways
        self._clock = clock
        self._holders: dict[str, KeyHolder] = {}
        self._seen: tuple[int, ...] = ()
        try:
            self._seen = self._signature()
            self._read()
        except (OSError, ValueError) as error:
            raise SettingsError(f"PIERHEAD_LLM_KEYS_FILE: {path}: {_reason(error)}") from None

    def find(self, presented: str) -> KeyHolder | None:
        """The holder of a key; None = unknown."""
        key = find_key((holder.key for holder in self._holders.values()), presented)
        return None if key is None else self._holders[key.name]

    async def watch(self) -> None:
        """Check the file for changes, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.reload()

    def reload(self) -> None:
        """Read the file if it has changed. An invalid file does not change the keys."""
        try:
            seen = self._signature()
            if seen == self._seen:
                return
            self._seen = seen
            self._read()
        except (OSError, ValueError) as error:
            if not isinstance(error, OSError) or self._seen:
                logger.error("API keys: %s: %s; the former keys stay in force", self._path, _reason(error))  # noqa: TRY400
            if isinstance(error, OSError):
                self._seen = ()
            return
        logger.info("API keys: %d read from %s", len(self._holders), self._path)

    def _signature(self) -> tuple[int, ...]:
        status = os.stat(self._path)
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> None:
        with open(self._path, encoding="utf-8") as file:
            keys = parse_keys(file.read())
        self._holders = {key.name: KeyHolder(key, self._limits(key)) for key in keys}

    def _limits(self, key: ApiKey) -> Limits:
        numbers = _numbers(key)
        before = self._holders.get(key.name)
        if before is not None and _numbers(before.key) == numbers:
            return before.limits
        requests, tokens, concurrent = (None if number is None else number / self._gateways for number in numbers)
        return Limits(requests, tokens, self._clock(), None if concurrent is None else max(1, int(concurrent)))


def _numbers(key: ApiKey) -> tuple[float | None, float | None, float | None]:
    return key.requests_per_minute, key.tokens_per_minute, key.max_concurrent


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
