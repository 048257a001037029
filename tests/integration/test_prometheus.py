"""The configuration and the alerts, judged by the Prometheus that runs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("PIERHEAD_PROMETHEUS_IMAGE", f"pierhead/prometheus:{os.environ.get('PIERHEAD_TAG', 'latest')}")

pytestmark = pytest.mark.engine


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run promtool of the stack's own image on the working tree's files."""
    return subprocess.run(
        [
            *("docker", "run", "--rm", "--network=none", "--entrypoint=promtool"),
            f"--label=pierhead.test-run={os.environ.get('PIERHEAD_TEST_RUN', 'by-hand')}",
            f"--volume={ROOT / 'dashboards' / 'prometheus'}:/etc/prometheus:ro",
            f"--volume={Path(__file__).parent / 'prometheus'}:/tests:ro",
            *(IMAGE, *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    checked = promtool("check", "config", "/etc/prometheus/prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "rules found" in checked.stdout


def test_alerts_fire_on_the_worlds_they_are_meant_for_and_on_no_others() -> None:
    tested = promtool("test", "rules", "/tests/alerts.test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_has_a_world_that_makes_it_fire() -> None:
    rules = yaml.safe_load((ROOT / "dashboards" / "prometheus" / "rules" / "alerts.yml").read_text(encoding="utf-8"))
    worlds = yaml.safe_load((Path(__file__).parent / "prometheus" / "alerts.test.yml").read_text(encoding="utf-8"))
    written = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    fired = {case["alertname"] for world in worlds["tests"] for case in world["alert_rule_test"] if case["exp_alerts"]}
    assert written == fired
