"""The list of decisions, made of the titles of the pages in docs/decisions/."""

from __future__ import annotations

from pathlib import Path

ABOUT = """\
# Decisions

Each page is one decision that a reader may want to undo, with its reason. Change a decision only with a better
reason, and change its page with it.
"""


AREAS = {
    "controller": "Controller",
    "rollout": "Rollouts",
    "gpu": "GPUs",
    "edge": "HAProxy and metrics",
    "swarm": "Docker Swarm",
    "triton": "Triton",
    "runtime": "Runtime",
    "routing": "Routing of calls",
    "llm": "Language models",
    "tool": "The tool",
    "bench": "Bench",
}
"""The first word of a page's file name, and what it stands for."""


def page(root: Path) -> str:
    """Return the pages by area."""
    lines = [ABOUT]
    for area, title in AREAS.items():
        lines.append(f"\n## {title}\n")
        lines += [
            f"- [{_title(path)}]({path.name})" for path in sorted((root / "docs" / "decisions").glob(f"{area}-*"))
        ]
    return "\n".join(lines) + "\n"


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")
