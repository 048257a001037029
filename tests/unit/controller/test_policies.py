"""Policies of the user's: what they are given, what counts as an answer, and what happens when there is none."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.desired.autoscale import Load, Situation, by_load, wanted_replicas
from controller.desired.policies import AGAIN_S, Functions, Policies, TookTooLong, Value, call_within, query_words
from controller.errors import PolicyError
from controller.model.spec import AutoscaleSpec, FunctionPolicy, PrometheusPolicy
from tests.harness.waiting import PATIENCE_S

SPEC = AutoscaleSpec(min=0, max=20, target_ongoing_requests=10)
GPU = PrometheusPolicy("avg(DCGM_FI_DEV_GPU_UTIL)", 70.0)

_names = itertools.count()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def functions(tmp_path: Path, clock: Clock) -> Functions:
    return Functions(tmp_path, clock)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """Write a module; its import path. Modules are imported once, so each has a name of its own."""

    def write(text: str) -> str:
        name = f"policies_test_{next(_names)}"
        (tmp_path / f"{name}.py").write_text(text)
        return f"{name}:wanted"

    return write


def situation(spec: AutoscaleSpec = SPEC, *, load: float = 0.0, running: int = 2, target: int = 2) -> Situation:
    found = Load(running=load)
    return Situation(spec, found, found, found, running, target, now=1000.0)


def failing(functions: Functions, path: str, **kwargs: Any) -> str:
    with pytest.raises(PolicyError) as failed:
        functions.call(FunctionPolicy(path, kwargs), situation())
    return str(failed.value)


class TestFunctions:
    def test_it_sees_the_situation_and_its_own_arguments(
        self, functions: Functions, written: Callable[[str], str]
    ) -> None:
        path = written(
            "def wanted(situation, *, extra, least=0):\n"
            "    return max(least, situation.running + int(situation.load.total) + situation.spec.max + extra)\n"
        )
        assert functions.call(FunctionPolicy(path, {"extra": 5}), situation(load=3.0)) == 2 + 3 + 20 + 5
        assert functions.call(FunctionPolicy(path, {"extra": 5, "least": 99}), situation()) == 99

    def test_modules_of_the_project_may_import_each_other(self, functions: Functions, tmp_path: Path) -> None:
        (tmp_path / "policies_test_package").mkdir()
        (tmp_path / "policies_test_package" / "hours.py").write_text("NIGHT = 3\n")
        (tmp_path / "policies_test_package" / "night.py").write_text(
            "from policies_test_package.hours import NIGHT\n\n\ndef wanted(situation):\n    return NIGHT\n"
        )
        assert functions.call(FunctionPolicy("policies_test_package.night:wanted"), situation()) == 3

    def test_no_file_of_the_project_stands_in_for_one_of_ours(self, functions: Functions, tmp_path: Path) -> None:
        (tmp_path / "controller").mkdir()
        (tmp_path / "controller" / "autoscale.py").write_text("wanted_replicas = None\n")
        (tmp_path / "tabnanny.py").write_text("def wanted(situation):\n    return 3\n")
        found = functions.call(FunctionPolicy("controller.desired.autoscale:wanted_replicas"), situation(load=50.0))
        assert found == wanted_replicas(situation(load=50.0))
        assert "tabnanny.py has nothing of that name" in failing(functions, "tabnanny:wanted")

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("def wanted(situation):\n    raise KeyError('a')\n", "PATH raised KeyError: 'a' at FILE:2"),
            ("def wanted(situation):\n    raise SystemExit\n", "PATH raised SystemExit at FILE:2"),
            ("def wanted(situation):\n    return 2.5\n", "PATH returned 2.5; a policy returns an integer"),
            ("def wanted(situation):\n    return True\n", "PATH returned true; a policy returns an integer"),
            ("def wanted(situation):\n    pass\n", "PATH returned null; a policy returns an integer"),
            ("def wanted(situation):\n    return [3]\n", "PATH returned a list; a policy returns an integer"),
            (
                "def wanted(situation):\n    return 10**5000\n",
                "PATH returned an integer beyond 1e+15, which no number of replicas is",
            ),
            (
                "def wanted(situation):\n    return -10**5000\n",
                "PATH returned an integer beyond 1e+15, which no number of replicas is",
            ),
            ("wanted = 3\n", "PATH is no function: FILE has 3"),
            ("other = 3\n", "PATH is no function: FILE has nothing of that name"),
            (
                "async def wanted(situation):\n    return 3\n",
                "PATH is an async function; a policy is a plain one: it decides, and waits for nothing",
            ),
            (
                "def wanted(situation, least):\n    return 3\n",
                "PATH cannot be called with a situation and policy_kwargs (none): missing a required argument: 'least'",
            ),
            ("raise ValueError('no')\n", "PATH cannot be imported: ValueError: no at FILE:1"),
        ],
    )
    def test_what_is_no_answer(
        self, functions: Functions, written: Callable[[str], str], tmp_path: Path, text: str, problem: str
    ) -> None:
        path = written(text)
        file = tmp_path / f"{path.partition(':')[0]}.py"
        assert failing(functions, path) == problem.replace("PATH", path).replace("FILE", str(file))

    def test_a_module_that_is_not_there(self, functions: Functions, tmp_path: Path) -> None:
        assert failing(functions, "policies_test_nowhere:wanted") == (
            "policies_test_nowhere:wanted cannot be imported: ModuleNotFoundError: No module named "
            f"'policies_test_nowhere' (looked in {tmp_path})"
        )

    def test_a_repaired_module_is_found_after_a_while(self, functions: Functions, clock: Clock, tmp_path: Path) -> None:
        failing(functions, "policies_test_later:wanted")
        (tmp_path / "policies_test_later.py").write_text("def wanted(situation):\n    return 4\n")
        failing(functions, "policies_test_later:wanted")
        clock.now += AGAIN_S
        assert functions.call(FunctionPolicy("policies_test_later:wanted"), situation()) == 4

    @pytest.mark.parametrize(
        "body",
        [
            "while True:\n        pass",
            "import time\n    time.sleep(3600)",
            "try:\n        while True: pass\n    except Exception:\n        return 7",
        ],
    )
    def test_one_that_does_not_return_is_ended_and_left_alone(
        self, functions: Functions, written: Callable[[str], str], clock: Clock, body: str
    ) -> None:
        path = written(f"CALLS = []\n\n\ndef wanted(situation):\n    CALLS.append(1)\n    {body}\n")
        words = f"{path} did not return within 0.5 s; it is asked again every 30 s"
        assert failing(functions, path) == words
        import importlib

        calls = importlib.import_module(path.partition(":")[0]).CALLS
        assert failing(functions, path) == words
        assert len(calls) == 1
        clock.now += AGAIN_S
        assert failing(functions, path) == words
        assert len(calls) == 2

    def test_a_slow_call_of_one_service_shuts_the_function_for_no_other(
        self, functions: Functions, written: Callable[[str], str], clock: Clock
    ) -> None:
        path = written("import time\n\n\ndef wanted(situation, wait=0):\n    time.sleep(wait)\n    return 3\n")
        assert "did not return" in failing(functions, path, wait=3600)
        assert functions.call(FunctionPolicy(path), situation()) == 3
        assert functions.call(FunctionPolicy(path, {"wait": 0.0}), situation()) == 3
        assert "did not return" in failing(functions, path, wait=3600)

    def test_what_cannot_be_imported_is_tried_once_for_all_arguments(
        self, functions: Functions, written: Callable[[str], str], clock: Clock, tmp_path: Path
    ) -> None:
        path = written(
            "from pathlib import Path\n\nwith Path(__file__).with_suffix('.tries').open('a') as tries:\n"
            "    tries.write('x')\nraise ValueError\n"
        )
        tries = tmp_path / f"{path.partition(':')[0]}.tries"
        for least in (1, 2, 3):
            assert "cannot be imported" in failing(functions, path, least=least)
        assert tries.read_text() == "x"
        clock.now += AGAIN_S
        failing(functions, path)
        assert tries.read_text() == "xx"


class TestTimeLimit:
    def test_the_timer_of_somebody_else_goes_on(self) -> None:
        rung: list[int] = []
        handler = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
        before = signal.setitimer(signal.ITIMER_REAL, 100.0)
        try:
            assert call_within(5.0, lambda: 3) == 3
            with pytest.raises(TookTooLong):
                call_within(0.02, threading.Event().wait)
            left_s, _ = signal.getitimer(signal.ITIMER_REAL)
            assert 90 < left_s <= 100
            assert rung == []
        finally:
            signal.setitimer(signal.ITIMER_REAL, *before)
            signal.signal(signal.SIGALRM, handler)

    def test_code_that_catches_everything_is_ended_all_the_same(self) -> None:
        caught: list[BaseException] = []

        def stubborn() -> None:
            while len(caught) < 2:
                try:
                    threading.Event().wait()
                except BaseException as error:
                    caught.append(error)
            threading.Event().wait()

        with pytest.raises(TookTooLong):
            call_within(0.02, stubborn)
        assert len(caught) == 2

    async def test_an_event_loop_that_hears_signals_goes_on(self) -> None:
        running, heard = asyncio.get_running_loop(), asyncio.Event()
        running.add_signal_handler(signal.SIGUSR1, heard.set)
        try:
            with pytest.raises(TookTooLong):
                call_within(0.02, threading.Event().wait)
            signal.raise_signal(signal.SIGUSR1)
            async with asyncio.timeout(PATIENCE_S):
                await heard.wait()
        finally:
            running.remove_signal_handler(signal.SIGUSR1)

    def test_an_error_passes(self) -> None:
        with pytest.raises(ZeroDivisionError):
            call_within(1.0, lambda: 1 // 0)
        assert signal.getsignal(signal.SIGALRM) is not None


def measured(value: float | None) -> Policies:
    def read(service: str, policy: PrometheusPolicy, now: float) -> float | None:
        return value

    found: Value = read
    return Policies(Functions(None), found)


# Kubernetes' formula: ceil(currentReplicas * currentMetricValue / desiredMetricValue).
@pytest.mark.parametrize(
    ("running", "value", "wanted"),
    [(2, 70.0, 2), (2, 140.0, 4), (2, 71.0, 3), (4, 35.0, 2), (4, 36.0, 3), (3, 0.0, 0), (8, 700.0, 20)],
)
def test_a_measured_value(running: int, value: float, wanted: int) -> None:
    spec = replace(SPEC, policy=GPU)
    answer = measured(value).ask("llm", situation(spec, running=running))
    assert answer.wanted == wanted
    assert answer.because == f"avg(DCGM_FI_DEV_GPU_UTIL) = {value:g}, 70 wanted"


def test_factors_apply_to_every_policy(functions: Functions, written: Callable[[str], str]) -> None:
    half = replace(SPEC, upscaling_factor=0.5, downscaling_factor=0.1, policy=GPU)
    assert measured(140.0).ask("llm", situation(half, running=4)).wanted == 6
    assert measured(35.0).ask("llm", situation(half, running=4)).wanted == 3  # stuck by the factor, so one goes
    path = written("def wanted(situation):\n    return 10\n")
    policies = Policies(functions, lambda service, policy, now: None)
    asked = replace(half, policy=FunctionPolicy(path))
    assert policies.ask("llm", situation(asked, running=4)).wanted == 7
    assert policies.ask("llm", situation(asked, running=0)).wanted == 10


def test_without_a_ready_replica_there_is_nothing_to_measure() -> None:
    spec = replace(SPEC, policy=GPU)
    assert measured(None).ask("llm", situation(spec, load=1.0, running=0, target=0)).wanted == 1
    assert measured(None).ask("llm", situation(spec, load=0.0, running=0, target=0)).wanted == 0


def test_a_value_that_was_not_read_yet_holds_the_target() -> None:
    assert measured(None).ask("llm", situation(replace(SPEC, policy=GPU), running=2, target=5)).wanted == 5


@pytest.mark.parametrize(("load", "wanted"), [(0.0, 0), (0.5, 1)])
def test_the_last_replica_stays_while_there_are_requests(load: float, wanted: int) -> None:
    answer = measured(0.0).ask("llm", situation(replace(SPEC, policy=GPU), load=load, running=1, target=1))
    assert answer.wanted == wanted


def test_without_a_policy_the_load_decides() -> None:
    seen = situation(load=55.0, running=3)
    assert measured(None).ask("llm", seen) == by_load(seen)


@given(
    value=st.floats(0, 1e6),
    target=st.floats(0.001, 1e5),
    running=st.integers(1, 500),
    load=st.floats(0, 1e4),
    up=st.floats(0.01, 10),
    down=st.floats(0.01, 10),
)
def test_any_value_gives_a_number_within_the_bounds_on_its_side(
    value: float, target: float, running: int, load: float, up: float, down: float
) -> None:
    spec = AutoscaleSpec(
        min=0, max=1000, upscaling_factor=up, downscaling_factor=down, policy=PrometheusPolicy("q", target)
    )
    wanted = measured(value).ask("llm", situation(spec, load=load, running=running)).wanted
    assert 0 <= wanted <= 1000
    if value > target * 1.000001:
        assert wanted >= running
    if value < target * 0.999999:
        assert wanted <= running


def test_long_queries_are_cut() -> None:
    assert query_words("sum(\n  up\n)") == "sum( up )"
    assert query_words("x" * 100) == "x" * 80 + "..."


def test_the_site_shows_a_function_that_works(functions: Functions, written: Callable[[str], str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "autoscaling.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def wanted(" in block]
    path = written(code)
    noon, night = 12 * 3600.0, 2 * 3600.0
    for now, load, wanted in [(noon, 0.0, 2), (night, 0.0, 0), (noon, 31.0, 4), (night, 31.0, 4)]:
        seen = replace(situation(load=load), now=now)
        assert functions.call(FunctionPolicy(path, {"least": 2}), seen) == wanted
