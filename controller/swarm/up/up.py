"""`make up` on a Swarm: from the resolved compose files to a stack that is deployed. Blocking."""

from __future__ import annotations

import json
import secrets as random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import docker.errors
from docker import APIClient

from ...errors import EngineError, InvalidRequest, SpecError
from ...files.parse import parse
from ..files.dialect import DIALECTS
from ..files.places import KINDS, Place, in_swarm
from ..names import node_address
from ..state.configs import SwarmConfigs, compose_files_of, state_of
from ..state.holder import prepare
from ..state.text import KeptText
from .facts import gather
from .images import OWN_REGISTRY_PORT, ComposeImage, Pusher, images_of, logins, no_registry, with_digests
from .operator_files import OF_CERTIFICATES, certificates, keys
from .preflight import Findings, check, clocks
from .secrets import PROJECT_LABEL, Kept, Set, kept, steps, with_files
from .settings import CLONE_LABEL, DIGEST_LABEL, FILES_LABEL, StackSettings
from .stack_file import LOGINS, Given, Json, network_name, services_of, stack_file
from .swarm_calls import Swarm, wait

DEPLOY_S = 300.0
RUNS_S, NODE_RUNS_S = 300.0, 30.0
"""Nodes pull the images in that time; and for each node, whose HAProxy is replaced after that of the node before."""
TOKEN = "PIERHEAD_API_TOKEN"  # noqa: S105  (a variable's name)
Say = Callable[[str], None]


class Up:
    """One `up`, or the part of it that `deploy` needs."""

    def __init__(self, client: APIClient, settings: StackSettings, config: Mapping[str, Any], say: Say) -> None:
        self._client, self._settings, self._say = client, settings, say
        self._config, self._files = in_swarm(config, _contents(config))
        self._swarm = Swarm(client, settings.project)
        self._names = [name for name, _ in services_of(config, settings.profiles)]

    def check(self) -> None:
        """Say what may go wrong, and raise InvalidRequest with what is in the way; nothing is changed."""
        found, _ = self._refuse()
        for warning in found.warnings:
            self._say(f"Warning: {warning}.")
        for note in found.notes:
            self._say(f"Note: {note}.")

    def _refuse(self) -> tuple[Findings, Set]:
        """Return what is not in the way, and the operator's files."""
        https = [self._settings.https_port] if self._settings.https_port else []
        ports = self._settings.http_port, self._settings.grpc_port, *https
        is_own = self._settings.registry == "here"
        found = check(gather(self._client, self._settings.project, ports, self._registry, is_own=is_own))
        if found.problems:
            raise InvalidRequest("\n".join(found.problems))
        refuse_another_clone(self._swarm, self._settings)
        files = self._operator_files()
        stack_file(self._config, self._given({}, {}))
        built = {name: one for name, one in self._images().items() if one.is_built}
        if built and not self._settings.registry:
            raise SpecError([no_registry(name, image.name) for name, image in sorted(built.items())])
        return found, files

    async def deploy(self) -> None:
        """Everything. Raises InvalidRequest before anything is changed; EngineError."""
        _, files = self._refuse()
        with self._step("Making the networks"):
            for key, definition in (self._config.get("networks") or {}).items():
                if not (definition or {}).get("external"):
                    self._swarm.make_network(network_name(self._config, key), definition or {})
        self._start_registry()
        digests = self._push()
        self._keep_files()
        # A first controller needs the compose files. A running one would ask for tokens before the HAProxys have
        # the keys.
        is_first = self._swarm.service("controller") is None
        if is_first:
            await self._store_and_say(digests)
        login = logins(digests.values())
        more = {LOGINS: kept(self._settings.project, LOGINS, login)} if login else {}
        rollout = steps(self._settings.project, self._swarm.used_secrets(), time.time())
        rollout = with_files(rollout, {**more, **files}, self._leaving(files))
        for secrets in rollout:
            self._swarm.keep("secrets", secrets.values())
            with self._step("Deploying the stack, with HAProxy on every node"):
                self._deploy(stack_file(self._config, self._given(digests, secrets)))
                self._wait("controller", "haproxy")
        self._swarm.drop_own(rollout[-1])
        if not is_first:
            await self._store_and_say(digests)

    async def files(self) -> None:
        """Push the images and store the compose files, so that the controller has what the files say now."""
        refuse_another_clone(self._swarm, self._settings)
        spec = parse(self._settings.project, self._config, DIALECTS)
        if self._swarm.service("controller") is None:
            raise InvalidRequest(f"there is no stack {self._settings.project} on this Swarm; `pierhead up` starts it")
        wanted = keys(self._settings, spec, time.time()).keys()
        if not wanted <= self._swarm.secrets_of("haproxy").keys():
            raise InvalidRequest(
                f"the nodes do not have the public keys in {self._settings.jwt_dir}, which services with auth: jwt "
                "need: `pierhead up` gives them these, and rolls out the files"
            )
        if self._settings.registry == "here" and _place_of_registry(self._swarm) is None:
            raise InvalidRequest(
                "no node of the Swarm has the stack's registry: `pierhead up` starts it on this one, and pushes every "
                "image there"
            )
        self._keep_files()
        await self._store(self._push())

    # ------------------------------------------------------------------------------------------------------- parts

    def _given(self, digests: Mapping[str, str], secrets: Set) -> Given:
        where = _place_of_registry(self._swarm)
        return Given(
            self._settings.clone,
            self._settings.profiles,
            digests,
            {key: one.name for key, one in secrets.items()},
            self._token(),
            where[0] if where else _this_node(self._client)[0],
            self._settings.https_port,
        )

    def _operator_files(self) -> Set:
        """Raises SpecError and WrongFiles."""
        spec, now = parse(self._settings.project, self._config, DIALECTS), time.time()
        return {**certificates(self._settings, now), **keys(self._settings, spec, now)}

    def _leaving(self, files: Set) -> Set:
        """The certificates that HAProxy has and is not to have: without TLS."""
        if any(path.startswith(OF_CERTIFICATES) for path in files):
            return {}
        has, there = self._swarm.secrets_of("haproxy"), self._swarm.kept("secrets")
        return {path: there[name] for path, name in has.items() if path.startswith(OF_CERTIFICATES) and name in there}

    def _token(self) -> str:
        """The user's; else the one that the running controller has; else a new one."""
        written = (self._config["services"].get("controller") or {}).get("environment", {}).get(TOKEN)
        running = self._swarm.service("controller")
        env = running["Spec"]["TaskTemplate"]["ContainerSpec"].get("Env", []) if running else []
        had = next((entry.partition("=")[2] for entry in env if entry.startswith(f"{TOKEN}=")), "")
        return written or had or random.token_hex(16)

    def _start_registry(self) -> None:
        if self._settings.registry != "here":
            return
        with self._step("Starting the registry"):
            image = images_of(self._config, ["registry"])["registry"].name
            only = {**self._config, "services": {"registry": self._config["services"]["registry"]}}
            self._deploy(stack_file(only, self._given({"registry": image}, {})), prune=False)
            self._wait("registry")

    def _push(self) -> dict[str, str]:
        """By service, the image's name with its digest; the registry's own image is only on its node."""
        images = self._images()
        own = {name: images.pop(name).name for name in ("registry",) if name in images}
        with self._step(f"Pushing {len({*images.values()})} images"):
            return own | Pusher(self._client, self._registry()).digests(images)

    def _images(self) -> dict[str, ComposeImage]:
        names = [name for name, one in self._config["services"].items() if "x-serve" in one or name in self._names]
        return images_of(self._config, names)

    def _registry(self) -> str:
        if self._settings.registry != "here":
            return self._settings.registry
        where = _place_of_registry(self._swarm) or _this_node(self._client)
        return f"{where[1]}:{OWN_REGISTRY_PORT}"

    async def _store_and_say(self, digests: Mapping[str, str]) -> None:
        with self._step("Storing the compose files"):
            await self._store(digests)

    async def _store(self, digests: Mapping[str, str]) -> None:
        configs = SwarmConfigs(self._client)
        try:
            await prepare(state_of(configs, self._settings.project))
            text = json.dumps(with_digests(self._config, digests)).replace("$", "$$")
            where = {FILES_LABEL: self._settings.files, DIGEST_LABEL: self._settings.files_digest}
            await KeptText(compose_files_of(configs, self._settings.project)).write(text, where)
        finally:
            configs.close()

    def _deploy(self, content: Json, *, prune: bool = True) -> None:
        """Raises EngineError with what `docker stack deploy` says."""
        command = ["docker", "stack", "deploy", "--detach", "--resolve-image", "never", "--with-registry-auth"]
        command += [*(["--prune"] if prune else []), "--compose-file", "-", self._settings.project]
        text = json.dumps(content).replace("$", "$$")
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=DEPLOY_S, check=False)
        except subprocess.TimeoutExpired:
            raise EngineError(
                f"`docker stack deploy` has not ended after {DEPLOY_S:g} s; `pierhead up` again"
            ) from None
        if done.returncode:
            raise EngineError(f"`docker stack deploy` refuses the stack: {done.stderr.strip()}")

    def _keep_files(self) -> None:
        """What versions of services have stays until `down`: they may come back."""
        for (kind, name), data in self._files.items():
            self._swarm.keep(kind, [Kept(name, {PROJECT_LABEL: self._settings.project}, data)])

    def _wait(self, *services: str) -> None:
        words = " and ".join(services)
        within_s = RUNS_S + NODE_RUNS_S * len(self._client.nodes())
        wait(lambda: self._swarm.runs(*services), f"{words} run everywhere", within_s, self._swarm.trouble)

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        self._say(f"{what} ...")
        began = time.monotonic()
        yield
        self._say(f"{what}: done ({time.monotonic() - began:.1f} s)")


def tell_trouble(swarm: Swarm, say: Say) -> None:
    """Say which nodes' clocks are off, as every node has tasks of the stack by now, and which services do not run."""
    tasks = swarm.client.tasks({"desired-state": "running"})  # type: ignore[no-untyped-call]
    for warning in clocks(swarm.client.nodes(), tasks):
        say(f"Warning: {warning}.")
    if trouble := swarm.trouble():
        say(f"Warning: not all of the stack runs, and Swarm keeps trying: {trouble}.")


def refuse_another_clone(swarm: Swarm, settings: StackSettings) -> None:
    """Raise InvalidRequest where the stack of this name was started from another clone."""
    others = {one["Spec"]["Labels"].get(CLONE_LABEL, "") for one in swarm.stack()} - {settings.clone, ""}
    if others and not settings.has_force:
        raise InvalidRequest(
            f'a stack named "{settings.project}" runs on this Swarm from another directory: '
            f"{', '.join(sorted(others))}. Remove it there (pierhead down; where that directory is gone, here: "
            "pierhead down --force, in a clone make down FORCE=1), or give this one a name and ports of its own in "
            ".env (COMPOSE_PROJECT_NAME, PIERHEAD_HTTP_PORT, PIERHEAD_GRPC_PORT, PIERHEAD_HTTPS_PORT)"
        )


def _contents(config: Mapping[str, Any]) -> dict[Place, bytes]:
    """The content of each secret and config that a service uses and that is not in Swarm already. Raises SpecError."""
    services = config["services"].values()
    used = {(kind, item["source"]) for kind in KINDS for one in services for item in one.get(kind) or ()}
    found, problems = dict[Place, bytes](), []
    for kind, key in sorted(used):
        definition = (config.get(kind) or {}).get(key) or {}
        try:
            if "content" in definition:
                found[kind, key] = str(definition["content"]).encode()
            elif "file" in definition:
                found[kind, key] = Path(definition["file"]).read_bytes()
        except OSError as error:
            problems.append(
                f"{kind}.{key}.file: {error.strerror}: {error.filename} (only files below the compose file's directory "
                "are read)"
            )
    if problems:
        raise SpecError(problems)
    return found


def _this_node(client: APIClient) -> tuple[str, str]:
    """(id, address) of the node that this engine is."""
    told = client.info()["Swarm"]
    return str(told["NodeID"]), str(told["NodeAddr"])


def _place_of_registry(swarm: Swarm) -> tuple[str, str] | None:
    """(id, address) of the node that has the stack's registry; None where there is none, or its node was removed."""
    service = swarm.service("registry")
    if service is None:
        return None
    constraint = service["Spec"]["TaskTemplate"]["Placement"]["Constraints"][0]
    node = constraint.partition("==")[2].strip()
    with suppress(docker.errors.NotFound):
        return node, node_address(swarm.client.inspect_node(node))
    return None
