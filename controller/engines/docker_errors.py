"""Converts docker-py's exceptions into the controller's errors: the call, the engine's message, what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import aiohttp
import docker.errors
import requests

from ..errors import EngineError, EngineLeaderless, EngineUnreachable, ImageNotFound
from ..model.spec import ServiceSpec

Hints = Sequence[tuple[str, str]]
"""Pattern in the engine's message -> remedy. The first match counts."""
LEADERLESS = r"does not have a leader|code = DeadlineExceeded"
_HINTS = (
    (r"could not select device driver", "install the NVIDIA Container Toolkit, or switch CDI on in the engine"),
    (
        r"CDI device injection failed|unresolvable CDI devices",
        "no CDI file describes that device any more: run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`",
    ),
    (
        r"no space left on device",
        "the Docker Engine's disk is full: `docker system df` shows what takes it, `docker image prune` frees some",
    ),
    (r"port is already allocated", "a replica cannot publish host ports: remove `ports` from the service"),
    (r"network \S+ not found", "`docker compose up` creates the project's networks"),
    (r"executable file not found", "correct the service's command or entrypoint"),
)


@contextlib.contextmanager
def translated(what: str, hints: Hints = ()) -> Iterator[None]:
    """Run calls of docker-py, or of aiohttp; `what` names them in the error: "start of replica shop-ranker-1a2b3c4d-1".
    `hints`: more of them.
    """
    try:
        yield
    except docker.errors.APIError as error:
        words = explanation(error)
        kind = EngineLeaderless if error.is_server_error() and re.search(LEADERLESS, words) else EngineError
        raise kind(refusal(what, words, hints)) from error
    except (requests.RequestException, docker.errors.DockerException, aiohttp.ClientError, OSError) as error:
        raise EngineUnreachable(
            f"{what}: the Docker Engine does not answer ({_root(error)}); check `docker info` on this machine and that "
            "its socket is mounted into the controller"
        ) from error


def explanation(error: docker.errors.APIError) -> str:
    """The engine's own message, on one line."""
    return " ".join(str(error.explanation or error).split())


def refusal(what: str, message: str, hints: Hints = ()) -> str:
    """The text of an EngineError, with a hint where one is known."""
    return f"{what} failed: the Docker Engine says: {with_hint(message, hints)}"


def with_hint(message: str, hints: Hints = ()) -> str:
    """The engine's message, and in brackets what to do, where that is known."""
    hint = next((hint for pattern, hint in (*_HINTS, *hints) if re.search(pattern, message)), "")
    return f"{message} ({hint})" if hint else message


def image_missing(spec: ServiceSpec) -> ImageNotFound:
    """The error for a replica whose image is not on this machine.

    An earlier version refers to its image by id: a removed image cannot be restored, as a build makes another id.
    """
    image = str(spec.container.get("Image", spec.image))
    if image != spec.image:
        return ImageNotFound(
            f"service {spec.name}: image {image}, which this version was made of, is not on this machine any more "
            f"(`docker image prune` removes such images), so this version cannot come back; `pierhead revisions "
            f"{spec.name}` lists others, `pierhead deploy {spec.name}` takes what files and images give now"
        )
    if spec.has_build:
        todo = f"build it with `docker compose build {spec.name}`"
    else:
        todo = f"check services.{spec.name}.image in the compose file, or fetch it with `docker pull {spec.image}`"
    return ImageNotFound(f"service {spec.name}: image {spec.image} is not on this machine; {todo}")


def _root(error: BaseException) -> str:
    """The operating system's reason inside requests' wrappers, else the outermost text."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return " ".join(str(error).split()) or type(error).__name__
