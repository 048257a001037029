"""Stacks that tests share: one that each test rewrites, and a rule that keeps a failure from the tests after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from tests.harness.stack import EVIDENCE, OURS, Stack
from tests.harness.waiting import eventually

NOTHING = "services: {}\n"


class WrittenStack(Stack):
    """A stack that runs what a test writes into its only app file, `file`. The controller follows the file."""

    def __init__(self, project: str, environment: Mapping[str, str] | None = None) -> None:
        # Paths in it are relative to a directory of the clone's first level, as those in compose/ are.
        self.file = EVIDENCE / f"{project}-{OURS}.yaml"
        super().__init__(project, [f"{EVIDENCE.name}/{self.file.name}"], environment or {})

    def renew(self) -> None:
        """Start from nothing, with no app."""
        EVIDENCE.mkdir(exist_ok=True)
        self.write(NOTHING)
        super().renew()

    def write(self, text: str) -> None:
        """Replace the file's text in one step."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.file)

    def become(self, text: str, **replicas: int) -> None:
        """Run the services of `text`, which are those that `replicas` counts, as on the first day: nothing is left of
        earlier services, scales and events.
        """
        if self.file.read_text() == text and self._names() == set(replicas):
            for name in replicas:
                assert self.api(f"/api/v1/services/{name}/scale", "PUT", {"replicas": "auto"}).status == 202
        else:
            self.write(NOTHING)
            eventually(lambda: not self._names() and not self.replicas(), "nothing of earlier services is left", 120)
            self.write(text)
            eventually(lambda: self._names() == set(replicas), "the controller has read the file")
        self.settle(**replicas)

    def _names(self) -> set[str]:
        return {row["name"] for row in self.api("/api/v1/services").json["services"]}


class SharedStacks:
    """Runs one stack at a time and lends it to one test after the other. It is restarted after a failed test."""

    def __init__(self) -> None:
        self._running: Stack | None = None
        self._is_well = False

    @contextlib.contextmanager
    def lend(self, stack: Stack, has_failed: Callable[[], bool], test: str) -> Iterator[None]:
        """Within: the stack runs. `test` names the directory of its evidence if it fails."""
        if stack is not self._running:
            self.end()
            self._running = stack
        if not self._is_well:
            stack.renew()
        self._is_well = False
        yield
        self._is_well = not has_failed()
        if not self._is_well:
            stack.save_evidence(EVIDENCE / test)

    def end(self) -> None:
        """Remove the stack that runs."""
        if self._running is not None:
            self._running.save_evidence(EVIDENCE / self._running.project)
            self._running.down()
        self._running, self._is_well = None, False
