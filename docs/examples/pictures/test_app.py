"""The application in this process, without Docker."""

import asyncio
import io

from app import app
from pierhead.testing import local
from PIL import Image


def picture(colour: str, side: int = 300) -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(made, "PNG")
    return made.getvalue()


async def test_each_picture_of_a_batch_gets_its_own_answer() -> None:
    async with local(app) as running:

        async def ask(colour: str) -> dict[str, float]:
            async with running.http.post("/colours", data=picture(colour)) as answer:
                shares: dict[str, float] = await answer.json()
                return shares

        colours = ["red", "blue", "white", "black"] * 4
        answers = await asyncio.gather(*map(ask, colours))
    assert answers == [{colour: 1.0} for colour in colours]


async def test_what_is_no_picture_is_refused() -> None:
    damaged = picture("red").replace(b"IDAT", b"IDAt")
    async with local(app) as running:
        for body in (b"no picture", picture("red")[:100], damaged):
            async with running.http.post("/colours", data=body) as answer:
                assert answer.status == 400
                assert "not a picture" in (await answer.json())["error"]["message"]
