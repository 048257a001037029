"""An async reconfigure, a config that is a list, an async constructor."""

import asyncio

from ray import serve


@serve.deployment(user_config=[1, 2, 3])
class Configured:
    async def __init__(self, base):
        await asyncio.sleep(0)
        self.base = base

    async def reconfigure(self, config):
        await asyncio.sleep(0)
        self.total = self.base + sum(config)

    def __call__(self):
        return self.total


app = Configured.bind(10)
REQUESTS = [{"path": "/"}]


def calls(handle):
    yield handle.remote().result()
