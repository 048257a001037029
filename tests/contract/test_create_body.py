"""A replica is what Compose itself would have created from the same service, less what controller/engines/privileges.py
takes away: both are made and compared.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker.errors
import pytest
from docker import APIClient

from controller.engines.labels import create_body
from controller.files.compose import ComposeProject
from controller.model.actions import replica_name
from tests.debian_image import debian_image
from tests.harness.commands import run

pytestmark = pytest.mark.engine


ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
DEFINITION = """
name: PROJECT
services:
  twin:
    image: IMAGE
    command: [sh, -c, "sleep infinity & wait", "$$dollar"]
    entrypoint: [env]
    working_dir: /work
    user: "1000:1000"
    init: true
    read_only: true
    tty: true
    stdin_open: true
    stop_signal: SIGINT
    stop_grace_period: 45s
    shm_size: 128m
    environment: {A: "1", B: "x=$$y", PATH: null}
    labels: {tested: "yes", pierhead_test: create-body}
    volumes:
      - ./data:/data:ro
      - cache:/cache
      - {type: tmpfs, target: /scratch, tmpfs: {size: 1m}}
      - {type: bind, source: ./data, target: /again, bind: {propagation: rprivate}}
    tmpfs: ["/run:size=4m"]
    secrets: [token]
    configs: [{source: settings, target: /etc/settings}]
    networks: {default: {aliases: [nickname]}, back: {priority: 5}}
    ulimits: {nproc: 512, nofile: {soft: 1024, hard: 2048}}
    cap_add: [NET_ADMIN]
    cap_drop: [CHOWN]
    devices: ["/dev/null:/dev/zilch:rw"]
    group_add: ["20"]
    security_opt: ["no-new-privileges:true"]
    sysctls: {net.core.somaxconn: 1024}
    extra_hosts: ["far=10.1.2.3"]
    dns: [10.9.8.7]
    dns_search: [example.org]
    logging: {driver: json-file, options: {max-size: 1m}}
    ipc: shareable
    oom_score_adj: 100
    healthcheck: {test: "true", interval: 1m30s, retries: 2}
    deploy: {resources: {limits: {cpus: "0.5", memory: 64m, pids: 100}, reservations: {memory: 32m}}}
    SERVE
networks: {back: {}}
volumes: {cache: {}}
secrets: {token: {file: ./token}}
configs: {settings: {file: ./token}}
"""


@pytest.fixture
def twins(docker_client: APIClient, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A project whose service Compose has created (not started); its name and directory."""
    project = f"pierhead-body-{secrets.token_hex(3)}"
    (tmp_path / "data").mkdir()
    (tmp_path / "token").write_text("secret")
    text = DEFINITION.replace("PROJECT", project).replace("IMAGE", debian_image(docker_client))
    (tmp_path / "compose.yaml").write_text(text.replace("SERVE", ""))
    compose(tmp_path, "up", "--no-start", "--no-build")
    try:
        serving = "scale: 0\n    x-serve: {request_timeout_s: 4, graceful_shutdown_timeout_s: 5, managed: false, "
        serving += "protocol: http, health: {probe: {path: /}}}"
        (tmp_path / "compose.yaml").write_text(text.replace("SERVE", serving))
        yield project, tmp_path
    finally:
        compose(tmp_path, "down", "--volumes", "--remove-orphans", "--timeout", "0")


def compose(directory: Path, *arguments: str) -> str:
    done = run(["docker", "compose", *arguments], 90, directory, ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def make_replica(client: APIClient, directory: Path, project: str) -> tuple[str, dict[str, Any]]:
    spec = (await ComposeProject(directory, ENVIRONMENT).load()).services["twin"]
    name = replica_name(project, "twin", "abcd1234", 1)
    body = create_body(spec, name, "abcd1234", 1, (), project)
    client.create_container_from_config(body, name=name)  # type: ignore[no-untyped-call]
    return name, client.inspect_container(name)


def comparable(inspected: dict[str, Any], project: str) -> dict[str, Any]:
    """What must be equal: everything but names, labels, times and how mounts are asked for."""
    host_config = dict(inspected["HostConfig"])
    for key in ("Binds", "Mounts"):  # two ways to ask for the same; what came of them is in Mounts below
        host_config.pop(key, None)
    host_config["PortBindings"] = host_config["PortBindings"] or None
    host_config["Ulimits"] = sorted(host_config["Ulimits"], key=lambda limit: str(limit["Name"]))
    host_config["SecurityOpt"] = [option.replace(":", "=") for option in host_config["SecurityOpt"]]
    configured = dict(inspected["Config"], Env=sorted(inspected["Config"]["Env"]))
    # The caller decides about attaching; Hostname is the id.
    for key in ("Labels", "Hostname", "AttachStdout", "AttachStderr", "AttachStdin", "StdinOnce"):
        configured.pop(key, None)
    mounts = [
        {key: value for key, value in mount.items() if key not in ("Mode", "Driver")} for mount in inspected["Mounts"]
    ]
    networks = inspected["NetworkSettings"]["Networks"]
    return {
        "config": configured,
        "host": host_config,
        "mounts": sorted(mounts, key=lambda mount: str(mount["Destination"])),
        "networks": sorted(networks),
        "aliases": {
            name: {alias for alias in network["Aliases"] or () if not alias.startswith(project)}
            for name, network in networks.items()
        },
    }


async def test_a_replica_is_what_compose_would_have_created(docker_client: APIClient, twins: tuple[str, Path]) -> None:
    project, directory = twins
    by_compose = docker_client.inspect_container(f"{project}-twin-1")
    _, by_us = await make_replica(docker_client, directory, project)
    ours, theirs = comparable(by_us, project), comparable(by_compose, project)
    theirs["host"]["CapDrop"].append("NET_RAW")
    for section in theirs:
        assert ours[section] == theirs[section], section
    docker_client.start(by_us["Id"])
    assert docker_client.inspect_container(by_us["Id"])["State"]["Running"]


async def test_compose_knows_what_was_made_for_a_replica(docker_client: APIClient, twins: tuple[str, Path]) -> None:
    project, directory = twins
    docker_client.remove_container(f"{project}-twin-1", v=True)
    docker_client.remove_volume(f"{project}_cache")
    name, _ = await make_replica(docker_client, directory, project)
    labels = docker_client.inspect_volume(f"{project}_cache")["Labels"]
    assert labels == {"com.docker.compose.project": project, "com.docker.compose.volume": "cache"}
    compose(directory, "down", "--volumes", "--remove-orphans", "--timeout", "0")
    with pytest.raises(docker.errors.NotFound):
        docker_client.inspect_container(name)
    with pytest.raises(docker.errors.NotFound):
        docker_client.inspect_volume(f"{project}_cache")


async def test_up_leaves_replicas_and_makes_networks(docker_client: APIClient, twins: tuple[str, Path]) -> None:
    project, directory = twins
    compose(directory, "down", "--volumes", "--timeout", "0")
    compose(directory, "up", "--detach", "--no-build")
    assert docker_client.containers(all=True, filters={"label": f"com.docker.compose.project={project}"}) == []
    networks = docker_client.networks(filters={"label": f"com.docker.compose.project={project}"})
    made = {network["Name"] for network in networks}
    assert made == {f"{project}_default", f"{project}_back"}
    name, inspected = await make_replica(docker_client, directory, project)
    compose(directory, "up", "--detach", "--no-build", "--remove-orphans")
    assert docker_client.inspect_container(name)["Id"] == inspected["Id"]
    listed = compose(directory, "ps", "--all", "--format", "{{.Name}}")
    assert name in listed.split()
