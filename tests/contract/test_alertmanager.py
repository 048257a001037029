"""Alertmanager's silences as the controller makes them: one suite for the fake, for a program of this machine (Debian's
prometheus-alertmanager, or PIERHEAD_ALERTMANAGER) and for the stack's own image.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from testcontainers.core.container import DockerContainer

from controller.errors import AlertmanagerError, InvalidRequest
from controller.observe.alertmanager import Alertmanager, Silence, Silencer
from tests.fakes.fake_alertmanager import FakeAlertmanager
from tests.harness.haproxy_container import docker
from tests.harness.ports import free_ports
from tests.harness.receivers import Receivers, receiving
from tests.harness.stack import ROOT, request
from tests.harness.waiting import eventually

pytestmark = pytest.mark.timeout(300)  # the image may have to be built

FILES = ROOT / "dashboards/alertmanager"
PROGRAM = os.environ.get("PIERHEAD_ALERTMANAGER") or shutil.which("prometheus-alertmanager")
WEB = {"alertname": "ErrorRate", "service": "web", "severity": "critical"}
SHOP = {"alertname": "ErrorRate", "service": "shop", "severity": "critical"}


class Suite:
    """A Silencer, and how its Alertmanager is sent alerts."""

    def __init__(self, silencer: Silencer, url: str = "") -> None:
        self.silencer, self._url = silencer, url

    async def fires(
        self, *alerts: Mapping[str, str], annotations: Mapping[str, str] | None = None, ends: bool = False
    ) -> None:
        if isinstance(self.silencer, FakeAlertmanager):
            self.silencer.alerts += alerts
            return
        async with aiohttp.ClientSession() as session:
            now = datetime.now(UTC).isoformat()
            about = {"annotations": annotations or {}, "startsAt": now, **({"endsAt": now} if ends else {})}
            body = [{"labels": labels, **about} for labels in alerts]
            async with session.post(f"{self._url}/api/v2/alerts", json=body) as answer:
                assert answer.status == 200, await answer.text()

    async def made(self, labels: Mapping[str, str], why: str = "a load test") -> Silence:
        now = time.time()
        silence = Silence(labels, now, now + 600, "ops", why)
        return Silence(labels, now, now + 600, "ops", why, await self.silencer.silence(silence))

    async def held_back(self) -> dict[str, tuple[str, ...]]:
        """The ids of the silences of each service's alert."""
        return {dict(labels)["service"]: tuple(ids) for labels, ids in (await self.silencer.silenced()).items()}


@contextlib.contextmanager
def program(directory: Path, **environment: str) -> Iterator[str]:
    """The URL of an Alertmanager of this machine's program, which the image's script starts."""
    if PROGRAM is None:
        pytest.skip(
            "no prometheus-alertmanager on this machine: apt-get install it, or name it in PIERHEAD_ALERTMANAGER"
        )
    (port,), script = free_ports(1), (FILES / "entrypoint.sh").read_text()
    moved = {"/tmp/": f"{directory}/", "=/var/lib/prometheus": f"={directory}", "=:9093": f"=127.0.0.1:{port}"}
    for old, new in {**moved, "group_wait: 10s": "group_wait: 0s", "group_interval: 1m": "group_interval: 1s"}.items():
        assert old in script
        script = script.replace(old, new)
    (directory / "prometheus-alertmanager").symlink_to(PROGRAM)
    (directory / "alertmanager").mkdir()
    env = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "COMPOSE_PROJECT_NAME": "shop", **environment}
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen(["sh", "-c", script], env=env, stdout=log, stderr=log) as run,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            eventually(lambda: request(f"{url}/-/ready").status == 200, "Alertmanager is ready")
            yield url
        finally:
            run.terminate()


@contextlib.contextmanager
def image(_: Path) -> Iterator[str]:
    """The URL of an Alertmanager of the stack's image, built from this checkout; the builder keeps its layers."""
    name, labels = f"pierhead-test/alertmanager:{os.getpid()}", {"pierhead.test": "alertmanager"}
    docker("build", "--network", "host", "--label", "pierhead.test=alertmanager", "-t", name, str(FILES))
    container = DockerContainer(name).with_env("COMPOSE_PROJECT_NAME", "shop").with_exposed_ports(9093)
    try:
        with container.with_tmpfs_mount("/tmp").with_kwargs(labels=labels, read_only=True, cap_drop=["ALL"]):
            url = f"http://127.0.0.1:{container.get_exposed_port(9093)}"
            eventually(lambda: request(f"{url}/-/ready").status == 200, "Alertmanager is ready")
            yield url
    finally:
        docker("rmi", "--force", name)


@pytest.fixture(params=["fake", "program", pytest.param("image", marks=pytest.mark.engine)])
async def suite(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Suite]:
    starts: dict[str, Callable[[Path], contextlib.AbstractContextManager[str]]] = {"program": program, "image": image}
    if request.param == "fake":
        yield Suite(FakeAlertmanager(time.time))
        return
    with starts[request.param](tmp_path) as url:
        silencer = Alertmanager(url)
        yield Suite(silencer, url)
        await silencer.close()


async def test_a_silence_of_a_service_holds_back_its_alerts_until_it_is_ended(suite: Suite) -> None:
    await suite.fires(WEB, SHOP)
    assert await suite.held_back() == {}
    made = await suite.made({"service": "web"})
    assert await suite.held_back() == {"web": (made.id,)}
    (listed,) = await suite.silencer.silences()
    assert (listed.id, listed.labels, listed.by, listed.why) == (made.id, {"service": "web"}, "ops", "a load test")
    assert abs(listed.ends_at - made.ends_at) < 0.01
    assert listed.others == ""
    await suite.silencer.end(made.id)
    assert (await suite.held_back(), list(await suite.silencer.silences())) == ({}, [])


async def test_labels_are_compared_to_the_letter(suite: Suite) -> None:
    await suite.fires(WEB, SHOP)
    await suite.made({"alertname": "ErrorRate", "service": "s.*"}, why='quotes ", \\ and \u00fc')
    assert await suite.held_back() == {}
    one = await suite.made({"alertname": "ErrorRate", "service": "shop"})
    all_ = await suite.made({"alertname": "ErrorRate"})
    held = await suite.held_back()
    assert (held["web"], sorted(held["shop"])) == ((all_.id,), sorted([one.id, all_.id]))
    assert 'quotes ", \\ and \u00fc' in {listed.why for listed in await suite.silencer.silences()}


@pytest.mark.parametrize("identity", ["nothing", "00000000-0000-4000-8000-000000000000", "a/b?c", ""])
async def test_a_silence_that_is_not_there(suite: Suite, identity: str) -> None:
    with pytest.raises(InvalidRequest, match="there is no silence"):
        await suite.silencer.end(identity)


async def test_a_silence_that_has_ended(suite: Suite) -> None:
    made = await suite.made({"service": "web"})
    await suite.silencer.end(made.id)
    with pytest.raises(InvalidRequest, match="there is no silence"):
        await suite.silencer.end(made.id)


async def test_an_alertmanager_that_is_away(unused_tcp_port: int) -> None:
    silencer = Alertmanager(f"http://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(
        AlertmanagerError, match=r"^Alertmanager cannot be reached \(.*\); `pierhead logs alertmanager`"
    ):
        await silencer.silences()
    await silencer.close()


@pytest.fixture
def receivers() -> Iterator[Receivers]:
    with receiving("127.0.0.1") as found:
        yield found


async def test_an_alert_reaches_a_webhook_and_a_mailbox_and_one_that_is_silenced_does_not(
    receivers: Receivers, tmp_path: Path
) -> None:
    words = {"summary": "5% of the answers of <web> are errors", "runbook_url": "docs/how-to/alerts.md#errorrate"}
    mail = {"PIERHEAD_ALERT_MAIL": "ops@shop.example, b@shop.example", "PIERHEAD_ALERT_SMTP_TLS": "off"}
    hook = f"http://127.0.0.1:{receivers.webhook_port}/hook"
    server = f"127.0.0.1:{receivers.mail_port}"
    with program(tmp_path, PIERHEAD_ALERT_WEBHOOK=hook, PIERHEAD_ALERT_SMTP=server, **mail) as url:
        silencer = Alertmanager(url)
        suite = Suite(silencer, url)
        await suite.made({"service": "shop"})
        receivers.status = 500
        await suite.fires(WEB, SHOP, annotations=words)
        await asyncio.to_thread(eventually, lambda: receivers.refused, "the webhook is asked")
        receivers.status = 200
        (message,) = await asyncio.to_thread(eventually, lambda: receivers.told("ErrorRate"), "it is asked again")
        assert (message["groupLabels"]["service"], message["commonAnnotations"]) == ("web", words)
        (text,) = await asyncio.to_thread(
            eventually, lambda: receivers.mailed("shop: [FIRING:1] ErrorRate web (critical)"), "the mail comes"
        )
        assert "5% of the answers of &lt;web&gt; are errors" in text
        assert "docs/how-to/alerts.md#errorrate" in text
        assert "http://127.0.0.1:8100/#/alerts" in text
        await suite.fires(WEB, annotations=words, ends=True)
        await asyncio.to_thread(eventually, lambda: receivers.told("ErrorRate", "resolved"), "it is over")
        assert {one["groupLabels"]["service"] for one in receivers.taken} == {"web"}
        page = request(f"{url}/metrics").body.decode()
        assert re.search(
            r'^alertmanager_notification_requests_failed_total\{.*integration="webhook".*\} [1-9]', page, re.M
        )
        await silencer.close()
