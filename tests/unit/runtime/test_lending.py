"""A client's connection at the process that borrows it."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from pierhead.llm.objects import StreamEvents
from pierhead.llm.server.service import LLMService
from pierhead.llm.v1.llm_pb2 import LLMReply, LLMRequest
from pierhead.memory.lending import BorrowedConnection, Burst

from tests.unit.runtime.harness import until

CHUNK = b"5\r\nevent\r\n"


class Lent:
    """One connection: the borrower's end, and the client's."""

    def __init__(self, burst: Burst, kept: ExitStack) -> None:
        ours, self.client = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.client.setblocking(False)
        self.borrowed = BorrowedConnection(lambda: None, burst)
        self.borrowed.arrived(os.dup(ours.fileno()))
        ours.close()
        kept.callback(self.client.close)
        kept.callback(self.borrowed.close)

    def read(self) -> bytes:
        """What the client finds now; b"" = nothing, or the end."""
        try:
            return self.client.recv(1 << 20)
        except BlockingIOError:
            return b""

    def has_news(self) -> bool:
        """Whether the client would be woken now."""
        return bool(select.select([self.client], [], [], 0)[0])

    async def write_until_full(self) -> asyncio.Task[bool]:
        """A task that writes more than the client's buffer holds, and waits."""
        big = b"x" * (1 << 20)
        assert await self.borrowed.write(big)
        writer = asyncio.create_task(self.borrowed.write(big))
        await asyncio.sleep(0)
        assert not writer.done()
        return writer


@pytest.fixture
def kept() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def test_the_streams_of_one_turn_are_sent_together_after_it(kept: ExitStack) -> None:
    burst = Burst()
    streams = [Lent(burst, kept) for _ in range(5)]
    seen: list[int] = []

    async def work(stream: Lent) -> None:
        assert await stream.borrowed.write(b"event")
        seen.append(sum(each.has_news() for each in streams))

    await asyncio.gather(*map(work, streams))
    await asyncio.sleep(0)
    assert seen == [0] * 5, "no client was woken before the last stream had written"
    assert [stream.read() for stream in streams] == [CHUNK] * 5


async def test_chunks_of_one_turn_keep_their_order(kept: ExitStack) -> None:
    stream = Lent(Burst(), kept)
    for event in (b"1", b"22", b"333"):
        await stream.borrowed.write(event)
    await stream.borrowed.finish()
    assert stream.read() == b"1\r\n1\r\n2\r\n22\r\n3\r\n333\r\n"


async def test_a_slow_client_holds_its_own_stream_alone(kept: ExitStack) -> None:
    burst = Burst()
    slow, other = Lent(burst, kept), Lent(burst, kept)
    writer = await slow.write_until_full()
    await other.borrowed.write(b"event")
    await until(lambda: other.read() == CHUNK, "the other one gets its event")
    assert not writer.done()
    found = bytearray()
    finish = asyncio.create_task(_finish_after(writer, slow.borrowed))

    def is_whole() -> bool:
        found.extend(slow.read())
        return finish.done()

    await until(is_whole, "the slow client has read everything")
    found += slow.read()
    chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    assert bytes(found) == chunk * 2


async def _finish_after(writer: asyncio.Task[bool], borrowed: BorrowedConnection) -> None:
    assert await writer
    await borrowed.finish()


async def test_to_a_client_that_has_left_nothing_is_written(kept: ExitStack) -> None:
    stream = Lent(Burst(), kept)
    writer = await stream.write_until_full()
    stream.client.close()
    assert not await asyncio.wait_for(writer, 5)
    assert not await stream.borrowed.write(b"event")
    await stream.borrowed.finish()


async def test_what_was_not_lent_takes_nothing() -> None:
    borrowed = BorrowedConnection(lambda: None, Burst())
    borrowed.arrived(None)
    assert not await borrowed.write(b"event")


async def test_a_stream_that_ends_in_the_turn_has_sent_its_chunk(kept: ExitStack) -> None:
    stream = Lent(Burst(), kept)
    await stream.borrowed.write(b"event")
    stream.borrowed.close()
    assert stream.read() == CHUNK
    await asyncio.sleep(0)
    assert stream.client.recv(1) == b"", "it is given back, and its owner's end was the last one"


async def test_a_chunk_that_is_cut_ends_the_connection(kept: ExitStack) -> None:
    stream = Lent(Burst(), kept)
    writer = await stream.write_until_full()
    writer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writer
    stream.borrowed.close()
    while stream.read():
        pass
    assert stream.client.recv(1) == b""


async def test_an_answer_that_ends_without_usage_waits_for_a_slow_client(kept: ExitStack) -> None:
    stream = Lent(Burst(), kept)
    big = "data: " + "x" * (1 << 20) + "\n\n"

    async def answers() -> AsyncIterator[StreamEvents]:
        for _ in range(3):
            yield StreamEvents(big, 1)

    asked = SimpleNamespace(_asked=lambda *_: answers())
    context = SimpleNamespace(borrow=lambda: stream.borrowed)
    replies: list[LLMReply] = []

    async def run() -> None:
        replies.extend([reply async for reply in LLMService.Chat(asked, LLMRequest(lends=True), context)])

    found, task = bytearray(), asyncio.create_task(run())

    def is_over() -> bool:
        found.extend(stream.read())
        return task.done()

    await until(is_over, "the client has read everything")
    await task
    found += stream.read()
    chunk = b"%x\r\n%b\r\n" % (len(big), big.encode())
    assert bytes(found) == chunk * 2, "the first one is the gateway's to write"
    assert replies[0].borrows
