"""The application of the page for people who come from Ray Serve."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness.imports import ROOT
from tests.harness.rayserve_apps import answers, own_python

PAGE = (ROOT / "docs" / "how-to" / "from-ray-serve.md").read_text(encoding="utf-8")
EXPECTED = {"status": 200, "headers": {"content-type": "application/json", "x-request-id": "made"}}


def test_the_page_s_application_answers(tmp_path: Path) -> None:
    [source] = re.findall(r'```python title="app.py"\n(.*?)```', PAGE, re.DOTALL)
    more = """
REQUESTS = [{"path": "/recommend?user=7"}]


def calls(handle):
    yield handle.recommend.remote(7).result()
"""
    (tmp_path / "app_of_the_page.py").write_text(source + more, encoding="utf-8")
    for system in ("pierhead", "services"):
        found = answers(system, own_python(), [str(tmp_path / "app_of_the_page.py")], tmp_path / f"{system}.json")
        assert found["app_of_the_page"] == {
            "requests": [{**EXPECTED, "body": '{"score":3.5}'}],
            "calls": [{"score": 3.5}],
        }
