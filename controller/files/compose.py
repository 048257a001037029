"""Reads the project by running Compose, which handles interpolation, include, extends, anchors and overrides.

The files are mounted into the controller at the absolute path that they have on the host, so relative binds and env
files mean the same here as to the user's own `docker compose`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from ..errors import ControllerError, SpecError
from ..model.spec import Spec
from .contents import attached_files, with_contents
from .dialect import Dialect
from .messages import MessageContext, explain, explain_warning, split_output
from .parse import parse
from .places import with_places
from .project_files import Fingerprint, ProjectFiles, compose_files, stat_of
from .yaml import load_resolved

TIMEOUT_S = 30.0
_COMMAND = ("docker", "compose", "--ansi", "never", "--profile", "*", "config")


class ComposeProject:
    """One Compose project on disk."""

    def __init__(
        self,
        project_dir: Path,
        environment: Mapping[str, str],
        *,
        dialects: Mapping[str, Dialect] | None = None,
        command: Sequence[str] = _COMMAND,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`environment`: the command's complete one, with COMPOSE_FILE, COMPOSE_PROJECT_NAME, PATH and variables.
        `dialects`: see `parse`.
        """
        self.project_dir = project_dir
        self._environment = dict(environment)
        self._dialects = dialects or {}
        self._command = tuple(command)
        self._timeout_s = timeout_s
        self._files = ProjectFiles(project_dir, environment)
        self._attached: frozenset[str] = frozenset()
        """Files that replicas get, by the last reading."""
        self._looking = asyncio.Lock()

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], dialects: Mapping[str, Dialect] | None = None
    ) -> ComposeProject:
        """The project of the controller's own environment (PIERHEAD_PROJECT_DIR, else the working directory)."""
        return cls(Path(environment.get("PIERHEAD_PROJECT_DIR") or Path.cwd()), environment, dialects=dialects)

    async def fingerprint(self) -> Fingerprint:
        """A value that changes when a file of the project does. Cheap enough for every second; read in a thread."""
        async with self._looking:
            return await asyncio.to_thread(self._look)

    def _look(self) -> Fingerprint:
        return (*self._files.fingerprint(), *(stat_of(Path(path)) for path in sorted(self._attached)))

    async def load(self) -> Spec:
        """Run `docker compose config` and read what it prints.

        Raises SpecError when the files are wrong, ControllerError when Compose cannot be run or does not answer.
        """
        try:
            return await self._load()
        except SpecError as error:
            roots = compose_files(self.project_dir, self._environment)
            others = [path for path in map(Path, self._files.names()) if path not in roots]
            files = [*(path for path in others if path.suffix in (".yaml", ".yml")), *roots]
            raise SpecError(await asyncio.to_thread(with_places, error.problems, files, self.project_dir)) from error

    async def _load(self) -> Spec:
        output, messages = await self.resolved()
        setting = self._setting()
        try:
            config = load_resolved(output)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ControllerError(f"`docker compose config` printed what is not YAML: {error}") from error
        name = config.get("name") if isinstance(config, Mapping) else None
        project = name if isinstance(name, str) else self._environment.get("COMPOSE_PROJECT_NAME", "")
        self._attached = attached_files(config)
        spec = await asyncio.to_thread(with_contents, parse(project, config, self._dialects), self._attached)
        explained = (explain_warning(message, setting) for message in messages)
        return dataclasses.replace(spec, warnings=(*explained, *spec.warnings))

    def _setting(self) -> MessageContext:
        return MessageContext(self.project_dir, compose_files(self.project_dir, self._environment))

    async def resolved(self) -> tuple[str, tuple[str, ...]]:
        """(the resolved files, warnings) as `docker compose config` prints them. Raises as `load` does."""
        if not self.project_dir.is_dir():
            raise SpecError(
                [f"PIERHEAD_PROJECT_DIR: {self.project_dir} is not a directory here; mount it at its own absolute path"]
            )
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                cwd=self.project_dir,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # so that _end() reaches the plug-in, a child of the command
            )
        except OSError as error:
            raise ControllerError(
                f"cannot run `{' '.join(self._command)}`: {error.strerror}; the controller needs Docker's command line "
                "and its Compose plug-in"
            ) from error
        try:
            async with asyncio.timeout(self._timeout_s):
                output, errors = await process.communicate()
        except TimeoutError as error:
            raise ControllerError(
                f"`{' '.join(self._command)}` did not answer within {self._timeout_s:g} s in {self.project_dir}"
            ) from error
        finally:
            await _end(process)
        message, warnings = split_output(errors.decode(errors="replace"))
        if process.returncode != 0:
            raise SpecError([explain(message or f"Compose ended with code {process.returncode}", self._setting())])
        return output.decode(errors="replace"), warnings


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process if it still runs."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has just exited
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
