"""`python -m tests [all]`: the checks and the tests, on this machine's own Docker Engine; 0 when all of them passed.

Without `all`: all but the tests marked `long` (pyproject.toml says what those are). What the tests start is labelled as
theirs and is removed at the end, also after a failure or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from types import FrameType
from typing import IO

from controller.tool.project.programs import Programs
from controller.tool.project.project import Project
from controller.tool.project.stack import ProjectStack
from tests.environments import buckets, clients, llama_cpp, ray_serve, triton, vllm
from tests.environments.made import NotMade
from tests.harness.imports import ROOT

APPS = "tests/e2e/apps/llm.yaml"
"""An app of tests alone."""
PROJECTS = "pierhead-test"
"""What the names of the Compose projects that tests start begin with."""
BUILDS = "./pierhead build-images && ./pierhead build-images --apps echo-proto"
"""The echo with a .proto has services of the same names as the echo."""
CHEAP = ("tests/rayserve", "tests/unit", "tests/bench/tests", "tests/contract")
"""The first one has the file that takes longest: at the end one process alone would be busy with it."""
OF_STACKS = ("tests/faults", "tests/integration", "tests/e2e")
TWO_FILES = ("--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder")


def main() -> int:
    """Return the exit status."""
    if sys.argv[1:] not in ([], ["all"]):
        print(f"tests: expected all or nothing, found {' '.join(sys.argv[1:])}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    # Images of their own: a stack that runs from this clone keeps its version while its tests are built.
    tag = os.environ.setdefault("PIERHEAD_TAG", "test")
    os.environ["PIERHEAD_TEST_RUN"] = f"run-{os.getpid()}"
    try:
        return _run(is_all=bool(sys.argv[1:]))
    except KeyboardInterrupt:
        return 130
    finally:
        _remove_leftovers(tag)


def _run(*, is_all: bool) -> int:
    if any(_call(f"compose/machine/{script}") for script in ("engine.sh", "base-images.sh")):
        return 1
    with tempfile.TemporaryFile("w+", errors="replace") as log, _building(log) as build:
        if _call("make", "lint"):
            return 1
        if is_all:
            _see_to_environments()
        return _test(build, log, is_all=is_all)


def _see_to_environments() -> None:
    """The stores' libraries, a vLLM, a Triton server, ... Where one cannot be made its tests are skipped."""
    makes = {
        buckets.BUCKETS: buckets.make,
        clients.CLIENTS: clients.make,
        llama_cpp.LLAMA_CPP: llama_cpp.make,
        vllm.VLLM: vllm.make,
        triton.TRITON: triton.make,
        ray_serve.RAY_SERVE: ray_serve.make,
    }
    for environment, make in makes.items():
        try:
            environment.make(make)
        except NotMade as error:
            print(f"tests: {error}", file=sys.stderr)


@contextlib.contextmanager
def _building(log: IO[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The images are built while tests run that need none of them."""
    build = subprocess.Popen(
        ["bash", "-c", BUILDS], cwd=ROOT, env=_with_apps(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield build
    finally:
        if build.poll() is None:
            os.killpg(build.pid, signal.SIGTERM)
            build.wait()


def _with_apps() -> dict[str, str]:
    files = ProjectStack(Project(ROOT), os.environ, Programs()).files
    return {**os.environ, "COMPOSE_FILE": f"{files}:compose/acme.yaml:compose/alerts.yaml:{APPS}"}


def _test(build: subprocess.Popen[bytes], log: IO[str], *, is_all: bool) -> int:
    """Cheap ones first, so that a simple mistake is reported before a stack is started; the others still run.

    Two files run at a time, each process with stacks of its own; tests marked `alone` have the machine to themselves.
    """
    quick = ("-m", "not long")
    cheap = _pytest(*(() if is_all else quick), *TWO_FILES, *CHEAP)
    failed = build.wait()
    log.seek(0)
    print(log.read(), flush=True)
    # A build can fail only because other work runs at the same time ("inconsistent graph state": BuildKit, when
    # builds share a step and one of them is cancelled), so it gets a second try.
    if failed and subprocess.run(["bash", "-c", BUILDS], cwd=ROOT, env=_with_apps(), check=False).returncode:
        return 1
    of_stacks = _pytest(*quick, *TWO_FILES, *OF_STACKS)
    if not is_all:
        return cheap or of_stacks
    alone = _pytest("-m", "long and alone", *OF_STACKS)
    long = _pytest("-m", "long and not alone", *TWO_FILES, *OF_STACKS)
    return cheap or of_stacks or alone or long


def _pytest(*words: str) -> int:
    return _call(sys.executable, "-m", "pytest", *words)


def _call(*words: str) -> int:
    return subprocess.run(words, cwd=ROOT, check=False).returncode


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# --------------------------------------------------------------------------------------------------------- what is left


def _remove_leftovers(tag: str) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    _remove(_of_tests("ps", "--all"), "rm", "--force", "--volumes")
    _remove(_of_tests("network", "ls"), "network", "rm")
    _remove(_of_tests("volume", "ls"), "volume", "rm")
    # The build cache keeps their layers: the next run has them back in seconds.
    images = _docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}")
    mine = re.compile(f"pierhead/.*:{re.escape(tag)}|{PROJECTS}.*")
    _remove({image for image in images if mine.fullmatch(image)}, "image", "rm")


def _of_tests(*listing: str) -> set[str]:
    """The ids in one of Docker's listings that belong to tests."""
    form = ("--format", '{{.Label "com.docker.compose.project"}}')
    projects = {name for name in _docker(*listing, *form) if name.startswith(PROJECTS)}
    labels = ["pierhead.test", f"pierhead.test-run={os.environ['PIERHEAD_TEST_RUN']}"]
    labels += [f"com.docker.compose.project={name}" for name in projects]
    return {one for label in labels for one in _docker(*listing, "--quiet", "--filter", f"label={label}")}


def _remove(found: set[str], *words: str) -> None:
    if found:
        _docker(*words, *sorted(found))


def _docker(*words: str) -> list[str]:
    """The lines of what it prints; none where it fails."""
    try:
        done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


if __name__ == "__main__":
    sys.exit(main())
