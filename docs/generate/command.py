"""The page of the command `pierhead`, made of its own help, and the list of make targets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from controller.tool.app import app
from controller.tool.errors import EXIT_CODES
from docs.generate.markdown import cell, escape

ABOUT = """\
# The command

`pierhead COMMAND` in a [project's directory](../how-to/own-repository.md) or below it; `./pierhead COMMAND` in the
clone, or from anywhere ([how](../how-to/run-the-stack.md#in-a-clone-of-pierhead)). Commands that print take
`-o json`; events, logs and `status --watch` then print one document a line. `--timeout` bounds every wait. Ctrl-C ends
a wait, and the requested change continues. Colours and bars are for terminals only (and not with `NO_COLOR`);
elsewhere a row of a table is one line.
"""


def page(root: Path) -> str:
    """Return the whole page."""
    lines = [ABOUT, "## Exit codes\n", "| exit code | meaning |", "|---|---|"]
    lines += [f"| {code} | {words} |" for code, words in EXIT_CODES.items()]
    lines += ["", "## Commands\n"]
    for name, command in sorted(_commands(typer.main.get_command(app))):
        lines += _section(name, command)
    lines += ["## Make targets\n", "| target | what it does |", "|---|---|"]
    lines += [f"| `make {target}` | {cell(words)} |" for target, words in _targets(root / "Makefile")]
    return "\n".join(lines) + "\n"


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        elif not command.hidden:
            yield f"{prefix}{name}", command


def _section(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([f"pierhead {name}", *command.collect_usage_pieces(context)]).translate(
        {ord("{"): None, ord("}"): None}
    )
    yield f"### {name}\n"
    yield f"```\n{usage}\n```\n"
    yield _text(command.help or "")
    rows = [row for parameter in command.get_params(context) if (row := parameter.get_help_record(context))]
    rows = [(option, words) for option, words in rows if "--help" not in option]
    if rows:
        yield "| | |\n|---|---|"
        for option, words in rows:
            yield f"| `{option.replace('|', chr(92) + '|')}` | {cell(words)} |"
        yield ""


def _text(help_text: str) -> str:
    """Return a command's help as Markdown: paragraphs that click keeps as they are ("\\b") become code blocks."""
    paragraphs = []
    for paragraph in help_text.strip().split("\n\n"):
        kept = paragraph.removeprefix("\b\n")
        paragraphs.append(f"```\n{kept}\n```" if kept != paragraph else escape(" ".join(kept.split())))
    return "\n\n".join(paragraphs) + "\n"


def _targets(makefile: Path) -> list[tuple[str, str]]:
    text = makefile.read_text(encoding="utf-8")
    return re.findall(r"^([a-z-]+):.*?## (.*)$", text, re.MULTILINE)
