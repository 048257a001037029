"""Removes a stack from this machine: by its compose files, then by the labels of what they do not name.

Its volumes (the controller's state, the data of Prometheus, Grafana and apps) and its images stay, unless the caller
asks for them. A stack of the same name that another directory started is left alone, unless the caller forces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import ControllerError, InvalidRequest
from .stack import ProjectStack


class NotRemoved(ControllerError):
    """Something of the stack could not be removed."""

    exit_code = 1


def down(stack: ProjectStack, warn: Callable[[str], None], *, volumes: bool, force: bool, images: bool) -> None:
    """Remove it; where nothing runs, nothing happens. Raises InvalidRequest before anything is removed; NotRemoved."""
    if stack.programs.read("docker", "info").status != 0:
        raise InvalidRequest(
            "the Docker Engine does not answer, and what is left of the stack cannot be seen. Start it with: "
            f"{stack.typed('machine', 'up')}"
        )
    flags = [flag for flag, wanted in {"--volumes": volumes, "--force": force}.items() if wanted]
    if program := stack.engine.program("down", *flags):
        if stack.programs.call(*program, variables={}):
            raise _not_removed(stack)
        return
    if not force:
        _refuse_another_directorys(stack)
    _compose_down(stack, ["--volumes"] if volumes else [], warn)
    _remove_leftovers(stack)
    if volumes:
        _remove_volumes(stack)
    if images:
        _remove_images(stack)


def _refuse_another_directorys(stack: ProjectStack) -> None:
    """Also one that is stopped: its containers, and what they write, belong to the directory it was started from."""
    if place := stack.of_another("--all"):
        kind = stack.kind
        raise InvalidRequest(
            f'the stack named "{stack.name}" is another {kind}\'s: {place}. Nothing was removed.\n'
            f"Remove it there: cd {place} && {stack.typed('down')}; where that {kind} is gone, here: "
            f"{stack.typed('down FORCE=1', 'down --force')}.\n"
            f"A stack of this {kind}'s own needs a name of its own (COMPOSE_PROJECT_NAME in .env)."
        )


def _compose_down(stack: ProjectStack, options: Sequence[str], warn: Callable[[str], None]) -> None:
    """With a user's file broken the stack can still be removed: by its own file and by labels."""
    files = {"COMPOSE_FILE": stack.files}
    can_read = stack.programs.read("docker", "compose", "config", "--quiet", variables=files, directory=stack.root)
    if can_read.status != 0:
        warn(
            f"Compose cannot read {stack.files.replace(':', ', ')}: removing what carries the project's label instead."
        )
        files = {"COMPOSE_FILE": f"{stack.own_directory}/compose.yaml", "COMPOSE_PROJECT_NAME": stack.name}
    # Not with --remove-orphans: Compose and the controller would remove the same replicas at the same time.
    words = ("docker", "compose", "--progress", "plain", "down", *options)
    if not stack.programs.step("Stopping and removing the stack", *words, variables=files, directory=stack.root):
        raise _not_removed(stack)


def _not_removed(stack: ProjectStack) -> NotRemoved:
    return NotRemoved(
        f"the stack was not removed; the lines above say why. Fix that, then run `{stack.typed('down')}` again."
    )


def _remove_leftovers(stack: ProjectStack) -> None:
    """A controller that was killed in the middle, or had no time, leaves replicas that Compose does not know."""
    left = _listed(stack, "ps", "--all", "--quiet")
    _remove(stack, "what was left", ["rm", "--force", "--volumes"], left, "not everything was removed")
    for network in _listed(stack, "network", "ls", "--quiet"):
        stack.programs.read("docker", "network", "rm", network)


def _remove_volumes(stack: ProjectStack) -> None:
    """Compose removes the volumes of the files that it reads; an app of an earlier `up` is not among them.

    A volume that was made elsewhere (external: true) does not carry the label.
    """
    left, again = _listed(stack, "volume", "ls", "--quiet"), stack.typed("down VOLUMES=1", "down --volumes")
    _remove(stack, "its other volumes", ["volume", "rm"], left, "not every volume was removed", again)


def _remove_images(stack: ProjectStack) -> None:
    """Those that Compose has named after project and service, and those that later builds have left without a name."""
    form, name = "{{.Repository}}:{{.Tag}}", f"reference={stack.name}-*"
    left = _listed(stack, "image", "ls", "--format", form, "--filter", name)
    left += _listed(stack, "image", "ls", "--quiet", "--filter", "dangling=true")
    _remove(stack, "its images", ["image", "rm", "--force"], left, "not every image was removed")


def _listed(stack: ProjectStack, *words: str) -> list[str]:
    """What a command of Docker's lists of the stack. Raises NotRemoved where it fails."""
    of_ours = f"label=com.docker.compose.project={stack.name}"
    listed = stack.programs.read("docker", *words, "--filter", of_ours)
    if listed.status:
        command = " ".join(("docker", *words))
        raise NotRemoved(
            f"something of the stack may be left: `{command}` failed ({listed.reason}). Repeat the command when "
            f"`{command}` works."
        )
    return listed.lines


def _remove(
    stack: ProjectStack, what: str, words: Sequence[str], left: Sequence[str], wrong: str, again: str = ""
) -> None:
    removing = ("docker", *words, *left)
    if left and not stack.programs.step(f"Removing {what}", *removing, variables={}, directory=stack.root):
        raise NotRemoved(
            f"{wrong}; the lines above say why. Fix that, then run `{again or stack.typed('down')}` again."
        )
