"""The page of settings: the variables of .env with their comments, and a replica's environment."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from pierhead import Settings
from pierhead.serve_block import variables as serve_variables

from docs.generate.markdown import cell

ABOUT = """\
# Settings

## Of the stack

`.env`, in the directory of [a project](../how-to/own-repository.md) or in the clone's root, holds what
`docker compose`, typed there, starts by default. A variable set in the shell wins over its line in the file. The
controller reads the file too, so variables that an app's compose file interpolates belong there.

| variable | default | meaning |
|---|---|---|
"""
REPLICA = """
## Of a replica

The controller sets these variables in the containers of services that are built on the runtime. Without a controller
all of them are optional. A bad value stops the start with exit code 2, and the message names it.
"""
_VARIABLE = re.compile(r"(?:# )?([A-Z][A-Z_]+)=(.*)")


def page(root: Path) -> str:
    """Return the whole page."""
    rows = [
        f"| `{name}` | {f'`{default}`' if default else ''} | {cell(words)} |"
        for name, default, words in variables((root / ".env").read_text(encoding="utf-8"))
    ]
    return ABOUT + "\n".join(rows) + "\n" + REPLICA + "\n" + "\n".join(replica()) + "\n"


def variables(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, default ("" where the line is commented out) and comment of each variable."""
    comment: list[str] = []
    for line in text.splitlines():
        if found := _VARIABLE.fullmatch(line):
            yield found[1], "" if line.startswith("#") else found[2], " ".join(comment)
            comment = []
        elif line.startswith("#"):
            comment.append(line.lstrip("# "))
        else:
            comment = []


def replica() -> list[str]:
    """The table of a replica's variables: the one in Settings, and the variables of further keys of x-serve."""
    table = [line for line in (inspect.getdoc(Settings) or "").splitlines() if line.startswith("|")]
    text = "\n".join(table)
    further = [f"| {name} | `x-serve.{key.path}` |" for name, key in serve_variables().items() if name not in text]
    return [line.replace("<", "&lt;") for line in (*table, *further)]
