"""Builds the images of a stack, and sees to what they are built of."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import ControllerError, InvalidRequest
from . import resolved, stack_files
from .compose import Compose
from .programs import Told
from .stack import ProjectStack

_INPUTS = '. "$0" && printf "%s\\n%s\\n" "$(ca_bundle)" "$(wheel_directory)"'


class NotBuilt(ControllerError):
    """An image could not be built."""

    exit_code = 1


def build_images(stack: ProjectStack, warn: Callable[[str], None], *, has_apps: bool) -> None:
    """Build those of the files that are named; unless apps were chosen, also those of the files that run.

    Raises InvalidRequest, NotBuilt, Told.
    """
    see_to(stack, "engine.sh")
    see_to(stack, "base-images.sh")
    compose = with_inputs(Compose(stack))
    build(compose)
    controller = None if has_apps else stack.controller()
    if controller is None or stack.is_elsewhere(controller.directory):
        return
    running = stack.running_files(controller)
    if told := stack.difference(running):
        warn(told)
        build(compose.having(COMPOSE_FILE=running))


def see_to(stack: ProjectStack, script: str, *arguments: str) -> None:
    """Let a script of compose/machine install what this machine lacks. Raises Told if it could not."""
    words = (str(stack_files.machine_scripts() / script), *arguments)
    if status := stack.programs.call(*words, variables={}, directory=stack.root):
        raise Told(status)


def with_inputs(compose: Compose) -> Compose:
    """With this machine's own certificates and wheels for builds, where neither the shell nor .env names others."""
    stack = compose.stack
    host = str(stack_files.machine_scripts() / "host.sh")
    found = (*stack.programs.read("bash", "-c", _INPUTS, host).lines, "", "")
    # In a project the user's files and the stack's begin at different directories.
    none = "./wheels" if stack.project.is_clone else f"{stack.root}/{stack.own_directory}/wheels"
    return compose.having(
        PIERHEAD_CA_BUNDLE=stack.setting("PIERHEAD_CA_BUNDLE", found[0] or "./machine/no-ca.pem"),
        PIERHEAD_WHEELS=stack.setting("PIERHEAD_WHEELS", found[1] or none),
    )


def build(compose: Compose) -> None:
    """Build what the compose files have a `build` for. Raises InvalidRequest, NotBuilt."""
    _build_images_of_the_stack(compose)
    if not compose.step("Building the images", "--progress", "plain", "build"):
        raise NotBuilt(
            "an image could not be built; the lines above say which and why. Running services are not affected."
        )


def _build_images_of_the_stack(compose: Compose) -> None:
    """Compose builds in no order, so those that Dockerfiles begin with have to be there before."""
    stack, tag, services = compose.stack, compose.stack.image_tag, set[str]()
    for named in resolved.images_of_the_stack(compose.every_service()):
        image = f"{named.partition(':')[0]}:{tag}"
        if named == image or "$" in named:
            services.add(image.partition("/")[2].partition(":")[0])
        elif stack.programs.read("docker", "image", "inspect", named).status != 0:
            raise InvalidRequest(
                f"a Dockerfile of this project begins with {named}, or a service runs it. That is not on this machine, "
                f"and this tool makes\n{image}. "
                "Change that line, or install the tool of that version. Nothing was started."
            )
    if not services:
        return
    images = ", ".join(f"pierhead/{name}:{tag}" for name in sorted(services))
    words = ("--file", f"{stack.own_directory}/images.yaml", "--progress", "plain", "build", *sorted(services))
    # Compose labels an image with the project's name, and with another label it is a new version for every project.
    own = compose.having(PIERHEAD_TAG=tag, COMPOSE_PROJECT_NAME="pierhead-images")
    if not own.step(f"Building {images}", *words):
        raise NotBuilt(f"{images}: could not be built; the lines above say why. Running services are not affected.")
