"""A user who has the wheel and no clone. Images have a tag of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import docker

from tests.harness.ports import free_ports
from tests.harness.stack import PORTS, request

TAG = "own-project-test"
COMMAND_S = 600.0


@dataclass
class User:
    """A user in a directory, with the tool on PATH and nothing of this test's environment."""

    programs: Path
    directory: Path
    tag: str = TAG

    def type(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.directory, env=self.environment(**more), capture_output=True, text=True, check=False,
            timeout=COMMAND_S,
        )  # fmt: skip

    def environment(self, **more: str) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PIERHEAD", "COMPOSE", "PYTHON"))
        }
        own = {"PATH": f"{self.programs}:{os.environ['PATH']}", "PIERHEAD_TAG": self.tag, "PWD": str(self.directory)}
        return {**kept, **own, **more}

    @contextlib.contextmanager
    def begins(self, *words: str, output: TextIO) -> Iterator[subprocess.Popen[str]]:
        """Type a command that keeps running."""
        own = self.environment()
        with subprocess.Popen(
            words, cwd=self.directory, env=own, stdout=output, stderr=output, text=True, start_new_session=True
        ) as process:
            try:
                yield process
            finally:
                process.terminate()

    def does(self, *words: str, **more: str) -> str:
        done = self.type(*words, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def setting(self, name: str) -> str:
        lines = (self.directory / ".env").read_bytes().decode().splitlines()
        return next(line.partition("=")[2] for line in lines if line.startswith(f"{name}="))

    def get(self, path: str) -> tuple[int, bytes]:
        answer = request(f"http://127.0.0.1:{self.setting('PIERHEAD_HTTP_PORT')}{path}")
        return answer.status, answer.body

    def containers(self) -> dict[str, str]:
        """Of the project, in whatever state: name and id."""
        labels = [f"com.docker.compose.project={self.setting('COMPOSE_PROJECT_NAME')}"]
        found = docker.from_env().containers.list(all=True, filters={"label": labels}, ignore_removed=True)
        return {str(one.name): str(one.id) for one in found}

    def services(self) -> dict[str, Any]:
        document = json.loads(self.does("pierhead", "status", "-o", "json"))
        return {row["name"]: row for row in document["services"]}

    @contextlib.contextmanager
    def cleaned_up(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.does("pierhead", "down", "--volumes", "--images")
            assert self.containers() == {}


def own_ports() -> str:
    """Lines of .env: other stacks on this machine have the default ports."""
    return "".join(f"{name}={port}\n" for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True))


def remove_images(tag: str, *prefixes: str) -> None:
    """Remove the images with this tag, and those whose names begin so."""
    engine = docker.from_env()
    for image in engine.images.list():
        for name in image.tags:
            if name.endswith(f":{tag}") or name.startswith(prefixes):
                engine.images.remove(name, force=True)
