"""Five deployments; responses passed through several handles; exceptions on the way."""

import asyncio

from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment
class Load:
    def __call__(self, name):
        if name == "missing":
            raise FileNotFoundError(name)
        return list(range(len(name)))


@serve.deployment
class Mean:
    def mean(self, values):
        return sum(values) / len(values)


@serve.deployment
class Spread:
    async def spread(self, values, mean):
        return max(abs(value - mean) for value in values)


@serve.deployment
class Report:
    def report(self, mean, spread, *, name):
        return f"{name}: {mean:.1f} +- {spread:.1f}"


@serve.deployment
class Pipeline:
    def __init__(self, load, mean, spread, report):
        self.load, self.mean, self.spread, self.report = load, mean, spread, report

    async def __call__(self, name):
        values = self.load.remote(name)
        mean = self.mean.mean.remote(values)
        spread = self.spread.spread.remote(values, mean)
        return await self.report.report.remote(mean, spread, name=name)

    async def safe(self, name):
        try:
            return await self(name)
        except FileNotFoundError as error:
            return ["missing", isinstance(error, OSError)]
        except ZeroDivisionError:
            return ["empty"]

    async def many(self, names):
        return await asyncio.gather(*(self.safe(name) for name in names))


app = Pipeline.bind(Load.bind(), Mean.bind(), Spread.bind(), Report.bind())
REQUESTS = []


def calls(handle):
    yield handle.remote("abcd").result()
    yield handle.many.remote(["ab", "missing", "", "abc"]).result()
