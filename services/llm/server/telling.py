"""What callers hear of the engine's load, to choose replicas by."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from services.llm.server.engine import EngineLoad


def _publisher() -> Callable[..., None]:
    try:
        publish: Callable[..., None] = importlib.import_module("pierhead.routing_stats").publish
    except ModuleNotFoundError:
        return lambda **_: None
    return publish


_publish = _publisher()


def tell_callers(load: EngineLoad) -> None:
    """Costs next to nothing: numbers travel with the replies that go out anyway."""
    _publish(running=load.running, waiting=load.waiting, kv_use=load.kv_use)
