"""Brings the project's images into a registry that every node reaches, and names them by their digests."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import docker.auth
import docker.errors
from docker import APIClient
from docker.utils import parse_repository_tag
from pierhead.compose_names import image_name

from ...errors import ControllerError, EngineError, SpecError

OWN_REGISTRY_PORT = 5000


@dataclass(frozen=True, slots=True)
class ComposeImage:
    """An image as the compose files name it."""

    name: str
    is_built: bool
    """Whether Compose builds it."""


def images_of(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, ComposeImage]:
    """The images of these services."""
    found = {}
    for name in names:
        definition = config["services"][name]
        found[name] = ComposeImage(image_name(config["name"], name, definition), definition.get("build") is not None)
    return found


def with_digests(config: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """The files, where services name their images by digest. An image that is named so is not built."""
    services = dict(config["services"])
    for name, image in digests.items():
        services[name] = {**services[name], "image": image}
        services[name].pop("build", None)
    return {**config, "services": services}


def place_of(image: str, registry: str) -> tuple[str, str]:
    """(repository in the registry, tag) of an image: its own name without the registry that it may have named."""
    repository, tag = parse_repository_tag(image)
    first, slash, rest = repository.partition("/")
    if slash and (re.search(r"[.:]", first) or first == "localhost"):
        repository = rest
    return f"{registry}/{repository}", tag or "latest"


def logins(images: Iterable[str]) -> bytes:
    """What Docker's config.json says of these images' registries, for the controller; empty where nothing is needed.

    Nodes pull with what the service was made with, and the controller makes those of replicas.
    """
    config, found = docker.auth.load_config(), {}
    for image in images:
        host, _ = docker.auth.resolve_repository_name(parse_repository_tag(image)[0])
        known = docker.auth.resolve_authconfig(config, host) or {}
        if known.get("username"):
            pair = f"{known['username']}:{known['password']}"
            found[docker.auth.INDEX_URL if host == docker.auth.INDEX_NAME else host] = {
                "auth": base64.b64encode(pair.encode()).decode()
            }
    return json.dumps({"auths": found}, sort_keys=True).encode() if found else b""


class Pusher:
    """Finds or makes the digest of each image. Blocking."""

    def __init__(self, client: APIClient, registry: str) -> None:
        self._client = client
        self._registry = registry

    def digests(self, images: Mapping[str, ComposeImage]) -> dict[str, str]:
        """By service, the image's name with its digest. Raises SpecError before anything is pushed; EngineError."""
        found = {name: self._pulled_from(image) for name, image in images.items()}
        local = {name: images[name] for name, digest in found.items() if not digest}
        if local and not self._registry:
            raise SpecError([no_registry(name, image.name) for name, image in sorted(local.items())])
        pushed = {image: self._push(image.name) for image in dict.fromkeys(local.values())}
        return {name: digest or pushed[images[name]] for name, digest in found.items()}

    def _pulled_from(self, image: ComposeImage) -> str:
        """The name with a digest by which nodes can pull it where it came from; "" where it is only here."""
        if "@sha256:" in image.name:
            return image.name
        if image.is_built:
            return ""
        repository, tag = parse_repository_tag(image.name)
        try:
            found = self._client.inspect_image(image.name)["RepoDigests"] or []  # type: ignore[no-untyped-call]
        except docker.errors.NotFound:
            found = [f"{repository}@{self._asked(image.name)}"]
        mine = [digest for digest in found if digest.partition("@")[0] == repository]
        return f"{repository}:{tag or 'latest'}@{mine[0].partition('@')[2]}" if mine else ""

    def _asked(self, name: str) -> str:
        """The digest that its registry says."""
        try:
            told = self._client.inspect_distribution(name)  # type: ignore[no-untyped-call]
        except docker.errors.APIError as error:
            raise EngineError(
                f"image {name}: it is not on this machine, and its registry does not give it ({error.explanation}); "
                "check its name, or bring it with `docker load`"
            ) from error
        return str(told["Descriptor"]["digest"])

    def _push(self, name: str) -> str:
        repository, tag = place_of(name, self._registry)
        if not self._client.tag(name, repository, tag):
            raise EngineError(f"image {name}: the Docker Engine did not give it the name {repository}:{tag}")
        digest = ""
        for line in self._client.push(repository, tag, stream=True, decode=True):
            if "error" in line:
                raise EngineError(_not_pushed(name, self._registry, str(line["error"])))
            digest = str((line.get("aux") or {}).get("Digest") or digest)
        if not digest:
            raise ControllerError(f"image {name}: the registry {self._registry} did not say its digest")
        return f"{repository}:{tag}@{digest}"


def no_registry(service: str, image: str) -> str:
    """The problem of an image that is only here."""
    return (
        f"services.{service}.image: {image} is only on this machine, and the other nodes cannot get it: set "
        "PIERHEAD_REGISTRY in .env to a registry that all nodes reach (host:port), or to `here` for one on this node"
    )


def _not_pushed(image: str, registry: str, said: str) -> str:
    remedy = "check PIERHEAD_REGISTRY, and `docker login`"
    if "HTTPS" in said or "x509" in said:
        host = registry.partition("/")[0]
        remedy = f"`pierhead node init --registry {host}` here, and --registry with `node join` on every other node"
    return f"image {image} could not be pushed to {registry}: {said}; {remedy}"
