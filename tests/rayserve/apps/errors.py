"""Exceptions of another deployment, by their class."""

from ray import serve
from ray.serve.handle import DeploymentHandle


class OutOfStock(Exception):
    def __init__(self, item, left=0):
        super().__init__(item, left)
        self.item = item
        self.left = left


@serve.deployment
class Store:
    def take(self, item):
        if item == "tea":
            raise OutOfStock(item, left=2)
        if item == "key":
            return {}["missing"]
        if item == "exit":
            raise LookupError("exit")
        if item == "noted":
            error = ArithmeticError("noted")
            error.add_note("a note")
            raise error
        if item == "file":
            open("/nothing/here")
        return item


@serve.deployment
class Ingress:
    def __init__(self, store: DeploymentHandle):
        self.store = store

    async def __call__(self, item):
        try:
            return await self.store.take.remote(item)
        except OutOfStock as error:
            return ["out of stock", error.item, error.left, isinstance(error, OutOfStock), type(error).__name__]
        except KeyError as error:
            return ["key", "missing" in str(error), isinstance(error.cause, KeyError), error.cause.args]

    async def attributes(self):
        found = []
        for item in ("noted", "file"):
            try:
                await self.store.take.remote(item)
            except Exception as error:
                found.append([type(error).__name__, getattr(error, "__notes__", None), getattr(error, "errno", None)])
        return found

    async def unknown(self):
        try:
            await self.store.nothing.remote()
        except Exception as error:
            return [type(error).__name__, "Tried to call a method 'nothing' that does not exist" in str(error)]


app = Ingress.bind(Store.bind())
REQUESTS = []


def calls(handle):
    yield handle.remote("tea").result()
    yield handle.remote("key").result()
    yield handle.remote("salt").result()
    try:
        handle.remote("exit").result()
    except LookupError as error:
        yield ["LookupError", "exit" in str(error)]
    yield handle.attributes.remote().result()
    yield handle.unknown.remote().result()
