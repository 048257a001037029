"""The documents: their Compose examples are read by the controller's own parser, their links lead somewhere, and the
site builds without a warning and fetches nothing from elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pierhead
import pytest
import yaml

from controller.daemon.api import CALLS
from controller.files.parse import parse
from docs.generate import error_codes, rest_api, serve_block, settings
from tests.harness.commands import run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README, CONTRIBUTING = (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))
ROOMS = ("controller", "services", "simulator", "tests")
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
DEFINITIONS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r'(?:<!-- test -->\n```yaml|```yaml title="compose/[^"]*")\n(.*?)```', page.read_text(), re.DOTALL)
    )
]


def test_there_are_some() -> None:
    assert len(DEFINITIONS) >= 8


@pytest.mark.parametrize("block", DEFINITIONS)
def test_an_example_is_a_valid_definition(block: str) -> None:
    assert parse("docs", yaml.safe_load(block)).services


@pytest.mark.parametrize("page", [README, CONTRIBUTING], ids=lambda page: page.name)
def test_links_from_the_root_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_code_and_benches_name_pages_and_headings_that_exist() -> None:
    """Links within docs/ are checked when the site is built."""
    folders = "|".join(folder.name for folder in DOCS.iterdir() if folder.is_dir())
    headings = {
        page.relative_to(ROOT).as_posix(): {
            re.sub(r"[^\w\s-]", "", heading).lower().replace(" ", "-")
            for heading in re.findall(r"(?m)^#+ (.+)$", page.read_text())
        }
        for page in DOCS.rglob("*.md")
    }
    named = [
        (file.relative_to(ROOT).as_posix(), *found)
        for room in ROOMS
        for file in (ROOT / room).rglob("*")
        if file.suffix in (".md", ".py")
        for found in re.findall(rf"\b(docs/(?:{folders})/[\w-]+\.md)(?:#([\w-]+))?", file.read_text(encoding="utf-8"))
    ]
    assert named
    assert [one for one in named if one[2] not in {"", *headings.get(one[1], ())} or one[1] not in headings] == []


def test_modules_name_files_that_exist() -> None:
    modules = [file for room in (*ROOMS, "proto") for file in (ROOT / room).rglob("*.py")]
    names = {file.name for file in modules}
    named = [
        (file.relative_to(ROOT).as_posix(), name)
        for file in modules
        for docstring in re.findall(r'\A"""(.*?)"""', file.read_text(encoding="utf-8"), re.DOTALL)
        for name in re.findall(r"(?<![\w.*-])[a-z]\w*\.py\b", docstring)
    ]
    assert named
    assert [one for one in named if one[1] not in names] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_typed_can_be_copied(page: Path) -> None:
    assert "<this repository>" not in page.read_text(encoding="utf-8")


def test_the_first_pages_are_short() -> None:
    assert len(README.read_text().splitlines()) <= 200
    assert len(CONTRIBUTING.read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", [CONTRIBUTING, *PAGES[1:]], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    """`tests/unit/x.py::test_y` names a test; what is written with <...> or beyond these folders is an example."""
    named = re.findall(
        r"`((?:tests|controller|haproxy|dashboards|proto|compose/machine)/[\w./-]*)(?:::(\w+))?`", page.read_text()
    )
    assert [path for path, _ in named if not (ROOT / path).exists()] == []
    assert [test for path, test in named if test and not re.search(rf"\b{test}\b", (ROOT / path).read_text())] == []


def test_every_variable_of_the_compose_files_is_in_env() -> None:
    files = [*(ROOT / "compose").glob("*.yaml"), *(ROOT / "compose" / "apps").glob("*.yaml")]
    used = {name for file in files for name in re.findall(r"\$\{(\w+)", file.read_text())}
    listed = [name for name, _, words in settings.variables((ROOT / ".env").read_text()) if words]
    assert used - set(listed) == {"PWD"}
    assert len(listed) == len(set(listed))


def test_every_key_of_x_serve_has_a_heading() -> None:
    reference = (ROOT / "compose" / "reference.yaml").read_text()
    paths = [".".join(key.path) for key in serve_block.keys(reference) if not key.is_told_above]
    assert len(paths) == len(set(paths))
    assert {"replicas", "health.probe.path", "autoscale.min", "gpu.fraction", "llm.engine"} <= set(paths)
    page = serve_block.page(ROOT)
    rows = {path: row for path in paths for row in page.splitlines() if row.startswith(f"| [`{path}`](#{path}) |")}
    assert sorted(rows) == sorted(paths), "each has a row in the table"
    assert "**Others**" not in page
    assert rows["gpu.fraction"].endswith("| number (0.0001 to 1) |  |")
    assert rows["shared_memory.size"].endswith("| string or integer |  |")


def test_every_call_of_the_api_is_shown_as_it_is_typed() -> None:
    page = rest_api.page(ROOT)
    calls = page.split("## Documents")[0].split("\n### ")[1:]
    assert len(calls) == len(CALLS)
    assert [call.splitlines()[0] for call in calls if "```bash\ncurl -s http://127.0.0.1:8100/" not in call] == []
    answers = [json.loads(answer) for answer in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    assert {"service": "...", "replicas": 0, "message": "...", "wanted": 0} in answers
    assert "/services/web/scale -X PUT --json '{\"replicas\": 0}'" in page


def test_every_code_of_an_error_has_a_row() -> None:
    codes = {row.split("`")[1] for row in error_codes.page(ROOT).splitlines() if row.startswith("| `")}
    pages = [*(ROOT / "haproxy" / "errors").glob("*.json"), ROOT / "haproxy" / "haproxy.cfg.j2"]
    of_haproxy = {code for page in pages for code in re.findall(r'"code":"(\w+)"', page.read_text())}
    of_services = set(re.findall(r"  ([a-z_]+)(?: +Retry-After)?$", pierhead.errors.__doc__ or "", re.MULTILINE))
    assert {"internal", "no_replica"} <= of_services
    assert {"queue_full", "route_not_found"} <= of_haproxy
    assert (of_haproxy | of_services) - {"kind", "error", "remote", "settings"} <= codes
    assert {"not_yet", "unknown_service", "forbidden"} <= codes


def test_the_python_api_has_every_public_name() -> None:
    page = (DOCS / "reference" / "python-api.md").read_text(encoding="utf-8")
    shown = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith("::: ")}
    assert set(pierhead.__all__) - shown - set(vars(pierhead.errors)) == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    into = tmp_path_factory.mktemp("site")
    command: list[str | Path] = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", into]
    done = run(command, 250, ROOT, {**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return into


def test_the_site_has_every_page(site: Path) -> None:
    missing = [page for page in PAGES[1:] if not (site / page.relative_to(DOCS)).with_suffix(".html").exists()]
    assert missing == []


def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    fetched = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(https?:)?//")
    assert [page for page in site.rglob("*.html") if fetched.search(page.read_text(encoding="utf-8"))] == []
