"""Brings a running project up to date after an edit, without bake time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import ControllerError
from .compose import Compose
from .images import with_inputs
from .stack import ProjectStack


class NotUpdated(ControllerError):
    """A service of the project is not up to date."""

    exit_code = 1


@dataclass(frozen=True)
class Edited:
    """Services whose images have other files: `built` have a build; of those that run such an image, `managed` are
    rolled out, and Compose starts `others` again.
    """

    built: Sequence[str]
    managed: Sequence[str]
    others: Sequence[str]


def update(stack: ProjectStack, edited: Edited | None) -> None:
    """Carry it out; None: roll out what files and images say now. Raises NotUpdated."""
    compose = with_inputs(Compose(stack))
    if edited and edited.built:
        done = compose.step(f"Building {' '.join(edited.built)}", "--progress", "plain", "build", *edited.built)
        _require(done, "it could not be built")
    if edited and edited.others:
        words = ("--progress", "plain", "up", "--detach", "--no-build", "--no-deps", *edited.others)
        _require(compose.step(f"Starting {' '.join(edited.others)}", *words), "it did not start")
    if edited is None or edited.managed:
        names = edited.managed if edited else ()
        text = f"Rolling out {' '.join(names) or 'what changed'}"
        words = (*stack.command, "deploy", "--now", *names)
        done = stack.programs.step(text, *words, variables=compose.own, directory=stack.root)
        _require(done, "it was not rolled out")


def _require(done: bool, otherwise: str) -> None:
    if not done:
        raise NotUpdated(f"{otherwise}; the lines above say why.")
