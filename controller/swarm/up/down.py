"""`make down` on a Swarm: replicas first, then the stack, and what Swarm keeps for it. Blocking.

Everything is found by labels and names, so neither the compose files nor a complete stack are needed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import docker.errors

from ...errors import EngineError
from ..names import STACK_LABEL, Json
from .settings import StackSettings
from .swarm_calls import Swarm, wait
from .up import refuse_another_clone
from .volumes import remove_volumes

GONE_S = 120.0
"""Longest wait for containers to end: replicas finish their requests."""


def down(swarm: Swarm, settings: StackSettings, say: Callable[[str], None]) -> None:
    """Remove the stack. Raises InvalidRequest for another clone's; EngineError for what is left."""
    refuse_another_clone(swarm, settings)
    began = time.monotonic()
    stack = swarm.stack()
    controller = [one for one in stack if one["Spec"]["Name"] == f"{settings.project}_controller"]
    swarm.remove_services(controller)  # it would start replicas again
    wait(lambda: not swarm.left(controller), "the controller ends", GONE_S)
    while replicas := swarm.replicas():
        say(f"Removing {len(replicas)} replicas ...")
        swarm.remove_services(replicas)
        wait(lambda here=replicas: not swarm.left(here), "the replicas end", GONE_S)  # type: ignore[misc]
    if stack:
        say("Removing the stack's services ...")
    swarm.remove_services(stack)
    wait(lambda: not swarm.left(stack), "the stack's services end", GONE_S)
    if settings.has_volumes:
        _remove_volumes(swarm, stack, say)
    _remove_kept(swarm, settings.project)
    remove_network = swarm.client.remove_network
    wait(
        lambda: _none_is_left(swarm.networks, lambda one: remove_network(one["Id"])), "the networks are removed", GONE_S
    )
    but = "" if settings.has_volumes else " but its volumes"
    say(f"Nothing is left of {settings.project} on the Swarm{but} ({time.monotonic() - began:.0f} s).")


def _remove_volumes(swarm: Swarm, stack: Iterable[Json], say: Callable[[str], None]) -> None:
    """On every node, by the image of HAProxy from the stack that was just removed; on this one alone without it."""
    edges = (one for one in stack if one["Spec"]["Name"] == f"{swarm.project}_haproxy")
    image = next((one["Spec"]["TaskTemplate"]["ContainerSpec"]["Image"] for one in edges), "")
    if image:
        say("Removing its volumes on every node ...")
        remove_volumes(swarm, image)
        return
    label = f"{STACK_LABEL}={swarm.project}"
    volumes = lambda: swarm.client.volumes({"label": label})["Volumes"] or ()  # noqa: E731
    remove = swarm.client.remove_volume
    wait(lambda: _none_is_left(volumes, lambda one: remove(one["Name"])), "the volumes are removed", GONE_S)
    shown = f"`docker volume ls --filter label={label}`"
    say(f"No HAProxy ran, whose image removes volumes on other nodes: {shown} shows what a node has.")


def _remove_kept(swarm: Swarm, project: str) -> None:
    """Secrets and configs, those of the state and the compose files among them."""
    swarm.drop("secrets", swarm.kept("secrets"))
    names = [str(one["Spec"]["Name"]) for one in swarm.client.configs()]  # type: ignore[no-untyped-call]
    documents = [name for name in names if name.startswith(f"{project}_pierhead-")]
    swarm.drop("configs", [*swarm.kept("configs"), *documents])
    if left := [*swarm.kept("secrets"), *swarm.kept("configs")]:
        raise EngineError(f"Swarm keeps {', '.join(left)}: a service of another stack may use them")


def _none_is_left(listed: Callable[[], Iterable[Json]], remove: Callable[[Json], object]) -> bool:
    """Remove what is listed. What a container had that has just ended is busy for a moment yet."""
    for one in listed():
        with contextlib.suppress(docker.errors.APIError):
            remove(one)
    return not listed()
