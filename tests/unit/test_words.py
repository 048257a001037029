"""The repository's English: words that have a plainer one do not come back."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.harness.imports import ROOT

PLAINER = {
    r"\banew\b": "again",
    r"\bbeside\b": "next to, with, in addition to, while",
    r"\bmeanwhile\b": "by then, while that runs",
    r"\b(?:go|goes|gone|went) on\b": "continue",
    r"\bthe latter\b": "the thing itself",
    r"\bwhoever\b": "the user, the caller",
    r"\b(?:is|are|was|were) (?:had|told) (?:by|of)\b": "look up, say, report",
    r"\bto be had\b": "available",
}
"""Patterns, each with the words to use instead."""

CLEARED = (
    ".github",
    "compose",
    "dashboards",
    "docs",
    "haproxy",
    "proto",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    "README.md",
)


@pytest.mark.parametrize("pattern", PLAINER)
def test_a_plainer_word_is_used(pattern: str) -> None:
    files = subprocess.run(["git", "ls-files", "-z", *CLEARED], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in files.stdout.split("\0")[:-1]
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not found, f"write: {PLAINER[pattern]}\n" + "\n".join(found)
