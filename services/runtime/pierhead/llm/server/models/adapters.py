"""LoRA adapters of one replica: loaded on the first request, least recently used evicted first, some of them pinned.

The runtime's LRU cache evicts adapters (`max_num_adapters_per_replica` stay, and adapters in use) and reports to
callers which ones the replica holds; this module finds the adapters and loads them into the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pierhead.errors import Backpressure
from pierhead.llm.server.background import in_background
from pierhead.llm.server.engine import LLMEngine, Report
from pierhead.llm.server.errors import LLMRequestError, LLMStartError, SourceNotFoundError, no_such_model
from pierhead.llm_config import ADAPTER_NAME, Lora
from pierhead.metrics import RuntimeMetrics
from pierhead.multiplex.multiplexed import ModelUse, Multiplexed
from pierhead.tasks import retrieve

Fetch = Callable[[str, Path, Report], Path]
"""A local directory with everything of a source, `s3://...`, kept below a cache directory. Blocks: it is called in a
thread. Raises SourceNotFoundError where there is nothing."""


@dataclass(frozen=True)
class LoadedAdapter:
    """One adapter in the engine."""

    name: str
    engine: LLMEngine

    async def aclose(self) -> None:
        """Take it out again. Called when the LRU cache evicts it."""
        await self.engine.unload_adapter(self.name)


class Adapters:
    """All adapters of one engine. Belongs to one event loop."""

    def __init__(
        self,
        engine: LLMEngine,
        lora: Lora,
        *,
        fetch: Fetch,
        cache: Path,
        report: Report,
        metrics: RuntimeMetrics,
    ) -> None:
        self._engine = engine
        self._source = lora.dynamic_lora_loading_path.rstrip("/")
        self._bound = lora.max_num_adapters_per_replica
        self._always = lora.adapters
        self._fetch = fetch
        self._cache = cache
        self._report = report
        self._loaded: Multiplexed[LoadedAdapter] = Multiplexed(self._load, self._bound, name="lora", metrics=metrics)
        self._finding: dict[str, asyncio.Task[Path]] = {}
        self._turns = asyncio.Semaphore(self._bound)
        """For looking for adapters: each takes a thread, and a listing or a download."""
        self._found: dict[str, Path] = {}
        """Where the files are of adapters that wait for a place, or load."""
        self._pins: dict[str, ModelUse[LoadedAdapter]] = {}
        self._pinning = asyncio.Lock()
        """Held while pins change: with two uses for one pin, the first would never end."""

    @property
    def held(self) -> tuple[str, ...]:
        """The adapters in the engine."""
        return self._loaded.models

    def use(self, adapter: str) -> AbstractAsyncContextManager[Any]:
        """An adapter that stays in the engine until the block is left; it is loaded first if it is not there.

        Raises LLMRequestError, 404, for an adapter that does not exist, and Backpressure where pinned adapters take all
        the room.
        """
        check_name(adapter)
        if adapter not in self._pins and len(self._pins) >= self._bound:
            raise Backpressure(
                f'the adapter "{adapter}" has no room: all {self._bound} of max_num_adapters_per_replica are taken '
                f"by those that the replica always has, {', '.join(sorted(self._pins))}; raise it, or pin fewer"
            )
        if adapter in self.held:
            return self._loaded(adapter)
        return self._used(adapter)

    async def pin_only(self, wanted: Iterable[str]) -> None:
        """Pin `lora.adapters` and these adapters, and unpin all others.

        Raises ValueError if there is no room for all, LLMRequestError for an unknown adapter; adapters that could be
        loaded stay.
        """
        desired = dict.fromkeys((*self._always, *wanted))
        for adapter in desired:
            check_name(adapter)
        if len(desired) > self._bound:
            raise ValueError(
                f"{len(desired)} adapters are to be kept, {', '.join(desired)}, but max_num_adapters_per_replica is "
                f"{self._bound}: raise x-serve.llm.lora.max_num_adapters_per_replica, or keep fewer"
            )
        async with self._pinning:
            for adapter in [each for each in self._pins if each not in desired]:
                await self._pins.pop(adapter).__aexit__(None, None, None)
            missing = [each for each in desired if each not in self._pins]
            for number, adapter in enumerate(missing):
                self._report("loading adapters", number, len(missing))
                await self._pin(adapter)

    async def load(self, adapter: str) -> None:
        """Load one now; it counts as used now."""
        async with self.use(adapter):
            pass

    async def unload(self, adapter: str) -> None:
        """Take an adapter out of the engine, pinned or not. Raises LLMRequestError while requests use it."""
        check_name(adapter)
        async with self._pinning:
            pin = self._pins.pop(adapter, None)
            if pin is not None:
                await pin.__aexit__(None, None, None)
            if not await self._loaded.drop(adapter):
                if pin is not None:  # it stays pinned
                    await self._pin(adapter)
                raise LLMRequestError(
                    f'the adapter "{adapter}" is in use; ask again when its requests have ended',
                    status=409, code="in_use",
                )  # fmt: skip

    async def known(self) -> list[str]:
        """The adapters that can be loaded; of a remote source, those that are loaded."""
        names = set(self.held)
        if "://" not in self._source:
            names |= set(await asyncio.to_thread(_directories, Path(self._source)))
        return sorted(names)

    async def _pin(self, adapter: str) -> None:
        self._pins[adapter] = await self._begin_use(adapter)  # left by `pin_only`, or `unload`

    @asynccontextmanager
    async def _used(self, adapter: str) -> AsyncIterator[None]:
        use = await self._begin_use(adapter)
        try:
            yield
        finally:
            await use.__aexit__(None, None, None)

    async def _begin_use(self, adapter: str) -> ModelUse[LoadedAdapter]:
        """A use that was entered. The adapter is found before it gets a place: what does not exist evicts no other."""
        use = self._loaded(adapter)
        if adapter not in self.held:
            self._found[adapter] = self._found.get(adapter) or await self._find_once(adapter)
        try:
            await use.__aenter__()
        finally:
            self._found.pop(adapter, None)
        return use

    async def _find_once(self, adapter: str) -> Path:
        """What `_find` finds, for all who ask at the same time."""
        finding = self._finding.get(adapter)
        if finding is None:
            finding = self._finding[adapter] = asyncio.create_task(self._find_in_turn(adapter))
            finding.add_done_callback(lambda _: self._finding.pop(adapter))
            finding.add_done_callback(retrieve)
        return await asyncio.shield(finding)

    async def _find_in_turn(self, adapter: str) -> Path:
        async with self._turns:
            return await self._find(adapter)

    async def _load(self, adapter: str) -> LoadedAdapter:
        """Cancelled when the replica ends. A load that the engine has begun is then awaited: the engine may have the
        adapter all the same, and the cache has to unload it."""
        path = self._found.get(adapter) or await self._find_once(adapter)
        loading = asyncio.ensure_future(self._engine.load_adapter(adapter, str(path)))
        try:
            await asyncio.shield(loading)
        except asyncio.CancelledError:
            await asyncio.wait([loading])
            loading.result()
        return LoadedAdapter(adapter, self._engine)

    async def _find(self, adapter: str) -> Path:
        where = f"{self._source}/{adapter}"
        if "://" not in where:
            path = Path(where)
            if not await asyncio.to_thread(path.is_dir):
                raise unknown_adapter(adapter, where)
            return path
        try:
            return await in_background(self._fetch, where, self._cache, self._report)
        except SourceNotFoundError as error:
            raise unknown_adapter(adapter, where) from error
        except LLMStartError as error:
            raise LLMStartError(f'the adapter "{adapter}" cannot be fetched: {error}') from error


def adapters_in(user_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in {"adapters": [...]}. Raises ValueError for anything else."""
    unknown = sorted(set(user_config) - {"adapters"})
    if unknown:
        raise ValueError(f"user_config: expected adapters and nothing else, found {', '.join(unknown)}")
    adapters = user_config.get("adapters", [])
    if not isinstance(adapters, list) or not all(isinstance(each, str) for each in adapters):
        raise ValueError(f"user_config.adapters: expected an array of names, found {adapters!r}")
    return tuple(adapters)


def check_name(adapter: str) -> None:
    """Raises LLMRequestError, 404: no adapter has such a name."""
    if not ADAPTER_NAME.fullmatch(adapter):
        raise no_such_model(
            f"there is no adapter of the name {adapter[:120]!r}: names have letters, digits, dots, dashes and "
            "underscores, 100 at most, and begin with a letter or digit"
        )


def unknown_adapter(adapter: str, where: str) -> LLMRequestError:
    """OpenAI's answer for an unknown model."""
    return no_such_model(f'the adapter "{adapter}" does not exist: nothing was found at {where}')


def _directories(source: Path) -> list[str]:
    if not source.is_dir():
        return []
    return [each.name for each in source.iterdir() if each.is_dir() and ADAPTER_NAME.fullmatch(each.name)]
