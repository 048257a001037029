from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from tests.unit.dashboards.promql import metrics_in
from tests.unit.dashboards.sources import everything

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "dashboards" / "prometheus"
PAGE = "docs/how-to/alerts.md"
RULES = [
    pytest.param({**rule, "group": group["name"]}, id=rule["alert"])
    for path in sorted(PROMETHEUS.glob("rules/*.yml"))
    for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("rule", RULES)
def test_an_alert_asks_for_metrics_that_somebody_exports(rule: dict[str, Any]) -> None:
    assert metrics_in(rule["expr"]) <= everything()


@pytest.mark.parametrize("rule", RULES)
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"{PAGE}#{rule['alert'].lower()}"
    assert f"\n### {rule['alert']}\n" in (ROOT / PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if cast("Any", rule.values[0])["group"] not in ("stack", "nodes")]
)
def test_an_alert_of_a_service_names_it(rule: dict[str, Any]) -> None:
    assert re.search(r"\$labels\.(service|target)\b", rule["annotations"]["summary"])


def test_the_docs_have_no_other_alert() -> None:
    named = re.findall(r"(?m)^### (\w+)$", (ROOT / PAGE).read_text(encoding="utf-8"))
    assert sorted(named) == sorted(str(rule.id) for rule in RULES)


def test_jobs_that_alerts_name_are_scraped() -> None:
    jobs = {job["job_name"] for job in load(PROMETHEUS / "prometheus.yml")["scrape_configs"]}
    assert jobs == {"prometheus", "controller", "alertmanager", "haproxy", "replicas"}


def test_static_targets_are_services_of_the_stack() -> None:
    stack = load(ROOT / "compose" / "compose.yaml")["services"]
    for job in load(PROMETHEUS / "prometheus.yml")["scrape_configs"]:
        for group in job.get("static_configs", []):
            for target in group["targets"]:
                assert target.split(":")[0] in {*stack, "localhost"}
