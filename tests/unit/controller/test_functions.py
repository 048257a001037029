"""Autoscaling functions: their arguments, what counts as an answer, and how they are called outside the loop."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.desired.autoscale import Situation, wanted_replicas
from controller.desired.functions import LIMIT_S, PAUSE_S, FunctionCalls, Functions, in_thread
from controller.errors import PolicyError
from controller.model.spec import FunctionPolicy
from controller.outlive import Background
from tests.harness.waiting import PATIENCE_S
from tests.unit.controller.control import until
from tests.unit.controller.test_policies import situation

_names = itertools.count()


@pytest.fixture
def functions(tmp_path: Path) -> Functions:
    return Functions(tmp_path)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """Write a module; its import path. Modules are imported once, so each has a name of its own."""

    def write(text: str) -> str:
        name = f"policies_test_{next(_names)}"
        (tmp_path / f"{name}.py").write_text(text)
        return f"{name}:wanted"

    return write


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
            ("{def}: raise KeyError('a')", "PATH raised KeyError: 'a' at FILE:1"),
            ("{def}: return 2.5", "PATH returned 2.5; a policy returns an integer"),
            ("{def}: return [3]", "PATH returned a list; a policy returns an integer"),
            ("{def}: return 10**5000", "PATH returned an integer beyond 1e+15, which no number of replicas is"),
            ("wanted = 3", "PATH is no function: FILE has 3"),
            ("async {def}: return 3", "PATH is an async function; a policy is a plain one, called in a thread"),
            (
                "def wanted(situation, least): return 3",
                "PATH cannot be called with a situation and policy_kwargs (none): missing a required argument: 'least'",
            ),
            ("raise ValueError('no')", "PATH cannot be imported: ValueError: no at FILE:1"),
        ],
    )
    def test_functions_that_give_no_number(
        self, functions: Functions, written: Callable[[str], str], tmp_path: Path, text: str, problem: str
    ) -> None:
        path = written(text.replace("{def}", "def wanted(situation)"))
        file = tmp_path / f"{path.partition(':')[0]}.py"
        assert failing(functions, path) == problem.replace("PATH", path).replace("FILE", str(file))

    def test_a_module_that_is_not_there_is_found_once_it_is(self, functions: Functions, tmp_path: Path) -> None:
        assert failing(functions, "policies_test_later:wanted") == (
            "policies_test_later:wanted cannot be imported: ModuleNotFoundError: No module named "
            f"'policies_test_later' (looked in {tmp_path})"
        )
        (tmp_path / "policies_test_later.py").write_text("def wanted(situation):\n    return 4\n")
        assert functions.call(FunctionPolicy("policies_test_later:wanted"), situation()) == 4

    def test_the_site_shows_a_function_that_works(self, functions: Functions, written: Callable[[str], str]) -> None:
        page = (Path(__file__).parents[3] / "docs" / "how-to" / "autoscaling.md").read_text()
        (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def wanted(" in block]
        path = written(code)
        noon, night = 12 * 3600.0, 2 * 3600.0
        for now, load, wanted in [(noon, 0.0, 2), (night, 0.0, 0), (noon, 31.0, 4), (night, 31.0, 4)]:
            seen = replace(situation(load=load), now=now)
            assert functions.call(FunctionPolicy(path, {"least": 2}), seen) == wanted


QUICK, SLOW = FunctionPolicy("any:quick"), FunctionPolicy("any:slow")


class Caller:
    """Calls by a loop whose time is `now`. Without a `call`, each returns when the test says so, by `answer`."""

    def __init__(self, call: Callable[[FunctionPolicy, Situation], int] | None = None) -> None:
        self.now = 1000.0
        self.woken = 0
        self.begun: list[Situation] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self._answers: asyncio.Queue[int | PolicyError] = asyncio.Queue()
        run = in_thread if call else self._run
        background = Background(self._spawn, self._wake)
        self.calls = FunctionCalls(call or (lambda policy, seen: 0), run, background)

    def wanted(self, policy: FunctionPolicy = QUICK) -> int | None:
        """A look at the service that is named as the function."""
        name = policy.path.partition(":")[2]
        return self.calls.wanted(name, policy, replace(situation(), now=self.now))

    def problem(self, policy: FunctionPolicy = QUICK) -> str:
        """Why the policy gives no number."""
        with pytest.raises(PolicyError) as failed:
            self.wanted(policy)
        return str(failed.value)

    async def answer(self, answer: int | PolicyError) -> None:
        """Let the call under way return."""
        self._answers.put_nowait(answer)
        await until(lambda: not self.tasks)

    async def _run(self, call: Any) -> int:
        self.begun.append(call.args[1])
        answer = await self._answers.get()
        if isinstance(answer, PolicyError):
            raise answer
        return answer

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await until(lambda: not self.tasks)

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _wake(self) -> None:
        self.woken += 1


class TestCalls:
    async def test_each_call_sees_the_latest_look_and_a_new_answer_wakes_the_loop(self) -> None:
        caller = Caller()
        assert caller.wanted() is None
        await caller.answer(3)
        assert (caller.wanted(), caller.woken) == (3, 1)
        caller.now += PAUSE_S / 2
        assert caller.wanted() == 3
        assert not caller.tasks, "a new answer does not make the loop ask at once"
        caller.now += PAUSE_S / 2
        assert caller.wanted() == 3
        await caller.answer(3)
        assert caller.woken == 1
        caller.now += PAUSE_S
        assert caller.wanted() == 3
        await caller.answer(4)
        assert (caller.wanted(), caller.woken) == (4, 2)
        assert [seen.now for seen in caller.begun] == [1000.0, 1000.0 + PAUSE_S, 1000.0 + 2 * PAUSE_S]

    async def test_while_a_call_has_not_returned_none_is_made_and_the_last_answer_counts_for_a_while(self) -> None:
        caller = Caller()
        caller.wanted()
        await caller.answer(3)
        caller.now += 1.0
        assert caller.wanted() == 3
        caller.now += LIMIT_S - 1.0
        assert caller.wanted() == 3
        caller.now += 3.0
        assert caller.problem() == "any:quick has not returned for 7 s"
        await caller.answer(4)
        assert (caller.wanted(), len(caller.begun)) == (4, 2)
        await caller.end()

    async def test_a_call_without_a_number_counts_until_one_has_it(self) -> None:
        caller = Caller()
        caller.wanted()
        await caller.answer(PolicyError("any:quick raised ValueError"))
        assert caller.problem() == "any:quick raised ValueError"
        caller.now += 1.0
        assert caller.problem() == "any:quick raised ValueError"
        await caller.answer(4)
        assert (caller.wanted(), caller.woken) == (4, 2)

    async def test_a_thread_that_never_returns_holds_up_no_other_function(self, never: threading.Event) -> None:
        def call(policy: FunctionPolicy, seen: Situation) -> int:
            if policy == SLOW:
                never.wait()
            return 3

        caller = Caller(call)
        assert caller.wanted(SLOW) is None
        caller.wanted()
        await until(lambda: caller.wanted() == 3)
        caller.now += LIMIT_S
        assert caller.problem(SLOW) == "any:slow has not returned for 5 s"
        caller.wanted()
        await until(lambda: caller.wanted() == 3)
        await caller.end()


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Set when the test is over, so that its thread ends."""
    event = threading.Event()
    yield event
    event.set()


def test_a_thread_that_never_returns_does_not_keep_the_process_from_ending() -> None:
    code = (
        "import asyncio, threading\n"
        "from controller.desired.functions import in_thread\n"
        "try:\n"
        "    asyncio.run(asyncio.wait_for(in_thread(threading.Event().wait), 0.05))\n"
        "except TimeoutError:\n"
        "    print('ended')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("ended\n", "")


async def test_what_a_thread_raises_arrives() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)
