"""`pierhead new`: the smallest project, which serves."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from pierhead.files import replace_file

from ...errors import InvalidRequest
from . import stack_files
from .project import normal_name

_APP = '''\
"""Two services: `web` answers HTTP and asks `greeter`."""

from pierhead import Service, endpoint


class Greeter(Service):
    async def greet(self, name: str) -> str:
        return f"Hello, {name}!"


class Web(Service, route="/"):
    def __init__(self, greeter: Greeter) -> None:  # in a replica: a handle with the same methods
        self.greeter = greeter

    @endpoint("GET", "/")
    async def hello(self, name: str = "you") -> dict[str, str]:
        return {"greeting": await self.greeter.greet(name)}


app = Web.bind(Greeter.bind())
'''

_COMPOSE = """\
# yaml-language-server: $schema=.pierhead/compose/x-serve.schema.json
x-app: &app
  build: .
  scale: 0 # Compose builds the image; Pierhead starts the replicas

services:
  web:
    <<: *app
    depends_on: [greeter] # which it calls
    x-serve:
      replicas: 1
      route: /

  greeter:
    <<: *app
    x-serve:
      replicas: 1
"""

_DOCKERFILE = """\
FROM pierhead/python:{tag}
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt
COPY app.py ./
RUN python -m pierhead contract app:app
USER pierhead
CMD ["python", "-m", "pierhead", "serve", "app:app"]
"""

_IGNORED = ".*\ntls\nsecrets\n**/__pycache__\n"

_REQUIREMENTS = """\
# What app.py imports beyond Pierhead, for its image and for your own environment.
# numpy
"""

NOT_IN_GIT = """\
# The ports and secrets of this machine.
.env
/tls/
/secrets/
.venv/
__pycache__/
"""

_TEST = '''\
"""The services, called as what they are: objects. `pytest` runs it without Docker."""

import asyncio

from app import Greeter, Web


def test_it_greets() -> None:
    assert asyncio.run(Greeter().greet("Ada")) == "Hello, Ada!"


def test_a_request() -> None:
    web = Web(Greeter())
    assert asyncio.run(web.hello("Ada")) == {"greeting": "Hello, Ada!"}
'''

_NEXT = """\
{name}: app.py, compose.yaml, Dockerfile, requirements.txt, test_app.py.
  cd {typed}
  pierhead dev               # without Docker
  pierhead up --watch        # in containers, and again at every save
  curl 'http://127.0.0.1:8000/?name=Ada'   # at the port that was said"""


def new(directory: Path) -> str:
    """Write a project into a directory that is not there, or is empty; returns what to do next.

    Raises InvalidRequest.
    """
    files = {
        "app.py": _APP,
        "compose.yaml": _COMPOSE,
        "Dockerfile": _DOCKERFILE.format(tag=stack_files.tag()),
        ".dockerignore": _IGNORED,
        ".gitignore": NOT_IN_GIT,
        "requirements.txt": _REQUIREMENTS,
        "test_app.py": _TEST,
    }
    write(directory, files)
    return _NEXT.format(name=directory, typed=typed(directory))


def write(directory: Path, files: Mapping[str, str]) -> None:
    """Write a new project's files. Raises InvalidRequest."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidRequest(f"{directory} is there already, and not empty. Nothing was changed.")
    if normal_name(directory.resolve().name) == "pierhead" and directory.resolve().name != "pierhead":
        raise InvalidRequest(
            f"{directory.name!r} has no letter or digit that a project's name may have. Try: pierhead new shop"
        )
    try:
        for name, text in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            replace_file(directory / name, text.encode())
    except OSError as error:
        raise InvalidRequest(f"{directory}: cannot be written ({error.strerror})") from None


def typed(directory: Path) -> str:
    """As a user types it after `cd`."""
    return shlex.quote(f"./{directory}" if str(directory).startswith("-") else str(directory))
