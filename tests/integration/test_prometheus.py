"""The configuration and the alerts, judged by the Prometheus that runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from tests.harness.stack import request
from tests.harness.waiting import eventually
from tests.integration.prometheus.exporters import PAGES

ROOT = Path(__file__).parents[2]
TAG = os.environ.get("PIERHEAD_TAG", "latest")
IMAGE = os.environ.get("PIERHEAD_PROMETHEUS_IMAGE", f"pierhead/prometheus:{TAG}")
FILES = ROOT / "dashboards" / "prometheus"
TESTS = Path(__file__).parent / "prometheus"
LABELS = {"pierhead.test": "prometheus"}

pytestmark = pytest.mark.engine


def promtool(*arguments: str) -> str:
    """What promtool of the stack's own image says to the working tree's files, which it must find right."""
    tool = DockerContainer(IMAGE).with_command(list(arguments))
    tool.with_volume_mapping(FILES, "/etc/prometheus").with_volume_mapping(TESTS, "/tests")
    tool.with_kwargs(entrypoint="promtool", network_mode="none", labels=LABELS)
    with tool:
        status, said = tool.wait(), b"".join(tool.get_logs()).decode()
    assert status == 0, said
    return said


def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    assert "rules found" in promtool("check", "config", "/etc/prometheus/prometheus.yml")


def test_alerts_fire_on_the_worlds_they_are_meant_for_and_on_no_others() -> None:
    promtool("test", "rules", "/tests/alerts.test.yml")


def test_every_alert_has_a_world_that_makes_it_fire() -> None:
    rules = yaml.safe_load((FILES / "rules" / "alerts.yml").read_text(encoding="utf-8"))
    worlds = yaml.safe_load((TESTS / "alerts.test.yml").read_text(encoding="utf-8"))
    written = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    fired = {case["alertname"] for world in worlds["tests"] for case in world["alert_rule_test"] if case["exp_alerts"]}
    assert written == fired


@pytest.fixture
def prometheus() -> Iterator[str]:
    """The URL of a Prometheus with the working tree's files, whose controller is exporters.py."""
    with Network(docker_network_kw={"labels": LABELS}) as network:
        exporters = DockerContainer(f"pierhead/controller:{TAG}").with_command(["/tests/exporters.py"])
        exporters.with_volume_mapping(TESTS, "/tests").with_network(network).with_network_aliases("controller")
        exporters.with_kwargs(entrypoint="python", labels=LABELS)
        scraper = DockerContainer(IMAGE).with_volume_mapping(FILES, "/etc/prometheus").with_network(network)
        scraper.with_exposed_ports(9090).with_kwargs(labels=LABELS)
        with exporters, scraper:
            yield f"http://127.0.0.1:{scraper.get_exposed_port(9090)}/api/v1"


def test_a_replica_that_exports_too_much_is_not_scraped_and_the_others_are(prometheus: str) -> None:
    def errors() -> dict[str, str]:
        """Of the targets that were scraped, by the replica."""
        found: list[dict[str, Any]] = request(f"{prometheus}/targets").json["data"]["activeTargets"]
        return {
            target["labels"]["replica"]: target["lastError"]
            for target in found
            if target["labels"]["job"] == "replicas" and target["health"] != "unknown"
        }

    seen = eventually(lambda: found if (found := errors()).keys() == PAGES.keys() else {}, "every page is scraped")
    assert seen["small"] == seen["large"] == ""
    assert seen["samples"] == "sample limit exceeded"
    assert seen["bytes"] == "body size limit exceeded"
    assert "label_limit exceeded" in seen["labels"]
    assert "label_name_length_limit exceeded" in seen["name"]
    assert "label_value_length_limit exceeded" in seen["value"]

    def firing() -> bool:
        alerts = request(f"{prometheus}/alerts").json["data"]["alerts"]
        return any(alert["labels"]["alertname"] == "ScrapeRefused" and alert["state"] == "firing" for alert in alerts)

    eventually(firing, "the alert fires", within_s=120)
    query = urlencode({"query": 'count by (replica) ({replica!="", __name__!~"up|scrape_.+"})'})
    stored = request(f"{prometheus}/query?{query}").json["data"]["result"]
    assert {sample["metric"]["replica"] for sample in stored} == {"small", "large"}, "after several scrapes of each"
