"""The help of the command itself: its commands in groups, each with its whole summary."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import typer
from typer.core import TyperGroup

GROUPS: Final = {
    "A project": ("new", "init", "up", "down", "upgrade", "backup", "restore"),
    "An application's code": ("dev", "build", "serve", "proto", "contract", "import-ray"),
    "What runs": (
        *("status", "why", "logs", "exec", "events", "audit", "gpus", "nodes", "routes", "revisions", "plan"),
        *("console", "bundle"),
    ),
    "Changes": (
        *("scale", "deploy", "promote", "abort", "rollback", "restart", "wait-ready"),
        *("mark", "unmark", "node", "llm", "keys", "silence"),
    ),
    "Files and tools": ("validate", "schema", "simulate", "token", "completion"),
}
"""By heading."""


class Grouped(TyperGroup):
    """The command with all its commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """See click."""
        has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for heading, names in GROUPS.items():
            rows = [(name, self.commands[name].get_short_help_str(sys.maxsize)) for name in names]
            if has_colour:
                rows = [(typer.style(name, fg="cyan"), words) for name, words in rows]
            with formatter.section(typer.style(heading, bold=True) if has_colour else heading):
                formatter.write_dl(rows)
