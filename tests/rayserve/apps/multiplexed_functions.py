"""Multiplexed functions and methods, and the order in which models leave."""

from ray import serve


class Model:
    def __init__(self, name, log):
        self.name, self.log = name, log
        log.append(f"load {name}")

    def __del__(self):
        self.log.append(f"leave {self.name}")


@serve.multiplexed(max_num_models_per_replica=1)
async def left(name: str):
    return f"left {name}"


@serve.multiplexed(max_num_models_per_replica=1)
async def right(name: str):
    return f"right {name}"


@serve.deployment
class Holder:
    def __init__(self):
        self.log = []

    @serve.multiplexed(max_num_models_per_replica=2)
    async def load(self, name: str):
        return Model(name, self.log)

    @serve.multiplexed(max_num_models_per_replica=2)
    async def other(self, name: str):
        return f"other {name}"

    async def methods(self):
        for name in ("a", "b", "a", "c"):
            await self.load(name)
        return [self.log, await self.other("a") is await self.load("a")]

    async def functions(self):
        return [await left("a"), await right("a"), await left("b")]


app = Holder.bind()
REQUESTS = []


def calls(handle):
    yield handle.methods.remote().result()
    yield handle.functions.remote().result()
