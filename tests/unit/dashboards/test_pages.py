from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import build_llm, build_overview
from dashboards.panels import COLUMNS, Page, Panel, render
from tests.unit.dashboards.promql import metrics_in, selectors_in
from tests.unit.dashboards.sources import everything

ROOT = Path(__file__).parents[3]
GRAFANA = ROOT / "dashboards" / "grafana"
PAGES = (build_overview.PAGE, build_llm.PAGE)
PANELS = [
    pytest.param(panel, id=f"{page.uid}: {section.title}: {panel.title}")
    for page in PAGES
    for section in page.sections
    for panel in section.panels
]
NOT_OF_ONE_SERVICE = re.compile(r"ALERTS|up|pierhead_gpu_.*|pierhead_(controller|node|edge_differs).*")
CHOICE = re.compile(r'(service|target)=~"\$service\|?"')
"""On the gateways' metrics the LLM service is the target."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)


def dashboard(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.file.read_text(encoding="utf-8"))
    return found


def parts(page: Page) -> list[dict[str, Any]]:
    """Rows and panels, with those that lie in a collapsed row."""
    return [part for row in dashboard(page)["panels"] for part in (row, *row.get("panels", ()))]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@each_page
def test_the_json_is_what_the_builder_writes(page: Page) -> None:
    message = f"{page.file.name} is out of date: run `python -m dashboards.build_{page.file.stem}`"
    assert dashboard(page) == json.loads(json.dumps(render(page))), message


def test_every_dashboard_is_a_page_with_a_name_of_its_own() -> None:
    assert {page.file for page in PAGES} == set((GRAFANA / "dashboards").glob("*.json"))
    assert len({page.uid for page in PAGES}) == len({page.title for page in PAGES}) == len(PAGES)


def test_a_page_offers_services_that_somebody_tells() -> None:
    assert {page.services for page in PAGES} <= everything()


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_for_metrics_that_somebody_exports(panel: Panel) -> None:
    for query in panel.queries:
        assert metrics_in(query.expr) <= everything()


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_follows_the_service_variable_and_the_rate_interval(panel: Panel) -> None:
    for query in panel.queries:
        assert set(re.findall(r"\[(.*?)\]", query.expr)) <= {"$__rate_interval"}
        filtered = {name for name, labels in selectors_in(query.expr) if CHOICE.search(labels)}
        assert {name for name in metrics_in(query.expr) if not NOT_OF_ONE_SERVICE.fullmatch(name)} <= filtered
        of_gateways = {name for name, labels in selectors_in(query.expr) if 'target=~"$service' in labels}
        assert of_gateways <= {
            name for name in filtered if name.startswith("pierhead_llm_") and "_engine_" not in name
        }, "the others have no target"


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows(panel: Panel) -> None:
    assert panel.description.endswith(".")
    assert all(query.legend for query in panel.queries)


@each_page
def test_panels_fit_the_grid_without_overlap(page: Page) -> None:
    places = [part["gridPos"] for part in parts(page)]
    cells = [
        (x, y)
        for place in places
        for x, y in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
    ]
    assert len(cells) == len(set(cells))
    assert all(0 <= x < COLUMNS for x, _ in cells)


@each_page
def test_panels_have_ids_of_their_own(page: Page) -> None:
    ids = [part["id"] for part in parts(page)]
    assert len(ids) == len(set(ids))


@each_page
def test_panels_ask_the_provisioned_datasource(page: Page) -> None:
    (source,) = load(GRAFANA / "provisioning" / "datasources" / "prometheus.yaml")["datasources"]
    asked = {target["datasource"]["uid"] for part in parts(page) for target in part.get("targets", [])}
    assert asked == {source["uid"]}


def test_the_datasource_knows_the_scrape_interval() -> None:
    (source,) = load(GRAFANA / "provisioning" / "datasources" / "prometheus.yaml")["datasources"]
    scrape = load(ROOT / "dashboards" / "prometheus" / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape


def test_grafana_finds_the_dashboards_where_compose_mounts_them() -> None:
    grafana = load(ROOT / "compose" / "compose.yaml")["services"]["grafana"]
    mount = next(volume for volume in grafana["volumes"] if volume.startswith("../dashboards/grafana:"))
    inside = mount.split(":")[1]
    (provider,) = load(GRAFANA / "provisioning" / "dashboards" / "pierhead.yaml")["providers"]

    assert grafana["environment"]["GF_PATHS_PROVISIONING"] == f"{inside}/provisioning"
    assert provider["options"]["path"] == f"{inside}/dashboards"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{inside}/dashboards/{build_overview.PAGE.file.name}"
