"""What the shell is offered for a half-typed word. Silent: where the controller does not answer, nothing is offered."""

from __future__ import annotations

import typer

from .client import Client, service_path
from .errors import CommandError

ANSWER_WITHIN_S = 1.0
SHELLS = ("bash", "zsh", "fish")


def services(incomplete: str) -> list[str]:
    """Return the names of services that begin so."""
    try:
        document = Client.from_environment(ANSWER_WITHIN_S).get("/api/v1/services")
        return [row["name"] for row in document["services"] if row["name"].startswith(incomplete)]
    except (CommandError, KeyError, TypeError):
        return []


def versions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the versions of the service that is named before, newest first."""
    # While the option's value is missing, its command's arguments are not read yet.
    service = ctx.params.get("service") or next(iter(ctx.args), "")
    if not service:
        return []
    try:
        document = Client.from_environment(ANSWER_WITHIN_S).get(service_path(service, "revisions"))
        return [entry["version"] for entry in document["revisions"] if entry["version"].startswith(incomplete)]
    except (CommandError, KeyError, TypeError):
        return []


def kinds(incomplete: str) -> list[str]:
    """Return the kinds of the events that are kept."""
    try:
        document = Client.from_environment(ANSWER_WITHIN_S).get("/api/v1/events", {"limit": "1000"})
        return sorted({event["kind"] for event in document["events"] if event["kind"].startswith(incomplete)})
    except (CommandError, KeyError, TypeError):
        return []


def forms() -> list[str]:
    """Return what `-o` takes."""
    return ["text", "json"]


def shells() -> list[str]:
    """Return the shells that there is a script for."""
    return list(SHELLS)


def script(shell: str) -> str:
    """Return the script that teaches a shell of SHELLS to ask this command."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # it is imported there

    return get_completion_script(prog_name="pierhead", complete_var="_PIERHEAD_COMPLETE", shell=shell)


def serve_the_shell() -> None:
    """Let typer answer a shell's question (`_PIERHEAD_COMPLETE`), which it else does only with options of its own."""
    from typer.completion import completion_init  # type: ignore[attr-defined]  # it is imported there

    completion_init()
