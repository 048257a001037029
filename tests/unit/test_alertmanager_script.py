"""dashboards/alertmanager/entrypoint.sh: the configuration that it writes from the environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.imports import ROOT

SCRIPT = (ROOT / "dashboards/alertmanager/entrypoint.sh").read_text()
AMTOOL = os.environ.get("PIERHEAD_AMTOOL") or shutil.which("amtool")
HOSTILE = "p\"a\\b'c {{ .x }} # $HOME `id` %s"
MAIL = {"PIERHEAD_ALERT_MAIL": "ops@shop.example, on-call@shop.example", "PIERHEAD_ALERT_SMTP": "smtp.shop.example:587"}
EVERYTHING = {
    **MAIL,
    "PIERHEAD_ALERT_WEBHOOK": "https://hooks.shop.example/a?b=%20c#d",
    "PIERHEAD_ALERT_SLACK": "https://hooks.slack.com/services/T/B/x",
    "PIERHEAD_ALERT_SMTP_USER": "ops",
    "PIERHEAD_ALERT_SMTP_PASSWORD": HOSTILE,
    "PIERHEAD_ALERT_FROM": "pierhead@shop.example",
    "PIERHEAD_ALERT_REPEAT": "30m",
}


def started(place: Path, environment: dict[str, str]) -> tuple[Path, str]:
    """The file that the script writes, and the words with which it starts Alertmanager."""
    (place / "entrypoint").write_text(SCRIPT.replace("/tmp/", f"{place}/"))
    (place / "prometheus-alertmanager").write_text('#!/bin/sh\necho "$@"\n')
    (place / "prometheus-alertmanager").chmod(0o755)
    env = {"PATH": f"{place}:{os.environ['PATH']}", "COMPOSE_PROJECT_NAME": "shop", **environment}
    done = subprocess.run(["sh", place / "entrypoint"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return place / "alertmanager.yml", done.stdout


def written(place: Path, environment: dict[str, str]) -> Any:
    return yaml.safe_load(started(place, environment)[0].read_text())


def test_one_receiver_with_everything_that_is_named(tmp_path: Path) -> None:
    found = written(tmp_path, EVERYTHING)
    (receiver,) = found["receivers"]
    assert found["route"] == {
        "receiver": "shop",
        "group_by": ["alertname", "service"],
        "group_wait": "10s",
        "group_interval": "1m",
        "repeat_interval": "30m",
    }
    assert found["global"]["smtp_auth_password"] == HOSTILE
    assert found["global"]["smtp_from"] == "pierhead@shop.example"
    assert "smtp_require_tls" not in found["global"], "it is required"
    (webhook,), (slack,), (email,) = (receiver[f"{kind}_configs"] for kind in ("webhook", "slack", "email"))
    assert (webhook["url"], email["to"]) == (EVERYTHING["PIERHEAD_ALERT_WEBHOOK"], MAIL["PIERHEAD_ALERT_MAIL"])
    assert slack["api_url"] == EVERYTHING["PIERHEAD_ALERT_SLACK"]
    assert 'reReplaceAll "<" "&lt;"' in slack["text"]
    assert email["headers"]["Subject"] == 'shop: {{ template "__subject" . }}'
    assert slack["title"] == slack["fallback"]
    for member in ("title", "text"):  # what others may have written is no link, and calls nobody
        assert slack[member].count('reReplaceAll "<" "&lt;"') == len(
            re.findall(r"(Labels|Annotations)\.", slack[member])
        )
    assert all(one["send_resolved"] for one in (webhook, slack, email))


def test_what_is_not_named_is_not_there_or_has_a_default(tmp_path: Path) -> None:
    found = written(tmp_path, MAIL | {"PIERHEAD_ALERT_SMTP_TLS": "OFF", "PIERHEAD_ALERT_WEBHOOK": ""})
    assert found["receivers"][0].keys() == {"name", "email_configs"}
    assert found["global"]["smtp_from"] == "ops@shop.example"
    assert found["global"]["smtp_require_tls"] is False
    assert found["route"]["repeat_interval"] == "4h"
    assert written(tmp_path, {})["receivers"] == [{"name": "shop"}]


def test_a_server_whose_connections_begin_with_tls_is_not_asked_for_starttls(tmp_path: Path) -> None:
    found = written(tmp_path, MAIL | {"PIERHEAD_ALERT_SMTP": "smtp.shop.example:465"})
    assert found["global"]["smtp_require_tls"] is False


def test_the_file_is_for_its_user_alone_and_links_lead_to_the_console(tmp_path: Path) -> None:
    file, words = started(tmp_path, EVERYTHING | {"PIERHEAD_API_PORT": "8123"})
    assert file.stat().st_mode & 0o777 == 0o600
    assert HOSTILE not in words
    assert "--web.external-url=http://127.0.0.1:8123\n" in words
    assert "--cluster.listen-address= " in words


@pytest.mark.skipif(AMTOOL is None, reason="no amtool on this machine: apt-get install prometheus-alertmanager")
@pytest.mark.parametrize("environment", [{}, MAIL, EVERYTHING, MAIL | {"PIERHEAD_ALERT_SMTP_TLS": "off"}])
def test_amtool_takes_it(tmp_path: Path, environment: dict[str, str]) -> None:
    file, _ = started(tmp_path, environment)
    done = subprocess.run([str(AMTOOL), "check-config", file], capture_output=True, text=True, check=False)
    assert (done.returncode, "1 receivers" in done.stdout) == (0, True), done.stdout + done.stderr
