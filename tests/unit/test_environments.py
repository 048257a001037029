"""Words that the programs of tests and benches do not know."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.imports import ROOT


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
