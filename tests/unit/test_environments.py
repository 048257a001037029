"""Environments of their own are made once of what they say that they are made of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import __main__ as suite
from tests.environments import buckets, vllm
from tests.environments.made import TORCH, Environment, NotMade
from tests.harness.imports import ROOT


def test_an_environment_is_made_once_and_again_for_another_content(tmp_path: Path) -> None:
    made: list[str] = []

    def make() -> None:
        (tmp_path / "one").mkdir(exist_ok=True)
        made.append("one")

    first = Environment(tmp_path / "one", b"pins")
    assert not first.is_made()
    first.make(make)
    first.make(make)
    assert (made, first.is_made()) == (["one"], True)
    other = Environment(tmp_path / "one", b"other pins")
    assert not other.is_made()

    def fail() -> None:
        raise NotMade("no network")

    with pytest.raises(NotMade):
        other.make(fail)
    assert not Environment(tmp_path / "one", b"pins").is_made(), "it may be half another one"


def test_every_environment_names_what_it_is_made_of() -> None:
    assert TORCH.encode() in vllm.VLLM.wanted
    assert buckets.PINS.read_bytes() == buckets.BUCKETS.wanted


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["make", "simulate"], "Example: make simulate TRACE=step:10x SERVICE=ranker"),
        ([sys.executable, "-m", "tests", "some"], "tests: expected all or nothing, found some"),
        ([sys.executable, "-m", "tests.bench.prepare", "ROUNDS=no"], "bench: ROUNDS: expected a number"),
        ([sys.executable, "-m", "tests.bench.llm.prepare", "ROUND=3"], 'bench-llm: "ROUND=3": expected NAME=VALUE'),
    ],
)
def test_words_without_a_meaning_are_reported_before_anything_is_installed(words: list[str], says: str) -> None:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.parametrize("succeeds_at", [1, 2, 3])
def test_a_build_that_fails_while_the_first_tests_run_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, succeeds_at: int
) -> None:
    called: list[str] = []

    def call(*words: str) -> int:
        called.append(words[-1])
        return 0

    builds = tmp_path / "builds"
    monkeypatch.setattr(suite, "_call", call)
    monkeypatch.setattr(suite, "BUILDS", f"echo >>{builds}; [ $(wc -l <{builds}) -ge {succeeds_at} ]")
    assert suite._run(is_all=False) == int(succeeds_at == 3)
    assert len(builds.read_text()) == min(succeeds_at, 2)
    first = ["compose/machine/engine.sh", "compose/machine/base-images.sh", "lint", "tests/rayserve"]
    assert called == first + (["tests/e2e"] if succeeds_at < 3 else [])
