"""Versions of a small application of service classes: a shop that calls a ranker."""

from __future__ import annotations

from typing import Any

from pierhead.classes.application import application_of
from pierhead.classes.service import Bound

_TEXT = """
from pierhead import Service

class {ranker}(Service):
    async def rank(self, {parameters}) -> list[int]: ...

class Shop(Service):
    def __init__(self, ranker: {ranker}) -> None: ...
    async def buy(self, user: int) -> str: ...

class Page(Service):
    def __init__(self, shop: Shop) -> None: ...

application = Page.bind(Shop.bind({ranker}.bind()))
"""


def shop(parameters: str = "user: int, items: list[int]", module: str = "shop", ranker: str = "Ranker") -> Bound:
    """The services `page` (which has no methods), `shop` and `ranker`, each of which calls the next."""
    made: dict[str, Any] = {"__name__": module}
    exec(_TEXT.format(parameters=parameters, ranker=ranker), made)  # noqa: S102 - our own text
    bound: Bound = made["application"]
    return bound


def contract(parameters: str = "user: int, items: list[int]", service: str = "", **names: str) -> bytes:
    """The contract that the image of such a version carries, or that a replica of this service tells."""
    return application_of(shop(parameters, **names), service).SerializeToString(deterministic=True)


GROWN = "user: int, items: list[int], most: int = 10"
"""The parameters of a version that meets the one before it."""
SHRUNK = "items: list[int]"
"""Those of one that does not."""
