"""A stack in containers for a test, which the command `pierhead` starts and removes."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from pierhead.compose_names import DEFAULT_NAMES
from pierhead.runner.ports import free_ports

PORTS = ("HTTP", "GRPC", "API", "STATS", "PROMETHEUS", "GRAFANA")
"""The stack's ports, as the variables PIERHEAD_<NAME>_PORT call them."""

UP_S = 1800.0
DOWN_S = 300.0
END_S = 10.0
"""How long a command that is ended may take; then it is killed."""
TOLD_LINES = 40

_DOWN = ("down", "--volumes", "--images")


class StackFailed(Exception):
    """The stack could not be started; the message has the last lines of what the command said."""


class Stack:
    """The stack of a compose file, on free ports and with a project name of its own, while a `with` block runs.

        with Stack("compose.yaml") as stack:
            urllib.request.urlopen(f"{stack.base_url}/shop/recommend?user=3")

    - compose: the compose file; `pierhead up` runs in its directory.
    - environment: variables for the compose files, above those of this process.
    - command: what starts and removes it, before `up` and `down`.
    It is removed at every end of the block, also after Ctrl-C, and also if it could not be started. So
    are the images that were built for it.
    """

    def __init__(
        self,
        compose: str | os.PathLike[str] = "compose.yaml",
        *,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = ("pierhead",),
    ) -> None:
        self.compose = Path(compose).absolute()
        self.project = f"test-{secrets.token_hex(4)}"
        """Its name, with which the names of its containers begin."""
        ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.base_url = f"http://127.0.0.1:{ports['HTTP']}"
        """Where its routes are."""
        self.grpc_address = f"127.0.0.1:{ports['GRPC']}"
        self.api_url = f"http://127.0.0.1:{ports['API']}"
        """The controller's REST API."""
        self._command = tuple(command)
        here = {name: value for name, value in os.environ.items() if name != "COMPOSE_FILE"}
        files = {} if self.compose.name in DEFAULT_NAMES else {"COMPOSE_FILE": str(self.compose)}
        self._environment = {
            **here,
            **{f"PIERHEAD_{name}_PORT": str(port) for name, port in ports.items()},
            "COMPOSE_PROJECT_NAME": self.project,
            **files,
            **(environment or {}),
        }

    def __enter__(self) -> Stack:
        if not self.compose.exists():
            raise StackFailed(f"{self.compose} does not exist")
        try:
            self._run(["up"], UP_S)
        except BaseException:  # Ctrl-C, too
            with contextlib.suppress(StackFailed):
                self._run(_DOWN, DOWN_S)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(_DOWN, DOWN_S)

    def _run(self, words: Sequence[str], limit_s: float) -> None:
        command = " ".join([*self._command, *words])
        # In a session of its own, so that Ctrl-C reaches this process alone, which then removes the stack.
        with subprocess.Popen(
            [*self._command, *words],
            cwd=self.compose.parent,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=limit_s)
            except BaseException as error:
                _end(process)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise StackFailed(f"{command} took more than {limit_s:g} s") from None
                raise
        if process.returncode:
            told = "\n".join(said.splitlines()[-TOLD_LINES:])
            raise StackFailed(f"{command} ended with {process.returncode}:\n{told}")


def _end(process: subprocess.Popen[str]) -> None:
    """End the command with all that it has started."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
