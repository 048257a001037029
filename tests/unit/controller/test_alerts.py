"""What fires and what is silenced: the API, and the command on top of it, in front of fakes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from controller.api_tokens import digest_of, read_tokens
from controller.daemon.bodies import silence_in
from controller.daemon.callers import Gatekeeper
from controller.errors import InvalidRequest
from controller.observe.prometheus import AlertRule, FiringAlert
from controller.status.records.changes import MakeSilence
from tests.fakes.fake_alertmanager import FakeAlertmanager
from tests.unit.controller.control import Control
from tests.unit.controller.test_api import error_of, serving
from tests.unit.controller.test_cli import Command, served
from tests.unit.controller.test_openapi import checked
from tests.unit.controller.worlds import service

WEB = {"alertname": "ErrorRate", "service": "web", "severity": "critical"}
DOWN = {"alertname": "HAProxyDown", "severity": "critical", "job": "haproxy"}
WORDS = {"summary": "5% of the answers of web are errors", "description": "Look.", "runbook_url": "docs/x.md#errorrate"}
SILENCE = {"service": "web", "alert": "ErrorRate", "for_s": 7200, "why": "a load test"}
TOKENS = read_tokens("secret", f"viewer:read:{digest_of('v')},ops:scale:{digest_of('s')}")


async def rules() -> Sequence[AlertRule]:
    errors = AlertRule("ErrorRate", [FiringAlert(WEB, WORDS, 1000.5)])
    return [errors, AlertRule("HAProxyDown", [FiringAlert(DOWN, {}, 2000)]), AlertRule("NodeLost", [])]


@pytest.fixture
def alertmanager(control: Control) -> FakeAlertmanager:
    control.silencer = fake = FakeAlertmanager(control.wall)
    fake.alerts = [WEB, DOWN]
    return fake


@pytest.fixture
def control(tmp_path: Path) -> Control:
    control = Control.of(tmp_path, service("web"), service("api", replicas=1))
    control.rules = rules
    return control


async def test_what_fires_is_silenced_and_sent_again(control: Control, alertmanager: FakeAlertmanager) -> None:
    async with serving(control, web=2) as client:
        found = await checked(await client.get("/api/v1/alerts"), "alerts")
        assert (found["is_sent"], found["problem"]) == (True, "")
        assert [(one["name"], one["service"], one["silenced_by"]) for one in found["alerts"]] == [
            ("HAProxyDown", "", []), ("ErrorRate", "web", []),
        ]  # fmt: skip
        web = found["alerts"][1]
        assert (web["summary"], web["since"], web["runbook"]) == (WORDS["summary"], 1000.5, "docs/x.md#errorrate")

        (made,) = (await checked(await client.post("/api/v1/silences", json=SILENCE), "silence")).values()
        assert (made["alert"], made["service"], made["by"]) == ("ErrorRate", "web", "this machine")
        assert made["ends_at"] - made["starts_at"] == 7200
        found = await checked(await client.get("/api/v1/alerts"), "alerts")
        assert [one["silenced_by"] for one in found["alerts"]] == [[], [made["id"]]]
        assert (await checked(await client.get("/api/v1/silences"), "silences"))["silences"] == [made]

        ended = await client.delete(f"/api/v1/silences/{made['id']}")
        assert await checked(ended, "end_silence") == {"id": made["id"]}
        assert (await checked(await client.get("/api/v1/silences"), "silences"))["silences"] == []
        again = await error_of(await client.delete(f"/api/v1/silences/{made['id']}"))
        assert again[:2] == (400, "invalid_request")
        asked = control.said("asked")
        assert [words.split(": ", 1)[1].split(" {")[0] for words in asked] == [
            "POST silences", f"DELETE silences/{made['id']}",
        ]  # fmt: skip


async def test_a_silence_needs_a_known_service_and_alert(control: Control, alertmanager: FakeAlertmanager) -> None:
    async with serving(control, web=2) as client:
        unknown = await error_of(await client.post("/api/v1/silences", json={**SILENCE, "service": "wep"}))
        assert unknown[:2] == (404, "unknown_service")
        words = await error_of(await client.post("/api/v1/silences", json={**SILENCE, "alert": "ErrorRat"}))
        assert words[2] == (
            "alert: there is no alert 'ErrorRat'; did you mean 'ErrorRate'? docs/how-to/alerts.md lists them"
        )
        assert await alertmanager.silences() == []


async def test_a_service_that_is_gone_can_be_silenced_while_an_alert_names_it(
    control: Control, alertmanager: FakeAlertmanager
) -> None:
    async def gone() -> Sequence[AlertRule]:
        return [AlertRule("ServiceWithoutReplica", [FiringAlert({"service": "gone"}, {}, 1.0)])]

    control.rules = gone
    async with serving(control, web=2) as client:
        wanted = {"service": "gone", "for_s": 60, "why": "it was removed"}
        assert (await client.post("/api/v1/silences", json=wanted)).status == 200
        (made,) = await alertmanager.silences()
        assert made.labels == {"service": "gone"}


async def test_without_alertmanager_the_answer_says_what_to_write(control: Control) -> None:
    async with serving(control, web=2) as client:
        found = await checked(await client.get("/api/v1/alerts"), "alerts")
        assert (found["is_sent"], len(found["alerts"])) == (False, 2)
        for answer in (
            await client.get("/api/v1/silences"),
            await client.post("/api/v1/silences", json=SILENCE),
            await client.delete("/api/v1/silences/one"),
        ):
            status, code, words = await error_of(answer)
            assert (status, code) == (409, "no_alertmanager")
            assert "write where they go into .env, such as PIERHEAD_ALERT_WEBHOOK=https://..." in words
        assert await (await client.get("/api/v1/targets?job=alertmanager")).json() == []


async def test_prometheus_and_alertmanager_that_are_away(control: Control, alertmanager: FakeAlertmanager) -> None:
    async with serving(control, web=2) as client:
        targets = await (await client.get("/api/v1/targets?job=alertmanager")).json()
        assert targets == [{"targets": ["alertmanager:9093"], "labels": {"job": "alertmanager"}}]
        alertmanager.is_away = True
        found = await checked(await client.get("/api/v1/alerts"), "alerts")
        assert (found["problem"], len(found["alerts"])) == ("Alertmanager cannot be reached (test)", 2)
        refused = await error_of(await client.post("/api/v1/silences", json=SILENCE))
        assert refused == (502, "alertmanager_error", "Alertmanager cannot be reached (test)")
    control.rules = Control.of(control.directory).rules
    async with serving(control, web=2) as client:
        found = await checked(await client.get("/api/v1/alerts"), "alerts")
        assert (found["problem"], found["alerts"]) == ("no connection to http://prometheus:9090 (test)", [])
        status, code, _ = await error_of(await client.post("/api/v1/silences", json=SILENCE))
        assert (status, code) == (502, "prometheus_error")


async def test_silences_need_the_role_scale(control: Control, alertmanager: FakeAlertmanager) -> None:
    async with serving(control, Gatekeeper(TOKENS, frozenset), web=2) as client:
        reader, ops = ({"Authorization": f"Bearer {token}"} for token in ("v", "s"))
        assert (await client.post("/api/v1/silences", json=SILENCE, headers=reader)).status == 403
        assert (await client.get("/api/v1/alerts", headers=reader)).status == 200
        made = await client.post("/api/v1/silences", json=SILENCE, headers=ops)
        assert (await made.json())["about"]["by"] == "ops"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"for_s": 60, "why": "x"}', "body: expected a service, an alert or both, found neither"),
        ('{"service": 3, "for_s": 60, "why": "x"}', "service: expected a name, found 3"),
        ('{"service": "web", "for_s": "2h", "why": "x"}', 'for_s: expected whole seconds from 1 to .*, found "2h"'),
        ('{"service": "web", "for_s": 0, "why": "x"}', "for_s: expected whole seconds from 1 to"),
        ('{"service": "web", "for_s": true, "why": "x"}', "for_s: expected whole seconds from 1 to"),
        ('{"service": "web", "for_s": 60}', "why: expected 1 to 500 characters"),
        ('{"service": "web", "for_s": 60, "why": " "}', "why: expected 1 to 500 characters"),
        ('{"service": "web", "for": 60, "why": "x"}', "body: expected .* and nothing else"),
        ("", "body: expected JSON such as"),
    ],
)
def test_a_silence_that_cannot_be(body: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{words}"):
        silence_in(body.encode())
    wanted = b'{"alert": "NodeLost", "for_s": 60, "why": "a\\nb"}'
    assert silence_in(wanted) == MakeSilence("", "NodeLost", 60, "a b")


async def test_the_command(control: Control, alertmanager: FakeAlertmanager) -> None:
    async with served(control, web=2, api=1) as pierhead:
        assert "alerts that fire: HAProxyDown, ErrorRate of web\n" in (await pierhead("status")).out
        assert (await pierhead("silence")).out == "every alert is sent\n"
        made = await pierhead("silence", "web", "--alert", "ErrorRate", "--for", "2h", "--why", "a load test")
        assert (made.code, made.err) == (0, "")
        assert made.out == ("ErrorRate of web is not sent for 2h. `pierhead silence --end silence-1` ends that.\n")
        assert "ErrorRate of web (silenced)" in (await pierhead("status")).out
        listed = (await pierhead("silence")).out
        assert all(words in listed for words in ("silence-1", "ErrorRate of web", "a load test"))
        ended = await pierhead("silence", "--end", "silence-1")
        assert ended.out == "silence-1 has ended: its alerts are sent again.\n"
        again = await pierhead("silence", "--end", "silence-1")
        assert (again.code, "there is no silence 'silence-1'" in again.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("web", "--why", "x"), "--for: expected a duration such as 30m, 2h or 1d, found ''"),
        (
            ("web", "--for", "2 hours", "--why", "x"),
            "--for: expected a duration such as 30m, 2h or 1d, found '2 hours'",
        ),
        (("web", "--for", "0h", "--why", "x"), "--for: expected a duration such as 30m, 2h or 1d, found '0h'"),
        (("web", "--for", "2h"), "--why: expected the reason"),
        (("--for", "2h", "--why", "x"), "expected SERVICE, --alert NAME or both"),
        (("--end", "a", "web"), "--end ID ends a silence: expected nothing else with it"),
    ],
)
async def test_a_command_that_cannot_be(words: tuple[str, ...], expected: str) -> None:
    done = await Command("http://127.0.0.1:9")("silence", *words)
    assert (done.code, done.out, expected in done.err) == (2, "", True), done.err
