"""GET /v1/models: models, aliases, and the adapters that services list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pierhead.llm.gateway.models.model_map import ModelMap, ModelRoute
from pierhead.llm.v1.llm_pb2 import ModelCard

Entry = tuple[tuple[str, ...], dict[str, Any]]
"""The names that a key's scope may have for a model, and the model's entry in the list."""


class ModelList:
    """Built for each request from the services' last cards: it never waits for a service."""

    def __init__(self, models: ModelMap, card: Callable[[str], ModelCard | None], created: int) -> None:
        """`card(service)`: a service's last card, or None; `created`: for models without a card."""
        self._models = models
        self._card = card
        self._created = created

    def entries(self) -> Iterator[Entry]:
        """Each once, in the map's order, adapters behind their model."""
        listed = set(self._models.routes)
        for name, route in self._models.routes.items():
            card = self._card(route.service)
            yield (name, route.model), self._entry(name, route, card)
            if name != route.base or card is None:
                continue
            for adapter in card.adapters:
                model = f"{name}:{adapter}"
                if model not in listed:
                    listed.add(model)
                    yield (
                        (model,),
                        self._entry(model, replace(route, model=model, adapter=adapter), card),
                    )

    def _entry(self, name: str, route: ModelRoute, card: ModelCard | None) -> dict[str, Any]:
        """As OpenAI has it, and three members of vLLM's: root, parent and max_model_len."""
        entry: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": self._created if card is None or not card.created else card.created,
            "owned_by": "pierhead",
            "root": route.model,
            "parent": route.base if route.adapter else None,
        }
        if card is not None and card.max_model_len:
            entry["max_model_len"] = card.max_model_len
        return entry
