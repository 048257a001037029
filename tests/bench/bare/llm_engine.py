"""An engine with nothing of the runtime: one grpc.aio stream, on which all that a step makes travels as one message.

Run as `python -m tests.bench.bare.llm_engine`. It takes requests, `number (4 bytes) | body`, and answers with messages
of `number (4) | length (2) | event`, one event for each request that runs, 50 times a second. It reads the body as JSON
for `max_tokens`; there is no text, no cache, no deadline, no cancellation, no window, no metrics.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from struct import Struct
from typing import Any

import grpc

OPEN = "/bare.Engine/Open"
NUMBER = Struct("!I")
PIECE = Struct("!IH")
STEP_S = 0.02
FIRST_S = 0.05


def event(text: str, reason: str = "null") -> bytes:
    """One chunk of a chat completion, as long as the mock engine's."""
    return (
        'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1780000000,"model":"mock",'
        f'"choices":[{{"index":0,"delta":{{"content":"{text}"}},"logprobs":null,"finish_reason":{reason}}}]}}\n\n'
    ).encode()


ONE = event(" token")
LAST = ONE + event("", '"length"') + b"data: [DONE]\n\n"


class Engine:
    """What one stream has running."""

    def __init__(self) -> None:
        self.left: dict[bytes, int] = {}
        self.loop = asyncio.get_running_loop()

    def begin(self, raw: bytes) -> None:
        """Take a request in; its first token comes after FIRST_S."""
        number, tokens = raw[:4], json.loads(raw[4:])["max_tokens"]
        self.loop.call_later(FIRST_S, self.left.__setitem__, number, tokens)

    def step(self) -> bytes:
        """A token for each."""
        pieces: list[bytes] = []
        left = self.left
        for number, tokens in list(left.items()):
            data = ONE if tokens > 1 else LAST
            pieces += (number, len(data).to_bytes(2), data)
            if tokens > 1:
                left[number] = tokens - 1
            else:
                del left[number]
        return b"".join(pieces)


async def serve(requests: AsyncIterator[bytes], context: Any) -> None:
    """One caller's stream."""
    engine = Engine()

    async def steps() -> None:
        due = engine.loop.time()
        while True:
            due += STEP_S
            await asyncio.sleep(due - engine.loop.time())
            if engine.left:
                await context.write(engine.step())

    async with asyncio.TaskGroup() as group:
        running = group.create_task(steps())
        async for raw in requests:
            engine.begin(raw)
        running.cancel()


async def main() -> None:
    """Serve on PIERHEAD_HOST:PIERHEAD_PORT."""
    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(serve)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Engine", {"Open": handler}),))
    server.add_insecure_port(f"{os.environ['PIERHEAD_HOST']}:{os.environ['PIERHEAD_PORT']}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
