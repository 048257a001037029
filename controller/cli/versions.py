"""Compares the builds of the command, the clone, and a controller on another machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..build import PACKAGE, build_of
from .client import Client
from .errors import CommandError


def stale_words(environment: Mapping[str, str], installed: Path = PACKAGE) -> str:
    """A one-line warning that the image's code differs from the clone's; "" where it does not, or cannot be compared.

    The clone is the project's directory, mounted into the controller's container at its own path. A project of the
    user's own has the stack's files in .pierhead/. The installed tool, PIERHEAD_PROGRAM, compares itself (tool.py).
    """
    if not (project := environment.get("PIERHEAD_PROJECT_DIR")) or environment.get("PIERHEAD_PROGRAM"):
        return ""
    is_clone = not (Path(project) / ".pierhead" / "controller").is_dir()
    checkout = Path(project) / "controller" if is_clone else Path(project) / ".pierhead" / "controller"
    # Another project may have a directory of that name; Pierhead's has this file.
    if not (checkout / "cli" / "versions.py").is_file() or checkout.resolve() == installed:
        return ""
    try:
        ours, theirs = build_of(installed), build_of(checkout)
    except OSError:  # a file was removed during the comparison; the next command compares again
        return ""
    if ours == theirs:
        return ""
    if not is_clone:
        return (
            f"pierhead: the controller's image is of other code than .pierhead/ (build {ours}, there {theirs}); "
            "`pierhead up` builds and starts what is there"
        )
    return (
        f"pierhead: the controller's image is of other code than this clone (build {ours}, the clone's is {theirs}); "
        "`make up` builds and starts the clone's, `make build` only builds it"
    )


def mismatch(error: Exception) -> CommandError | None:
    """The error for an answer that lacks a member because the controller is of another build; None if it is not."""
    try:
        info = Client.from_environment().get("/api/v1/openapi.json")["info"]
    except (CommandError, KeyError):
        return None
    ours, theirs = build_of(), info.get("x-build", "unknown")
    if ours == theirs:
        return None
    return CommandError(
        f"the controller is of another build ({theirs}) than this command ({ours}), which cannot read its answer "
        f"({type(error).__name__}: {error}); bring both to the same version, or run `pierhead` on the controller's "
        "machine"
    )
