"""validate and schema, as a process, with a stand-in for `docker compose config`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pierhead.serve_block import ServeBlock, keys_of

from controller.files.schema import REFERENCE, compose_schema, schema_text
from controller.model.spec import AutoscaleSpec
from controller.tool.commands.offline import _neighbours
from tests.unit.controller.worlds import service

ROOT = Path(__file__).resolve().parents[3]
GOOD = """
name: shop
services:
  web: {image: a, scale: 0, x-serve: {route: /web, replicas: 2}}
  ranker:
    image: b
    scale: 0
    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]}}}
    x-serve: {autoscale: {min: 1, max: 4}, grpc_services: [p.v1.Ranker]}
  database: {image: c}
"""
BAD = "{name: shop, services: {web: {image: a, scale: 0, x-serve: {replicas: two, rout: /web}}}}"


@dataclass
class Project:
    """A project whose files Compose resolves to what the test says."""

    directory: Path

    def resolves_to(self, config: str, stderr: str = "", code: int = 0) -> None:
        """Let `docker compose config` print this, and keep the files it was asked about."""
        (self.directory / "resolved").write_text(config)
        (self.directory / "complaint").write_text(stderr)
        docker = self.directory / "bin" / "docker"
        docker.parent.mkdir(exist_ok=True)
        prints = f'echo "$COMPOSE_FILE" >asked\ncat complaint >&2\ncat resolved\nexit {code}\n'
        docker.write_text(f"#!/bin/sh\ncd {self.directory}\n{prints}")
        docker.chmod(0o755)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "PATH": f"{self.directory / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "PIERHEAD_PROJECT_DIR": str(self.directory),
            "PIERHEAD_API_URL": "http://127.0.0.1:1",
        }
        command = [sys.executable, "-P", "-m", "controller.tool.command", *arguments]
        return subprocess.run(
            command, cwd=self.directory, env=env, capture_output=True, text=True, timeout=60, check=False
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_good_files_are_shown_as_they_were_understood(project: Project) -> None:
    project.resolves_to(GOOD)
    done = project.run("validate")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ranker: 1 to 4 replicas, 1 GPU each, grpc on port 50051, gRPC p.v1.Ranker",
        "web: 2 replicas, http on port 8080, /web",
    ]


def test_every_problem_is_shown_and_ends_with_two(project: Project) -> None:
    project.resolves_to(BAD)
    done = project.run("validate")
    assert done.returncode == 2
    first, second = done.stdout.splitlines()
    assert first == 'services.web.x-serve.replicas: expected an integer >= 0, found "two"'
    assert second.startswith('services.web.x-serve.rout: unknown key; did you mean "route"?')
    done = project.run("validate", "-o", "json")
    assert done.returncode == 2
    document = json.loads(done.stdout)
    assert not document["valid"]
    assert document["problems"][0] == {
        "path": "services.web.x-serve.replicas",
        "message": 'expected an integer >= 0, found "two"',
    }


@pytest.mark.parametrize(("entries", "warns"), [("1024", True), ("16384", False), (None, False)])
def test_more_replicas_than_the_kernel_has_room_for_are_a_warning(
    tmp_path: Path, entries: str | None, warns: bool
) -> None:
    table, web = tmp_path / "gc_thresh3", service("web")
    if entries is not None:
        table.write_text(f"{entries}\n")
    services = [replace(web, replicas=100), replace(web, replicas=1, autoscale=AutoscaleSpec(max=29))]
    found = list(_neighbours(services, table))
    assert [one.partition(":")[0] for one in found] == [
        "the files allow 129 replicas, and this machine's kernel has room for about 128"
    ] * warns


def test_named_files_are_those_that_are_read(project: Project) -> None:
    project.resolves_to(GOOD)
    for name in ("compose.yaml", "app.yaml"):
        (project.directory / name).write_text("services: {}")
    assert project.run("validate", "compose.yaml", "app.yaml").returncode == 0
    asked = (project.directory / "asked").read_text().strip().split(os.pathsep)
    assert asked == [str(project.directory / "compose.yaml"), str(project.directory / "app.yaml")]
    done = project.run("validate", "compose.yaml", "nosuch.yaml")
    assert done.returncode == 2
    assert done.stderr == f"FILE: there is no file 'nosuch.yaml' in {project.directory}\n"


@pytest.mark.parametrize(
    ("config", "stderr", "code", "words"),
    [
        (
            "{name: shop, services: {database: {image: c}}}",
            "",
            0,
            "no service has an x-serve block; compose/reference.yaml",
        ),
        ("", 'service "a" refers to undefined network nope', 2, ': service "a" refers to undefined network nope'),
    ],
    ids=["no service has a block", "Compose refuses the files"],
)
def test_files_without_services(project: Project, config: str, stderr: str, code: int, words: str) -> None:
    project.resolves_to(config, stderr, code=1 if stderr else 0)
    done = project.run("validate")
    assert done.returncode == code
    assert words in done.stdout


# -------------------------------------------------------------------------------------------------------------- schema


def test_the_schema_is_printed(project: Project) -> None:
    assert project.run("schema").stdout == project.run("validate", "--schema").stdout == schema_text()


def test_the_committed_schema_is_the_models() -> None:
    committed = (ROOT / "compose" / "x-serve.schema.json").read_text(encoding="utf-8")
    assert committed == schema_text(), (
        "write it again: .venv/bin/python -m controller.tool.command schema >compose/x-serve.schema.json"
    )


def test_every_key_is_described() -> None:
    definitions = compose_schema(REFERENCE.read_text(encoding="utf-8"))["$defs"]
    missing = [
        f"{name}.{key}"
        for name, definition in definitions.items()
        for key, schema in definition["properties"].items()
        if not schema.get("description")
    ]
    assert missing == []
    assert set(definitions["ServeBlock"]["properties"]) == {key.name for key in keys_of(ServeBlock)}
    assert definitions["ServeBlock"]["additionalProperties"] is False
