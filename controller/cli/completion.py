"""Shell completion. Without an answer of the controller there are no completions, and no message."""

from __future__ import annotations

import typer

from .client import Client, service_path
from .errors import CommandError

ANSWER_WITHIN_S = 1.0
SHELLS = ("bash", "zsh", "fish")


def services(incomplete: str) -> list[str]:
    """Return the service names that begin with `incomplete`."""
    try:
        document = Client.from_environment(ANSWER_WITHIN_S).get("/api/v1/services")
        return [row["name"] for row in document["services"] if row["name"].startswith(incomplete)]
    except (CommandError, KeyError, TypeError):
        return []


def versions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the versions of the service named earlier in the command line, newest first."""
    # While the option's value is incomplete, the command's arguments are not parsed yet.
    service = ctx.params.get("service") or next(iter(ctx.args), "")
    if not service:
        return []
    try:
        document = Client.from_environment(ANSWER_WITHIN_S).get(service_path(service, "revisions"))
        return [entry["version"] for entry in document["revisions"] if entry["version"].startswith(incomplete)]
    except (CommandError, KeyError, TypeError):
        return []


def kinds(incomplete: str) -> list[str]:
    """Return the kinds of all kept events."""
    try:
        document = Client.from_environment(ANSWER_WITHIN_S).get("/api/v1/events", {"limit": "1000"})
        return sorted({event["kind"] for event in document["events"] if event["kind"].startswith(incomplete)})
    except (CommandError, KeyError, TypeError):
        return []


def forms() -> list[str]:
    """Return the values of `-o`."""
    return ["text", "json"]


def shells() -> list[str]:
    """Return the supported shells."""
    return list(SHELLS)


def script(shell: str) -> str:
    """Return the completion script of a shell in SHELLS."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # it is imported there

    return get_completion_script(prog_name="pierhead", complete_var="_PIERHEAD_COMPLETE", shell=shell)


def serve_the_shell() -> None:
    """Let typer answer a completion request (`_PIERHEAD_COMPLETE`); by default it does so only with its own options."""
    from typer.completion import completion_init  # type: ignore[attr-defined]  # it is imported there

    completion_init()
