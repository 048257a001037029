"""What a measurement of the controller leaves behind: a directory with its figures as JSON and a page to read.

results/<date>-<cores>-cores-<name>/results.json    every figure, where and how it was taken
                                    README.md       the same as tables; `notes.md` becomes part of it

`python -m tests.bench.record DIRECTORY` puts notes that were written later into the page.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench import machine, tables
from tests.bench.processes import ROOT
from tests.bench.report import MARK
from tests.bench.targets import Line

NOTES, HOW = "## Notes", "## How"
RESULTS = ROOT / "tests" / "bench" / "results"


@dataclass(frozen=True)
class Table:
    """Some figures under a title."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: str = ""
    """What the figures are, in a sentence or two."""


@dataclass
class Page:
    """What a run found, to be written."""

    title: str
    run: Mapping[str, Any]
    lines: Sequence[Line] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[str] = ()
    how: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def markdown(self, notes: str = "") -> str:
        """The page."""
        text = [f"# {self.title}", "", _head(self.run), ""]
        if self.lines:
            rows = [[line.what, line.wanted, line.found, MARK[line.met]] for line in self.lines]
            text += ["## Targets", "", *tables.table(["", "target", "found", ""], rows)]
        for each in self.tables:
            text += [f"## {each.title}", "", *([each.words, ""] if each.words else [])]
            text += tables.table(each.head, each.rows)
        for picture in self.pictures:
            text += [f"![{picture.removesuffix('.png')}]({picture})", ""]
        return with_notes("\n".join([*text, HOW, "", self.how.strip(), ""]), notes)

    def write(self, directory: Path) -> None:
        """Write figures and page; `notes.md`, if there is one, is read again."""
        directory.mkdir(parents=True, exist_ok=True)
        found = json.dumps({"run": self.run, **self.figures}, indent=1)
        (directory / "results.json").write_text(found + "\n")
        notes = directory / "notes.md"
        (directory / "README.md").write_text(self.markdown(notes.read_text() if notes.exists() else ""))


def with_notes(page: str, notes: str) -> str:
    """The page with these notes in place of those that it has."""
    before, how, after = page.rpartition(f"{HOW}\n")
    figures = before.partition(f"{NOTES}\n")[0]
    return figures + (f"{NOTES}\n\n{notes.strip()}\n\n" if notes.strip() else "") + how + after


def run_facts(command: str, **versions: str) -> dict[str, Any]:
    """When, where and with which versions; `command` repeats the run."""
    return {
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": machine.description("cpu"),
        "versions": {"pierhead": machine.commit(), **versions},
        "uncommitted": machine.uncommitted(),
    }


def directory_of(run: Mapping[str, Any], name: str) -> Path:
    """Where a run's results are kept unless somebody says otherwise."""
    return RESULTS / f"{run['began'][:10]}-{run['machine']['cores']}-cores-{name}"


def _head(run: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    tree = ", with uncommitted changes" if run["uncommitted"] else ""
    return f"{run['began'][:10]}, {machine.words(run['machine'])}. `{run['command']}`, {versions}{tree}."


def main() -> None:
    """Put the notes into a directory's page."""
    directory = Path(sys.argv[1])
    page = directory / "README.md"
    page.write_text(with_notes(page.read_text(), (directory / "notes.md").read_text()))


if __name__ == "__main__":
    main()
