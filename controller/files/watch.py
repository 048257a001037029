"""Keeps the last good spec: reads the compose files when they change, and reports their problems.

A changed file is read only after it has not changed for one more check, so that no half-written file is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from typing import Protocol

from ..errors import ControllerError, NotYet, SpecError, UnknownService
from ..model.reports import EventOutcome
from ..model.spec import Spec
from ..model.text import did_you_mean

logger = logging.getLogger(__name__)

LOOK_S = 0.5
RETRY_S = 30.0
"""Time between readings of files that are unusable and unchanged: something that they depend on may have changed."""


class SpecSource(Protocol):
    """Where the spec comes from."""

    async def load(self) -> Spec:
        """Read the compose files. Raises SpecError with every problem."""
        ...

    async def fingerprint(self) -> Hashable:
        """Return a value that changes when the files do; cheap."""
        ...


class EventRecorder(Protocol):
    """Records events."""

    def record(self, kind: str, message: str, *, outcome: EventOutcome) -> None:
        """Record one event."""
        ...


class SpecWatch:
    """Holds the current spec. `changed` is called after each reading of the files."""

    def __init__(self, source: SpecSource, events: EventRecorder, changed: Callable[[], None]) -> None:
        self._source = source
        self._events = events
        self._changed = changed
        self.current: Spec | None = None
        self.problems: tuple[str, ...] = ()
        self.files: Hashable = None
        """The fingerprint of the files that `current` and `problems` were read from."""
        self._reading = asyncio.Lock()
        self._blind = ""
        """Why the check for changed files fails; "" when it works."""

    def known_spec(self) -> Spec:
        """Return what the compose files say. Raises SpecError, NotYet (they have not been read yet)."""
        spec = self.current
        if spec is None:
            if self.problems:
                raise SpecError(self.problems)
            raise NotYet("the controller has just been started and reads the compose files; repeat in a second")
        return spec

    def known(self, service: str) -> Spec:
        """Return the spec if it has that service. Raises UnknownService, and what `known_spec` raises."""
        spec = self.known_spec()
        if service not in spec.services:
            names = sorted(spec.services)
            raise UnknownService(
                f"there is no service {service!r} with an x-serve block; {did_you_mean(service, names)}"
                f"Services: {', '.join(names) or 'none'}"
            )
        return spec

    def takes_tokens(self) -> bool:
        """Whether a service asks its clients for a JSON Web Token."""
        return self.current is not None and self.current.takes_tokens

    async def run(self) -> None:
        """Read now, then whenever the files change; ends when cancelled."""
        read = await self._fingerprint()
        await self.read_again()
        self.files = read
        before, waited_s = read, 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            waited_s += LOOK_S
            now = await self._fingerprint()
            settled, before = now == before, now
            retry = bool(self.problems or self._blind) and waited_s >= RETRY_S
            if settled and (now != read or retry):
                read, waited_s = now, 0.0
                await self.read_again()
                self.files = read

    async def _fingerprint(self) -> Hashable:
        """The files' fingerprint, or the error in computing it. With an error the files count as changed once; reading
        them reports the cause, and they are read again every RETRY_S."""
        try:
            found = await self._source.fingerprint()
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            if words != self._blind:
                logger.exception("internal: looking whether the compose files have changed raised")
            self._blind = words
            return words
        self._blind = ""
        return found

    async def is_current(self, files: Hashable) -> bool:
        """Whether the files still have this fingerprint."""
        return await self._fingerprint() == files

    async def read_again(self) -> None:
        """Read the files now, even if they have not changed."""
        async with self._reading:
            try:
                spec = await self._source.load()
            except ControllerError as error:
                self._failed(error.problems if isinstance(error, SpecError) else (str(error),))
            except Exception as error:
                # A defect that one file triggers must not end the controller, now and after each restart.
                logger.exception("internal: reading the compose files raised")
                self._failed((f"internal: reading the compose files raised {type(error).__name__}: {error}",))
            else:
                self._succeeded(spec)
            self._changed()

    def _failed(self, problems: tuple[str, ...]) -> None:
        if problems == self.problems:
            return
        self.problems = problems
        kept = "the last good ones stay in force" if self.current else "nothing is started or stopped until they are"
        text = "\n".join(problems)
        self._events.record("spec_error", f"the compose files cannot be used, {kept}:\n{text}", outcome="failed")

    def _succeeded(self, spec: Spec) -> None:
        recovered, self.problems = bool(self.problems), ()
        if spec == self.current:
            if recovered:
                self._events.record("spec_read", "the compose files can be used again; nothing changed", outcome="ok")
            return
        message = _difference(self.current, spec)
        self.current = spec
        self._events.record("spec_read", message, outcome="ok")
        for warning in spec.warnings:
            self._events.record("spec_warning", warning, outcome="warning")


def _difference(before: Spec | None, after: Spec) -> str:
    if before is None:
        return f"read the compose files: {', '.join(sorted(after.services)) or 'no service has an x-serve block'}"
    common = set(after.services) & set(before.services)
    changes = {
        "added": set(after.services) - common,
        "removed": set(before.services) - common,
        "changed": {name for name in common if after.services[name] != before.services[name]},
    }
    words = "; ".join(f"{change} {', '.join(sorted(names))}" for change, names in changes.items() if names)
    return f"the compose files changed: {words or 'nothing that matters to a running replica'}"
