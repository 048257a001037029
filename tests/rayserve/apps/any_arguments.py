"""Arguments and results of any Python type; each side has its own copy."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from ray import serve
from ray.serve.handle import DeploymentHandle


class Colour(Enum):
    RED = 1


@dataclass
class Thing:
    name: str
    parts: list = field(default_factory=list)


@serve.deployment
class Taker:
    def take(self, thing, *more, **named):
        if isinstance(thing, Thing):
            thing.parts.append("taken")
        return [thing, more, named]

    def apply(self, function, value):
        return function(value)

    def make(self):
        return lambda x: x * 3


@serve.deployment
class Giver:
    def __init__(self, taker: DeploymentHandle):
        self.taker = taker

    async def __call__(self):
        thing = Thing("a", ["own"])
        back, more, named = await self.taker.take.remote(
            thing, {1, 2}, (3,), when=datetime(2026, 1, 2), colour=Colour.RED, raw=b"\x00"
        )
        made = await self.taker.make.remote()
        return {
            "mine": thing.parts,
            "back": back.parts,
            "more": [sorted(more[0]), isinstance(more[1], tuple)],
            "named": [named["when"].isoformat(), named["colour"] is Colour.RED, list(named["raw"])],
            "applied": await self.taker.apply.remote(lambda x: x + 1, 41),
            "made": made(5),
        }


app = Giver.bind(Taker.bind())
REQUESTS = [{"path": "/"}]
