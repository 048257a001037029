"""Shell completion. Without an answer of the controller there are no completions, and no message."""

from __future__ import annotations

import typer

from .client import ControllerClient, service_path
from .errors import CommandError

ANSWER_WITHIN_S = 1.0
SHELLS = ("bash", "zsh", "fish")


def services(incomplete: str) -> list[str]:
    """Return the service names that begin with `incomplete`."""
    return _offered("/api/v1/services", "services", "name", incomplete)


def versions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the versions of the service named earlier in the command line, newest first."""
    service = _named_earlier(ctx)
    return _offered(service_path(service, "revisions"), "revisions", "version", incomplete) if service else []


def replicas(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the replicas of the service named earlier in the command line."""
    service = _named_earlier(ctx)
    return _offered(service_path(service), "replicas", "name", incomplete) if service else []


def kinds(incomplete: str) -> list[str]:
    """Return the kinds of all kept events."""
    return sorted(set(_offered("/api/v1/events?limit=1000", "events", "kind", incomplete)))


def keys(incomplete: str) -> list[str]:
    """Return the names of the keys that begin with `incomplete`."""
    return _offered("/api/v1/keys", "keys", "name", incomplete)


def nodes(incomplete: str) -> list[str]:
    """Return the names of the nodes that begin with `incomplete`."""
    return _offered("/api/v1/nodes", "nodes", "name", incomplete)


def _named_earlier(ctx: typer.Context) -> str:
    """The service; "" = not yet. While an option's value is incomplete, the command's arguments are not parsed yet."""
    return str(ctx.params.get("service") or next(iter(ctx.args), ""))


def _offered(path: str, listed: str, key: str, incomplete: str) -> list[str]:
    try:
        entries = ControllerClient.from_environment(ANSWER_WITHIN_S).get(path)[listed]
        return [entry[key] for entry in entries if entry[key].startswith(incomplete)]
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
