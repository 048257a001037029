"""Streams of a handle, sync and async generators, read from outside."""

import asyncio

from ray import serve


@serve.deployment
class Streamer:
    def numbers(self, most: int):
        for number in range(most):
            yield number

    async def letters(self, text: str):
        for letter in text:
            await asyncio.sleep(0)
            yield {"letter": letter}

    def broken(self):
        yield 1
        raise ValueError("no more")

    def unary(self):
        return 1

    async def __call__(self, most: int):
        yield most


app = Streamer.bind()
REQUESTS = []


def calls(handle):
    stream = handle.options(stream=True)
    yield list(stream.numbers.remote(4))
    yield list(stream.letters.remote("abc"))
    yield list(stream.remote(9))
    got = []
    try:
        for item in stream.broken.remote():
            got.append(item)
    except ValueError as error:
        got.append(isinstance(error, ValueError))
    yield got
    for wrong in (lambda: list(stream.unary.remote()), lambda: handle.numbers.remote(3).result()):
        try:
            wrong()
        except TypeError as error:
            yield "stream=True" in str(error)
