"""Results that are empty, large, or must not be returned."""

from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment
class Inner:
    def nothing(self):
        return None

    def big(self, size):
        return b"x" * size

    def raises_chain(self):
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise RuntimeError("outer") from error

    def raises_twice(self):
        raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])

    def stops(self):
        raise StopIteration("stop")

    async def empty(self):
        return
        yield

    async def numbers(self):
        for number in range(3):
            yield number


@serve.deployment
class Outer:
    def __init__(self, inner: DeploymentHandle):
        self.inner = inner

    async def __call__(self):
        found = [await self.inner.nothing.remote(), len(await self.inner.big.remote(5_000_000))]
        try:
            await self.inner.raises_chain.remote()
        except RuntimeError as error:
            found.append(["RuntimeError", "outer" in str(error)])
        try:
            await self.inner.raises_twice.remote()
        except ExceptionGroup as group:
            found.append(sorted(type(each).__name__ for each in group.exceptions))
        stream = self.inner.options(stream=True)
        found.append([item async for item in stream.empty.remote()])
        found.append([item async for item in stream.numbers.remote()])
        generator = stream.numbers.remote()
        found.append([await generator.__anext__(), await generator.__anext__()])
        return found

    async def hand_back(self):
        return self.inner.nothing.remote()


app = Outer.bind(Inner.bind())
REQUESTS = [{"path": "/"}]


def calls(handle):
    yield handle.remote().result()[1]
    try:
        handle.hand_back.remote().result()
        yield "fine"
    except Exception as error:
        yield ["raised", "serializable" in str(error) or "pickle" in str(error)]
