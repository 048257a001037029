from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.build_overview import COLUMNS, OUTPUT, SECTIONS, Panel, render
from tests.unit.dashboards.promql import metrics_in, selectors_in
from tests.unit.dashboards.sources import everything

ROOT = Path(__file__).parents[3]
GRAFANA = ROOT / "dashboards" / "grafana"
PANELS = [pytest.param(panel, id=f"{s.title}: {panel.title}") for s in SECTIONS for panel in s.panels]
NOT_OF_ONE_SERVICE = re.compile(r"ALERTS|up|pierhead_gpu_.*|pierhead_controller_.*")


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(OUTPUT.read_text(encoding="utf-8"))
    return found


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_json_is_what_the_builder_writes() -> None:
    message = "overview.json is out of date: run `python dashboards/build_overview.py`"
    assert dashboard() == json.loads(json.dumps(render(SECTIONS))), message


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_for_metrics_that_somebody_exports(panel: Panel) -> None:
    for query in panel.queries:
        assert metrics_in(query.expr) <= everything()


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_follows_the_service_variable_and_the_rate_interval(panel: Panel) -> None:
    for query in panel.queries:
        assert set(re.findall(r"\[(.*?)\]", query.expr)) <= {"$__rate_interval"}
        filtered = {name for name, labels in selectors_in(query.expr) if 'service=~"$service"' in labels}
        assert {name for name in metrics_in(query.expr) if not NOT_OF_ONE_SERVICE.fullmatch(name)} <= filtered


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows(panel: Panel) -> None:
    assert panel.description.endswith(".")
    assert all(query.legend for query in panel.queries)


def test_panels_fit_the_grid_without_overlap() -> None:
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    cells = [
        (x, y)
        for place in places
        for x, y in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
    ]
    assert len(cells) == len(set(cells))
    assert all(0 <= x < COLUMNS for x, _ in cells)


def test_panels_have_ids_of_their_own() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))


def test_panels_ask_the_provisioned_datasource() -> None:
    (source,) = load(GRAFANA / "provisioning" / "datasources" / "prometheus.yaml")["datasources"]
    asked = {target["datasource"]["uid"] for panel in dashboard()["panels"] for target in panel.get("targets", [])}
    assert asked == {source["uid"]}


def test_the_datasource_knows_the_scrape_interval() -> None:
    (source,) = load(GRAFANA / "provisioning" / "datasources" / "prometheus.yaml")["datasources"]
    scrape = load(ROOT / "dashboards" / "prometheus" / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape


def test_grafana_finds_the_dashboard_where_compose_mounts_it() -> None:
    grafana = load(ROOT / "compose" / "compose.yaml")["services"]["grafana"]
    mount = next(volume for volume in grafana["volumes"] if volume.startswith("../dashboards/grafana:"))
    inside = mount.split(":")[1]
    (provider,) = load(GRAFANA / "provisioning" / "dashboards" / "pierhead.yaml")["providers"]

    assert grafana["environment"]["GF_PATHS_PROVISIONING"] == f"{inside}/provisioning"
    assert provider["options"]["path"] == f"{inside}/dashboards"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{inside}/dashboards/{OUTPUT.name}"
