"""The repository's English: words that have a plainer one do not come back."""

from __future__ import annotations

import subprocess

import pytest

from tests.harness.imports import ROOT

PLAINER = {
    r"\banew\b": "again",
    r"\bbeside\b": "next to, with, in addition to, while",
    r"\bmeanwhile\b": "by then, while that runs",
    r"\b(go|goes|gone|went) on\b": "continue",
    r"\bthe latter\b": "the thing itself",
    r"\bwhoever\b": "the user, the caller",
    r"\b(is|are|was|were) (had|told) (by|of)\b": "look up, say, report",
    r"\bto be had\b": "available",
    r"\bso (long|many|often) at most\b": "at most this long, at most this many",
    r"\b(he (tries|has|gets|may)|his|him)\b": "the attacker, the user, they",
    r"\bof before\b": "former",
}
"""Patterns, each with the words to use instead."""

LEFT_ALONE = (":!tests/bench/results", ":!tests/unit/test_words.py")
"""What earlier runs of the bench have printed, and this list."""


@pytest.mark.parametrize("pattern", PLAINER)
def test_a_plainer_word_is_used(pattern: str) -> None:
    command = ["git", "grep", "-nIiE", pattern, "--", *LEFT_ALONE]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (1, ""), f"write: {PLAINER[pattern]}\n{found.stdout}"
