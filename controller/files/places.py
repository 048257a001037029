"""Finds where in the compose files the key of a problem is written: `docker compose config` keeps no lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from .problems import at
from .yaml import nodes_of

SERVICE = 2
"""Keys of a path that at least must be found: services, and the service."""


def with_places(problems: Sequence[str], files: Sequence[Path], project_dir: Path) -> list[str]:
    """The problems, each with " (file:line)" of its key, or of what its key would be in. Of several files the last one
    counts: it overrides the others.
    """
    trees = [(file, tree) for file in files if (tree := _tree_of(file)) is not None]
    return [_with_place(problem, trees, project_dir) for problem in problems]


def _with_place(problem: str, trees: Sequence[tuple[Path, yaml.Node]], project_dir: Path) -> str:
    found = [(*_deepest(tree, problem, 0), number) for number, (_, tree) in enumerate(trees)]
    depth, line, number = max(found, key=lambda one: (one[0], one[2]), default=(0, 0, 0))
    if depth < SERVICE:
        return problem
    file = trees[number][0]
    name = file.relative_to(project_dir) if file.is_relative_to(project_dir) else file
    return f"{problem} ({name}:{line})"


def _tree_of(file: Path) -> yaml.Node | None:
    try:
        return nodes_of(file.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


def _deepest(node: yaml.Node, path: str, line: int) -> tuple[int, int]:
    """How many keys of the path that the text begins with are in the node, and the line of the last one."""
    best = 0, line
    for name, key_line, value in _items(node):
        rest = path.removeprefix(name)
        if rest != path and rest.startswith((".", "[", ": ")):
            depth, found = _deepest(value, rest.removeprefix("."), key_line)
            best = max(best, (depth + 1, found))
    return best


def _items(node: yaml.Node) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield a node's keys, as paths have them, with their lines and values."""
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield at("", number), item.start_mark.line + 1, item
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == "<<":
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    yield from _items(merged)
            else:
                yield at("", str(key.value)), key.start_mark.line + 1, value
