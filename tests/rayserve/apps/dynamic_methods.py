"""Methods by name, attributes as methods, decorated methods, private ones."""

import functools

from ray import serve
from ray.serve.handle import DeploymentHandle


def logged(function):
    @functools.wraps(function)
    async def wrapper(self, *args, **kwargs):
        self.log.append(function.__name__)
        return await function(self, *args, **kwargs)

    return wrapper


@serve.deployment
class Calc:
    def __init__(self):
        self.log = []
        self.double = lambda x: 2 * x

    @logged
    async def add(self, a, b=1, *rest, **named):
        return [a + b, list(rest), sorted(named)]

    def _private(self, x):
        return f"private {x}"

    def get_log(self):
        return self.log

    @property
    def size(self):
        return len(self.log)


@serve.deployment
class Ask:
    def __init__(self, calc: DeploymentHandle):
        self.calc = calc

    async def __call__(self, name, *args, **kwargs):
        return await getattr(self.calc, name).remote(*args, **kwargs)

    async def by_option(self, name, *args):
        return await self.calc.options(method_name=name).remote(*args)

    async def fails(self, name):
        try:
            await self.calc.options(method_name=name).remote()
            return "fine"
        except Exception as error:
            return isinstance(error, (TypeError, AttributeError)) or "does not exist" in str(error)


app = Ask.bind(Calc.bind())
REQUESTS = []


def calls(handle):
    yield handle.remote("add", 1).result()
    yield handle.remote("add", 1, 2, 3, z=1, y=2).result()
    yield handle.remote("double", 4).result()
    yield handle.remote("_private", "x").result()
    yield handle.by_option.remote("get_log").result()
    yield handle.fails.remote("size").result()
    yield handle.fails.remote("nothing").result()
    yield handle.fails.remote("add").result()
