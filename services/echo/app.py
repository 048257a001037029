"""The echo: `Echo` answers HTTP, with one call or stream of `EchoChild` for each request."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping

from pierhead import Service, endpoint

CHUNK = '{"id":"cmpl-%d","object":"text_completion.chunk","created":%d,"model":"echo","choices":[{"index":0,"text":%s'


class EchoChild(Service):
    begin = "Echo: "

    def reconfigure(self, user_config: Mapping[str, str]) -> None:
        self.begin = user_config.get("greeting", "Echo") + ": "

    async def echo(self, message: str) -> str:
        return self.begin + message

    async def generate(self, message: str, num_tokens: int) -> AsyncIterator[str]:
        chunk = CHUNK % (time.time_ns(), time.time(), json.dumps(message)[:-1])
        for index, reason in enumerate((["null"] * (num_tokens - 1) + ['"stop"'])[:num_tokens]):
            await asyncio.sleep(0)  # one in each turn of the loop, as a model hands them out
            yield f'{chunk} {index}","logprobs":null,"finish_reason":{reason}}}]}}'
        yield "[DONE]"


class Echo(Service, route="/echo"):
    def __init__(self, child: EchoChild) -> None:
        self.child = child

    @endpoint("GET", "/echo")
    async def echo(self, message: str) -> dict[str, str]:
        return {"response": await self.child.echo(message)}

    @endpoint("GET", "/echo/stream")
    async def stream(self, message: str, num_tokens: int = 50) -> AsyncIterator[str]:
        return self.child.generate(message, num_tokens)


app = Echo.bind(EchoChild.bind())
