"""When a time that is too long is a verdict, and when the machine explains it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.harness.machine import Cores, Machine, Pace, judge
from tests.harness.waiting import eventually

BURN = "import time; end = time.process_time() + {seconds}\nwhile time.process_time() < end: pass"


class Told(Machine):
    """A machine that has these excuses."""

    def __init__(self, *excuses: str) -> None:
        self._excuses = list(excuses)

    def look(self) -> None:
        pass

    def excuses(self) -> list[str]:
        return self._excuses


def test_what_is_late_fails_unless_the_machine_explains_it() -> None:
    judge(True, "soon", Told())
    judge(True, "soon", Told("others took up to 2.0 cores"))
    with pytest.raises(pytest.fail.Exception, match="soon"):
        judge(False, "soon", Told())
    with pytest.raises(pytest.skip.Exception, match=r"soon.*others took up to 2\.0 cores; it stood still"):
        judge(False, "soon", Told("others took up to 2.0 cores"), ["it stood still"])


def test_each_of_the_cores_figures_is_an_excuse() -> None:
    cores = Cores([])
    assert cores.excuses() == []
    cores.others, (own,) = 1.5, cores.ran
    cores.ran[own], cores.waited[own] = 0.95, 0.4
    assert cores.excuses() == [
        "others took up to 1.5 cores",
        "a process of ours waited up to 0.40 s of a second for a core",
        "a process of ours needed up to 0.95 s of a second of its core",
    ]


def seen_at_work(cores: Cores, pid: int) -> bool:
    cores.look()
    return cores.ran[pid] > 0


def test_a_process_of_ours_that_has_ended_counts_as_it_was_last_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", BURN.format(seconds=60)]) as ours:
        cores = Cores([ours.pid])
        eventually(lambda: seen_at_work(cores, ours.pid), "it was seen at work")
        ours.kill()
    ran = dict(cores.ran)
    cores.look()
    assert cores.ran[ours.pid] == ran[ours.pid]
    assert all(figure >= 0 for figure in cores.waited.values())


def test_what_another_process_computes_is_seen() -> None:
    cores = Cores([])
    subprocess.run([sys.executable, "-c", BURN.format(seconds=0.3)], check=True)
    cores.look()
    assert cores.others > 0


def test_a_pace_is_taken_for_as_long_as_the_block_runs() -> None:
    with Pace() as pace:
        eventually(lambda: pace.start_s > 0, "a Python was started", every_s=0.01)
        pace.late_s = 0.0
        began = time.monotonic()
        eventually(lambda: pace.late_s > 0, "it has woken, and not a moment too early", every_s=0.01)
    assert time.monotonic() > began
    pace.late_s, pace.start_s = 0.3, 0.4
    assert pace.excuses() == ["a thread that only sleeps woke 0.30 s late", "a Python that does nothing took 0.40 s"]
