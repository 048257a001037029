"""The configuration and the alerts, judged by the Prometheus that runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from testcontainers.core.container import DockerContainer

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("PIERHEAD_PROMETHEUS_IMAGE", f"pierhead/prometheus:{os.environ.get('PIERHEAD_TAG', 'latest')}")

pytestmark = pytest.mark.engine


def promtool(*arguments: str) -> str:
    """What promtool of the stack's own image says to the working tree's files, which it must find right."""
    tool = DockerContainer(IMAGE).with_command(list(arguments))
    tool.with_volume_mapping(ROOT / "dashboards" / "prometheus", "/etc/prometheus")
    tool.with_volume_mapping(Path(__file__).parent / "prometheus", "/tests")
    tool.with_kwargs(entrypoint="promtool", network_mode="none", labels={"pierhead.test": "promtool"})
    with tool:
        status, said = tool.wait(), b"".join(tool.get_logs()).decode()
    assert status == 0, said
    return said


def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    assert "rules found" in promtool("check", "config", "/etc/prometheus/prometheus.yml")


def test_alerts_fire_on_the_worlds_they_are_meant_for_and_on_no_others() -> None:
    promtool("test", "rules", "/tests/alerts.test.yml")


def test_every_alert_has_a_world_that_makes_it_fire() -> None:
    rules = yaml.safe_load((ROOT / "dashboards" / "prometheus" / "rules" / "alerts.yml").read_text(encoding="utf-8"))
    worlds = yaml.safe_load((Path(__file__).parent / "prometheus" / "alerts.test.yml").read_text(encoding="utf-8"))
    written = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    fired = {case["alertname"] for world in worlds["tests"] for case in world["alert_rule_test"] if case["exp_alerts"]}
    assert written == fired
