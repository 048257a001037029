"""The page of Ray Serve's names: it has every one of them, and says of each what is so."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pierhead.rayserve.options import DeploymentOptions

from tests.harness.imports import ROOT
from tests.harness.rayserve_apps import rays_python

PAGE = ROOT / "docs" / "reference" / "ray-serve.md"
GUIDE = ROOT / "docs" / "reference" / "ray-serve-llm.md"
RECORDED = ROOT / "tests" / "rayserve"
LISTED = (RECORDED / "ray_serve_names.txt").read_text(encoding="utf-8").split()
LLM = (RECORDED / "ray_serve_llm_names.txt").read_text(encoding="utf-8").split()
ROWS = re.findall(r"^\| `([^`]+)` \| (yes|differs|no) \| (.*?) ?\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_has_every_name_once_and_no_other() -> None:
    assert [f"ray.serve.{name}" for name, _, _ in ROWS] == LISTED + LLM


def test_what_differs_and_what_is_missing_is_explained() -> None:
    assert [name for name, word, words in ROWS if (word == "yes") is bool(words)] == []


def test_a_name_is_there_exactly_where_the_page_says_so() -> None:
    assert [name for name, word, _ in ROWS if _is_there(name) is (word == "no")] == []


def test_every_row_of_the_guide_names_a_test_that_exists() -> None:
    rows = re.findall(r"^\| (?!the guide \||---).*$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    rows = [row for row in rows if not re.search(r"\| not here: [^|]* \| - \|$", row)]
    named = [re.fullmatch(r"\| [^|]+ \| [^|]+ \| `(tests/[\w/]+\.py)::(test_\w+)` \|", row) for row in rows]
    assert [row for row, found in zip(rows, named, strict=True) if found is None] == []
    wanted = {found.groups() for found in named if found is not None}
    there = {
        (file, node.name)
        for file in {file for file, _ in wanted}
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert wanted - there == set()


@pytest.mark.parametrize("module", ["autoscaling_policy", "gang", "task_consumer"])
def test_a_module_that_is_missing_says_what_stands_in_its_place(module: str) -> None:
    with pytest.raises(ImportError, match=rf"^pierhead\.rayserve\.{module}: \w"):
        importlib.import_module(f"pierhead.rayserve.{module}")


def test_a_router_that_is_missing_says_what_stands_in_its_place() -> None:
    with pytest.raises(
        ImportError, match=r"KVAwareRouter is not supported: .* name PrefixCacheAffinityRouter, or write"
    ):
        from pierhead.rayserve.llm.request_router import KVAwareRouter  # noqa: F401


def _is_there(name: str) -> bool:
    path, _, parameter = name.rstrip(")").partition("(")
    if path == "deployment" and parameter and parameter != "name":
        return parameter in DeploymentOptions.__dataclass_fields__ or _is_refused(parameter)
    found: Any = importlib.import_module("pierhead.rayserve")
    at = "pierhead.rayserve"
    for part in path.split("."):
        at = f"{at}.{part}"
        if inspect.isclass(found) and any(part in inspect.get_annotations(base) for base in found.__mro__):
            return True
        try:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(at)
        except ImportError:
            return False
        if inspect.isfunction(found) and f"{at}." in f"pierhead.rayserve.{path}." and part != path.split(".")[-1]:
            found = importlib.import_module(at)  # a module and a function have this name
    return not parameter or parameter.removeprefix("_") in {
        each.removeprefix("_") for each in inspect.signature(found).parameters
    }


def _is_refused(option: str) -> bool:
    with pytest.raises(ValueError, match=f"{option} is not supported"):
        DeploymentOptions().changed(**{option: object()})
    return True


@pytest.mark.long
def test_the_list_is_that_of_the_installed_ray_serve() -> None:
    python = rays_python()
    if python is None:
        pytest.skip("Ray Serve is not installed; `python -m tests.environments.ray_serve` installs it")
    script = ROOT / "tests" / "rayserve" / "list_names.py"
    found = subprocess.run([python, str(script)], capture_output=True, text=True, check=True)
    assert found.stdout.split() == LISTED
    packages = Path(python).parents[1].glob("lib/python*/site-packages")
    script = RECORDED / "list_llm_names.py"
    found = subprocess.run([python, str(script), *packages], capture_output=True, text=True, check=True)
    assert found.stdout.split() == LLM
