"""The page of `x-serve`, made of compose/reference.yaml: one heading for each key, with its default and its comment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pierhead.serve_block import ServeBlock, Variable, all_keys

from docs.generate.markdown import escape

ABOUT = """\
# x-serve

Every key of an `x-serve` block: its meaning, and the value it has when it is left out (`null` = derived by the rule
next to it). A key that is not here is an error, and so is a wrong value: nothing changes, and the message names path,
expectation and finding. `pierhead validate` checks files; [an editor completes
them](../how-to/run-the-stack.md#complete-and-check-compose-files-in-an-editor).

Around the block everything is Compose's own: image, build, command, environment, volumes, secrets, configs, networks,
healthcheck, ulimits, deploy.resources. Keys that would tie a service to a single container are errors that say what
to write instead: ports, container_name, hostname, network_mode, fixed addresses.
"""
HEADINGS = {
    "reference": ("Every service", "The block itself, and two keys of Compose around it."),
    "autoscaled": ("Autoscaling", "Keys of `autoscale`, in place of `replicas`."),
    "gpu-slots": ("GPUs", "Keys of `gpu`."),
    "gpu-turns": ("GPUs by turns", "Keys of `gpu.yields`."),
    "large-tensors": ("Large tensors", "Keys of `shared_memory`."),
    "language-model": ("Language models", "Keys of `llm`."),
}
OUTSIDE = 4
"""Columns before a key of a service; those of the block are further in."""
BLOCK = "x-serve"
REPLACES = {
    key.path: "A change replaces the replicas of a service that is built on the runtime."
    if key.get(Variable)
    else "A change replaces the replicas."
    for key in all_keys(ServeBlock)
    if key.needs_new_container
}
"""What a change of a key costs, where it needs new containers."""
_KEY = re.compile(r"( *)([a-z_-]+):(?: (.*))?")


@dataclass(frozen=True)
class Key:
    """One key: where it stands, its default ("" = it has keys of its own) and the comment above it."""

    service: str
    path: tuple[str, ...]
    default: str
    comment: tuple[str, ...]
    is_told_above: bool
    """Whether an earlier section has it: here it only begins the section of its own keys."""


def page(root: Path) -> str:
    """Return the whole page."""
    lines = [ABOUT]
    service = ""
    for key in keys((root / "compose" / "reference.yaml").read_text(encoding="utf-8")):
        if key.service != service:
            service = key.service
            title, words = HEADINGS.get(service, (service, ""))
            lines.append(f"## {title}\n\n{words}\n")
        lines += _section(key)
    return "\n".join(lines)


def keys(reference: str) -> Iterator[Key]:
    """Yield the keys of every service that have a comment, in the file's order."""
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    told: set[tuple[str, ...]] = set()
    for line in reference.splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment.append(text[1:].removeprefix(" "))
            continue
        found = _KEY.fullmatch(line)
        if found:
            indent = len(found[1])
            parents = [parent for parent in parents if parent[0] < indent]
            path = [name for _, name in parents] + [found[2]]
            if len(path) > 2 and path[0] == "services" and comment and path[-1] != BLOCK:
                inside = tuple(name for name in path[2:] if name != BLOCK)
                yield Key(path[1], inside, found[3] or "", tuple(comment), inside in told)
                told.add(inside)
            parents.append((indent, found[2]))
        comment = []


def _section(key: Key) -> Iterator[str]:
    if key.is_told_above:
        yield from _text(key.comment)
        return
    name = ".".join(key.path)
    yield f"### {name} {{ #{name} }}\n"
    if key.default and key.default != "null":
        yield f"`{key.path[-1]}: {key.default}`\n"
    yield from _text(key.comment)
    if name in REPLACES:
        yield f"{REPLACES[name]}\n"


def _text(comment: tuple[str, ...]) -> Iterator[str]:
    """Yield the comment as Markdown: what is indented in it is YAML."""
    code: list[str] = []
    for line in (*comment, ""):
        if line.startswith("  "):
            code.append(line[2:])
            continue
        if code:
            yield "\n```yaml\n" + "\n".join(code) + "\n```\n"
            code = []
        yield escape(line)
