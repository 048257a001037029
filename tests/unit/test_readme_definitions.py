"""The README's Compose examples are read by the controller's own parser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from controller.spec import parse

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- test -->\n```yaml\n(.*?)```", README, re.DOTALL)


def test_there_are_some() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS)
def test_an_example_is_a_valid_definition(block: str) -> None:
    assert parse("readme", yaml.safe_load(block)).services


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parents[2]
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if not link.startswith("http") and not (root / link).exists()] == []


def test_what_the_table_of_places_names_exists() -> None:
    root = Path(__file__).parents[2]
    table = README.split("## Where do I add ...?")[1].split("\n\n[CONTRIBUTING")[0]
    places = [place for place in re.findall(r"`([\w./-]+/[\w./-]*)`", table) if "<" not in place]
    assert places
    assert [place for place in places if not (root / place).exists()] == []
