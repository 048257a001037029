"""Fixtures that several kinds of tests share: stacks, and the evidence of a failed test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from random import Random

import pytest
from docker import APIClient
from hypothesis import HealthCheck, settings
from pierhead.held import HELD
from pierhead.replica.starting import START
from pierhead.routing_stats import NOTHING, STATS

from controller.engines.docker import open_client
from controller.errors import EngineUnreachable
from tests.harness.process_state import left_behind, our_threads, process_state
from tests.harness.shared_stacks import SharedStacks, WrittenStack
from tests.harness.stack import Stack
from tests.harness.waiting import eventually

# How long an example takes, or its making, says how busy the machine is. What must end in time says so in its test, and
# every test has the timeout of pyproject.toml.
settings.register_profile("chance", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Nobody's work is refused for what luck finds in somebody else's: each property has the same examples in every run.
settings.register_profile("same", settings.get_profile("chance"), derandomize=True)
settings.load_profile("same")

APPS = ("compose/apps/echo.yaml", "compose/apps/recsys.yaml", "tests/e2e/apps/two_rankers.yaml")
ORDER = os.environ.get("PIERHEAD_TEST_ORDER", "")
"""A number: the files in an order of chance that it begins."""
SHARED_STACKS = ("stack", "written")
"""The fixtures of stacks that tests share."""
_failed = pytest.StashKey[bool]()

# A shell that starts pytest in the background has it ignore Ctrl-C, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# testcontainers' reaper is an image of a registry. tests/__main__.py removes what is left.
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ORDER:
        files = sorted({item.path for item in items})
        Random(int(ORDER)).shuffle(files)
        places = {path: place for place, path in enumerate(files)}
        items.sort(key=lambda item: places[item.path])
    items.sort(key=_shared_stack)


def _shared_stack(item: pytest.Item) -> int:
    """Where the tests of the stack that this one shares come: together, so that it is started once."""
    fixtures = getattr(item, "fixturenames", ())
    if "shared_stacks" not in fixtures:
        return 0
    return 1 + next(place for place, name in enumerate(SHARED_STACKS) if name in fixtures)


def pytest_collection_finish() -> None:
    """All modules and tests are there, and stay: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """The first one made and the last one ended: what a test leaves in its process fails here, and not another test
    wherever the two happen to share one.
    """
    before, threads = process_state(), our_threads()
    yield
    left = left_behind(before, threads)
    assert not left, "left in the process for the tests after this one:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def _nothing_is_told(_process_as_it_was: None) -> Iterator[None]:
    """What a process tells of its start and its work is one for the whole process, and so is where its modules are: a
    controller puts the project's directory last.
    """
    path = sys.path[:]
    yield
    sys.path[:] = path
    STATS.numbers, STATS.version, STATS._text = NOTHING, 0, (0, "")
    START.words, START.steps, START._served = "", 0, False
    START._best.clear()
    HELD.version, HELD.text = 0, ""
    HELD._counts.clear()


@pytest.fixture(autouse=True, scope="module")
def _warned_where_it_was_left() -> Iterator[None]:
    """What a file's tests have left to the garbage collector is collected with the file: a socket or a coroutine that
    nobody has closed warns here, and not in whichever test makes the collector run.
    """
    yield
    gc.collect()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


@pytest.fixture(scope="module")
def docker_client() -> Iterator[APIClient]:
    """A client of the Docker Engine of this machine."""
    try:
        client = open_client()
    except EngineUnreachable as error:
        pytest.skip(str(error))
    yield client
    client.close()


@pytest.fixture(scope="session")
def shared_stacks() -> Iterator[SharedStacks]:
    stacks = SharedStacks()
    yield stacks
    stacks.end()


@pytest.fixture(scope="session")
def _benchmark_apps() -> Stack:
    return Stack("pierhead-test", APPS)


@pytest.fixture(scope="session")
def _written_apps() -> WrittenStack:
    return WrittenStack("pierhead-test-written")


@pytest.fixture
def stack(shared_stacks: SharedStacks, _benchmark_apps: Stack, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The two benchmark applications, as they are written and with nothing left to do."""
    stack = _benchmark_apps
    with shared_stacks.lend(stack, lambda: has_failed(request), request.node.name):
        eventually(lambda: is_written(stack), "the replicas are to be as they are written")
        stack.settle(**WRITTEN)
        eventually(lambda: stack.get("/echo?message=hi").status == 200, "echo answers")
        eventually(lambda: stack.get("/recsys/?user_id=7").status == 200, "recsys answers")
        yield stack


@pytest.fixture
def written(
    shared_stacks: SharedStacks, _written_apps: WrittenStack, request: pytest.FixtureRequest
) -> Iterator[WrittenStack]:
    """A stack that becomes what the test writes; see there."""
    with shared_stacks.lend(_written_apps, lambda: has_failed(request), request.node.name):
        yield _written_apps


def has_failed(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.stash.get(_failed, True))


def is_written(stack: Stack) -> bool:
    """Ask for the written replicas; whether every service has taken it."""
    asked = [stack.api(f"/api/v1/services/{name}/scale", "PUT", {"replicas": WRITTEN[name]}) for name in WRITTEN]
    return all(answer.status == 202 for answer in asked)


WRITTEN = {"echo": 1, "echo-child": 1, "recsys": 1, "ranker": 2}
"""Replicas as the compose files of the two applications write them."""
