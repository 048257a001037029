"""Alerts of a whole stack: docs/how-to/alerts.md. One comes to a webhook and a mailbox, a silenced one does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import docker
import pytest

from tests.harness.commands import run
from tests.harness.receivers import Receivers, receiving
from tests.harness.stack import COMMAND_S, ROOT, Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

APP = "tests/e2e/apps/crashing.yaml"
REPEATED_AFTER_S = 15
"""By Prometheus: an alert that fires before it has found Alertmanager, in its first ten seconds."""


class AlertingStack(Stack):
    """Started by `up`, which adds compose/alerts.yaml to the files."""

    def __init__(self, receivers: Receivers) -> None:
        options = {
            "PIERHEAD_ALERT_WEBHOOK": f"http://{receivers.address}:{receivers.webhook_port}/hook",
            "PIERHEAD_ALERT_MAIL": "ops@shop.example",
            "PIERHEAD_ALERT_SMTP": f"{receivers.address}:{receivers.mail_port}",
            "PIERHEAD_ALERT_SMTP_TLS": "off",
            "PIERHEAD_BUILD": "0",
        }
        super().__init__("pierhead-test-alerts", [APP, "compose/alerts.yaml"], options)

    def up(self) -> None:
        done = run(["./pierhead", "up"], COMMAND_S, ROOT, {**self.env, "COMPOSE_FILE": f"compose/compose.yaml:{APP}"})
        assert done.returncode == 0, done.stdout + done.stderr

    def crashes(self, service: str) -> None:
        assert self.api(f"/api/v1/services/{service}/scale", "PUT", {"replicas": 1}).status == 202

    def silences(self) -> str:
        """What the command says; "" where it is refused."""
        words = ("silenced", "--alert", "CrashLoop", "--for", "1h", "--why", "a test of silences")
        done = self.pierhead("silence", *words)
        return done.stdout if done.returncode == 0 else ""

    def alerts(self) -> dict[tuple[str, str], Any]:
        """What fires, by name and service."""
        found = self.api("/api/v1/alerts").json
        assert (found["is_sent"], found["problem"]) == (True, "")
        return {(one["name"], one["service"]): one for one in found["alerts"]}


@pytest.fixture
def receivers() -> Iterator[Receivers]:
    """At this machine's address in Docker's own network, which containers of all networks reach."""
    engine = docker.from_env()
    address = engine.networks.get("bridge").attrs["IPAM"]["Config"][0]["Gateway"]
    engine.close()
    with receiving(address) as found:
        yield found


def test_an_alert_comes_to_the_webhook_and_the_mailbox_and_one_that_is_silenced_does_not(receivers: Receivers) -> None:
    stack = AlertingStack(receivers)
    with stack.running():
        assert stack.container("alertmanager").attrs["HostConfig"]["PortBindings"] in ({}, None), "no port is published"
        for refused, words in {
            ("loud", "--for", "2 hours", "--why", "x"): "--for: expected a duration such as 30m, 2h or 1d",
            ("luod", "--for", "2h", "--why", "x"): "did you mean 'loud'?",
        }.items():
            done = stack.pierhead("silence", *refused)
            assert (done.returncode, words in done.stderr) == (2, True), done.stderr
        made = eventually(stack.silences, "Prometheus and Alertmanager answer")
        assert made.startswith("CrashLoop of silenced is not sent for 1h.")
        (silence,) = stack.api("/api/v1/silences").json["silences"]
        assert (silence["service"], silence["alert"], silence["why"]) == ("silenced", "CrashLoop", "a test of silences")

        stack.crashes("silenced")
        stack.crashes("loud")
        held: Any = eventually(lambda: stack.alerts().get(("CrashLoop", "silenced")), "the silenced alert fires", 120)
        assert held["runbook"] == "docs/how-to/alerts.md#crashloop"
        eventually(
            lambda: stack.alerts()["CrashLoop", "silenced"]["silenced_by"] == [silence["id"]],
            "Alertmanager has it",
            REPEATED_AFTER_S + 30,
        )
        (message, *_) = eventually(lambda: receivers.told("CrashLoop"), "the other one comes to the webhook", 120)
        assert (message["groupLabels"]["service"], message["commonLabels"]["severity"]) == ("loud", "warning")
        assert message["commonAnnotations"]["runbook_url"] == "docs/how-to/alerts.md#crashloop"
        subject = f"{stack.project}: [FIRING:1] CrashLoop loud"
        (mail, *_) = eventually(lambda: receivers.mailed(subject), "and to the mailbox")
        assert "replicas of loud failed in a row" in mail
        assert {one["groupLabels"].get("service") for one in receivers.told("CrashLoop")} == {"loud"}
        assert receivers.mailed("CrashLoop silenced") == []

        wanted = ("CrashLoop of silenced (silenced)", "CrashLoop of loud")
        eventually(lambda: all(words in stack.pierhead("status").stdout for words in wanted), "status has both")
        end = ("silence", "--end", silence["id"])
        eventually(lambda: stack.pierhead(*end).returncode == 0, "Alertmanager answers the command")
        eventually(lambda: not stack.alerts()["CrashLoop", "silenced"]["silenced_by"], "the silence has ended")
        asked = " ".join(stack.messages("asked"))
        assert "POST silences" in asked
        assert f"DELETE silences/{silence['id']}" in asked

        configuration = "/tmp/alertmanager.yml"
        told: Any = stack.container("alertmanager").exec_run(["stat", "-c", "%a", configuration]).output
        assert told.split() == [b"600"]
