"""From a results file to what people read: `python -m tests.bench.report DIRECTORY` writes README.md and plots there.

Everything comes from DIRECTORY/results.json and notes.md (findings about these figures, if there is one), so
that a report can be written again without measuring again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench import how, machine, tables
from tests.bench.results import Results
from tests.bench.statistics import Samples
from tests.bench.targets import lines

MARK = {True: "**met**", False: "not met", None: ""}


def markdown(results: Results, plots: Sequence[str] = (), notes: str = "") -> str:
    """The report: one page. `notes`: findings about these figures."""
    samples = Samples(results.samples)
    return "\n".join(
        [
            *_head(results),
            *_targets(results),
            *tables.main_table(samples),
            *tables.costs(samples),
            *tables.open_table(samples),
            *tables.first_events(samples),
            *tables.eight(samples),
            *tables.limits(samples),
            *tables.ablation(samples),
            *tables.memory(results),
            *(f"![{name.removesuffix('.png')}]({name})" for name in plots),
            *([""] if plots else []),
            *(["## Notes", "", notes.strip(), ""] if notes.strip() else []),
            "## How",
            "",
            *how.paragraphs(results),
            "",
        ]
    )


def _head(results: Results) -> Iterator[str]:
    run = results.run
    yield "# Pierhead and Ray Serve on the same machine"
    yield ""
    yield (
        f"{run['began'][:10]}, {machine.words(run['machine'])}. "
        f"`make bench MODE={run['mode']} ROUNDS={run['rounds']} SECONDS={run['seconds']:g}`"
        f", commit {run['versions'].get('pierhead', 'unknown')}. The load generator runs on the same cores."
    )
    yield ""
    if run.get("way_in"):
        yield f"How HAProxy is reached: {run['way_in']}."
        yield ""
    for failure in results.failures:
        yield f"- Not measured: {failure.splitlines()[0]}"
    if results.failures:
        yield ""


def _targets(results: Results) -> Iterator[str]:
    yield "## Targets"
    yield ""
    yield from tables.table(
        ["", "target", "found: median (lowest to highest round)", ""],
        ([line.what, line.wanted, line.found, MARK[line.met]] for line in lines(results)),
    )


def main() -> int:
    """Write README.md and the plots next to a results file."""
    directory = Path(sys.argv[1])
    results = Results.read(directory / "results.json")
    try:
        from tests.bench.plots import draw_all
    except ImportError as error:
        print(f"bench: no plots: {error}", file=sys.stderr)
        plots = []
    else:
        plots = draw_all(results, directory)
    notes = directory / "notes.md"
    (directory / "README.md").write_text(markdown(results, plots, notes.read_text() if notes.exists() else ""))
    print()
    for line in lines(results):
        if line.met is not None:
            print(f"{MARK[line.met].strip('*'):8} {line.what}: {line.wanted}; found {line.found}")
    print(f"\nTable, plots and raw figures: {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
