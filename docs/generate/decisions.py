"""The list of decisions, made of the titles of the pages in docs/decisions/."""

from __future__ import annotations

from pathlib import Path

ABOUT = """\
# Decisions

Each page is one decision that a reader may want to undo, with its reason. Change a decision only with a better
reason, and change its page with it.
"""


def page(root: Path) -> str:
    """Return the pages by area, which is the first word of a file's name (`control-...`, `edge-...`)."""
    lines = [ABOUT]
    area = ""
    for path in sorted((root / "docs" / "decisions").glob("*.md")):
        title = path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")
        if (first := path.stem.split("-", 1)[0]) != area:
            area = first
            lines.append(f"\n## {area.capitalize()}\n")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"
