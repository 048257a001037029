"""The stack on a Swarm: `python -m controller.swarm.up up|check|trouble|files|down`, for controller/swarm/tool/.

`up`, `check` and `files` read what `docker compose config` printed from standard input. Exit codes are those of
controller/errors.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import docker.errors
import requests
from docker import APIClient

from ...errors import ControllerError, EngineError, InvalidRequest
from ...files.yaml import load_resolved
from .down import down
from .settings import VARIABLE, StackSettings
from .swarm_calls import Swarm
from .up import Say, Up, tell_trouble

SOCKET = "unix:///var/run/docker.sock"
ANSWER_S = 600
"""A push may say nothing for minutes."""


def run(command: str, settings: StackSettings) -> None:
    """Carry a command out. Raises ControllerError."""
    client = APIClient(base_url=SOCKET, version="auto", timeout=ANSWER_S)
    try:
        match command:
            case "up":
                asyncio.run(_up(client, settings, _say).deploy())
            case "check":
                _up(client, settings, _say).check()
            case "trouble":
                tell_trouble(Swarm(client, settings.project), _say)
            case "files":
                asyncio.run(_up(client, settings, _warn).files())
            case "down":
                down(Swarm(client, settings.project), settings, _say)
            case _:
                raise InvalidRequest(f"expected up, check, trouble, files or down, found {command!r}")
    finally:
        client.close()


def _up(client: APIClient, settings: StackSettings, say: Say) -> Up:
    return Up(client, settings, load_resolved(sys.stdin.read()), say)


def _say(words: str) -> None:
    print(words, flush=True)  # noqa: T201


def _warn(words: str) -> None:
    """Standard output is that of the command which follows."""
    sys.stderr.write(f"{words}\n")


def main() -> int:
    """Return the exit code."""
    try:
        run(sys.argv[1] if len(sys.argv) > 1 else "", StackSettings(**json.loads(os.environ[VARIABLE])))
    except ControllerError as error:
        _warn(str(error))
        return error.exit_code
    except (docker.errors.DockerException, requests.RequestException) as error:
        _warn(f"the Docker Engine says: {getattr(error, 'explanation', None) or error}")
        return EngineError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
