"""Events that failed or warn reach a webhook, also one that was away, and after another start."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from controller.daemon import webhook
from controller.daemon.webhook import GATHERED_S, MOST_EVENTS, HttpWebhook, Webhook
from controller.errors import SettingsError, WebhookError
from controller.settings import Settings
from controller.status.records.answers import WebhookBody
from controller.storage.events import EventLog
from controller.storage.file import StateFile
from controller.storage.store import StateStore
from tests.unit.controller.control import until

BODY = WebhookBody("shop: web: rolled back", "shop", ())


class Receiver:
    """Takes messages, or refuses them."""

    def __init__(self) -> None:
        self.taken: list[WebhookBody] = []
        self.refused_at: list[float] = []
        self.is_away = False

    async def __call__(self, body: WebhookBody) -> None:
        await asyncio.sleep(0)
        if self.is_away:
            self.refused_at.append(asyncio.get_running_loop().time())
            raise WebhookError("the webhook at chat.example answers 500; check PIERHEAD_WEBHOOK")
        self.taken.append(body)

    @property
    def texts(self) -> list[str]:
        return [body.text for body in self.taken]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    with contextlib.closing(StateStore(StateFile(tmp_path))) as store:
        yield store


@contextlib.asynccontextmanager
async def sending(store: StateStore, receiver: Receiver) -> AsyncIterator[tuple[EventLog, Webhook]]:
    log = EventLog(store)
    sender = Webhook(receiver, "shop", log, store.sent)
    task = asyncio.ensure_future(sender.run())
    await until(lambda: "webhook" in store.sent)
    try:
        yield log, sender
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.virtual_time
async def test_what_fails_or_warns_is_sent_and_what_happens_together_is_one_message(store: StateStore) -> None:
    receiver = Receiver()
    EventLog(store).record("rolled_back", "before there was a webhook", outcome="failed")
    async with sending(store, receiver) as (log, _):
        log.record("scale", "web: 1 -> 2 replicas", service="web", outcome="ok")
        log.record("rolled_back", "web: rolled back", service="web", outcome="failed")
        await asyncio.sleep(GATHERED_S / 2)
        log.record("gpu_marked", "GPU-1 is lost: <!channel>", target="GPU-1", outcome="warning")
        await until(lambda: receiver.taken)
        (body,) = receiver.taken
        assert body.text == "shop: web: rolled back\nshop: GPU-1 is lost: &lt;!channel&gt;"
        assert [event.kind for event in body.events] == ["rolled_back", "gpu_marked"]
        await until(lambda: store.sent["webhook"] == log.last_seq)
    async with sending(store, receiver) as (log, _):
        log.record("rolled_back", "again", outcome="failed")
        await until(lambda: len(receiver.taken) == 2)
    assert receiver.texts[1] == "shop: again", "after another start nothing is sent twice"


@pytest.mark.virtual_time
async def test_one_that_is_away_gets_everything_once_it_is_back(store: StateStore) -> None:
    receiver = Receiver()
    receiver.is_away = True
    async with sending(store, receiver) as (log, sender):
        log.record("rolled_back", "first", outcome="failed")
        await until(lambda: len(receiver.refused_at) == 4, within_s=60)
        pauses = [round(b - a) for a, b in zip(receiver.refused_at, receiver.refused_at[1:], strict=False)]
        assert pauses == [5, 10, 20]
        assert sender.notices() == (
            "the webhook at chat.example answers 500; check PIERHEAD_WEBHOOK; its messages wait",
        )
        log.record("rolled_back", "second", service="web", outcome="failed")
        receiver.is_away = False
        await until(lambda: receiver.taken, within_s=60)
        assert receiver.texts == ["shop: first\nshop: second"]
        await until(lambda: sender.notices() == ())


@pytest.mark.virtual_time
async def test_many_events_are_several_messages(store: StateStore) -> None:
    receiver = Receiver()
    async with sending(store, receiver) as (log, _):
        for number in range(MOST_EVENTS + 3):
            log.record("rolled_back", f"number {number}", service=f"s{number}", outcome="failed", each=True)
        await until(lambda: len(receiver.taken) == 2, within_s=60)
    assert [len(body.events) for body in receiver.taken] == [MOST_EVENTS, 3]


async def answered(status: int) -> str:
    """What is said of a webhook that answers with a status; "" where it takes the message."""
    bodies = []

    async def take(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    app = web.Application()
    app.router.add_post("/secret", take)
    async with TestServer(app) as server:
        problem = await said_of(f"http://127.0.0.1:{server.port}/secret")
    assert bodies == [{"text": BODY.text, "project": "shop", "events": []}]
    return problem


async def said_of(url: str) -> str:
    sender = HttpWebhook(url)
    try:
        await sender(BODY)
    except WebhookError as error:
        return str(error).replace("secret", "told")
    finally:
        await sender.close()
    return ""


@pytest.mark.parametrize(("status", "words"), [(200, ""), (204, ""), (302, "answers 302"), (500, "answers 500")])
async def test_over_http(status: int, words: str) -> None:
    problem = await answered(status)
    assert (words in problem) if words else problem == ""
    assert "told" not in problem, "such an address is a secret"


async def test_one_that_cannot_be_reached_or_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "WITHIN_S", 0.1)
    assert "at 127.0.0.1 cannot be reached" in await said_of("http://127.0.0.1:1/secret")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert "does not answer within 0.1 s" in await said_of(f"http://127.0.0.1:{port}/secret")


@pytest.mark.parametrize(
    "value", ["chat.example/SECRET", "ftp://chat/SECRET", "https://[x/SECRET", "https://a:99999/SECRET"]
)
def test_a_wrong_address_is_not_shown(value: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as failed:
        Settings.from_env(
            {"COMPOSE_PROJECT_NAME": "p", "PIERHEAD_PROJECT_DIR": str(tmp_path), "PIERHEAD_WEBHOOK": value}
        )
    assert str(failed.value) == "PIERHEAD_WEBHOOK: expected an address such as https://chat.example/hooks/..."
