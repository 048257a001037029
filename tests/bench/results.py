"""All that a run found, in one JSON file; written after each visit, so that an interrupted run keeps what it has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.cases import OPEN_SHARE
from tests.bench.samples import Footprint, Sample

FORMAT = 2


@dataclass
class Results:
    """`run` says when, where and how; `failures` are visits that could not be measured, each a sentence."""

    run: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    footprints: list[Footprint] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def open_rate(self, app: str) -> float:
        """Arrivals a second for the open loops: a share of the smaller of the sides' peaks in the first round.

        0 where neither has one. Fixed with the first round: samples of other rounds come later and change nothing.
        """
        peaks: dict[str, float] = {}
        for sample in self.samples:
            if (
                sample.app == app
                and sample.load == "closed"
                and sample.round == 1
                and sample.subject in ("ours", "peer")
            ):
                peaks[sample.subject] = max(sample.rate, peaks.get(sample.subject, 0.0))
        return round(OPEN_SHARE * min(peaks.values()), 1) if peaks else 0.0

    def write(self, file: Path) -> None:
        """Write the file, whole or not at all."""
        text = {
            "format": FORMAT,
            "run": self.run,
            "failures": self.failures,
            "samples": [sample.as_json() for sample in self.samples],
            "footprints": [footprint.as_json() for footprint in self.footprints],
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(text, indent=1) + "\n")
        fresh.replace(file)

    @classmethod
    def read(cls, file: Path) -> Results:
        """The reverse. Raises ValueError for another format."""
        found: Mapping[str, Any] = json.loads(file.read_text())
        if found.get("format") != FORMAT:
            raise ValueError(f"{file}: expected format {FORMAT}, found {found.get('format')}")
        return cls(
            run=dict(found["run"]),
            samples=[Sample.from_json(sample) for sample in found["samples"]],
            footprints=[Footprint(**footprint) for footprint in found["footprints"]],
            failures=list(found["failures"]),
        )
