"""The page of `x-serve`, made of compose/reference.yaml: one heading for each key, with its default and its comment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pierhead.serve_block import ServeBlock, Variable, all_keys

from controller.files.schema import compose_schema
from docs.generate.markdown import escape, type_in_words

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
PURPOSES = {
    "How many replicas": ("replicas", "autoscale", "max_replicas_per_node"),
    "Which requests it gets": (
        *("route", "host", "strip_prefix", "grpc_services", "application", "router", "protocol", "port", "listen"),
        *("auth", "allow", "streams_requests"),
    ),
    "Limits and timeouts": (
        *("max_ongoing_requests", "max_queued_requests", "backpressure", "request_timeout_s", "body_timeout_s"),
    ),
    "Start, health and end": (
        *("startup", "health", "graceful_shutdown_timeout_s", "graceful_shutdown_wait_loop_s", "stop_grace_period"),
        *("managed",),
    ),
    "New versions": ("rollout", "canary"),
    "GPUs and memory": ("gpu", "shared_memory"),
    "The service itself": ("user_config", "run_user_code_in_separate_thread", "llm", "scale"),
    "Logs and metrics": ("logging", "metrics", "debug"),
}
"""The keys at the top of a block, by purpose. A key that is not here stands at the end."""
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
    reference = (root / "compose" / "reference.yaml").read_text(encoding="utf-8")
    lines = [ABOUT, *_overview(reference)]
    service = ""
    for key in keys(reference):
        if key.service != service:
            service = key.service
            title, words = HEADINGS.get(service, (service, ""))
            lines.append(f"## {title}\n\n{words}\n")
        lines += _section(key)
    return "\n".join(lines)


def _overview(reference: str) -> Iterator[str]:
    """Yield a table of all keys by purpose, with their types."""
    yield "## By purpose\n"
    schema = compose_schema(reference)
    purpose_of = {name: purpose for purpose, names in PURPOSES.items() for name in names}
    order = list(purpose_of)
    rows: dict[str, list[str]] = {purpose: [] for purpose in (*PURPOSES, "Others")}
    for key in sorted(keys(reference), key=lambda key: order.index(key.path[0]) if key.path[0] in order else 0):
        if not key.is_told_above:
            name, (its_type, default) = ".".join(key.path), type_and_default(key.path, schema)
            rows[purpose_of.get(key.path[0], "Others")].append(f"| [`{name}`](#{name}) | {its_type} | {default} |")
    for purpose, listed in rows.items():
        if listed:
            yield "\n".join((f"**{purpose}**\n", "| key | type | default |\n|---|---|---|", *listed, ""))


def type_and_default(path: Sequence[str], schema: Mapping[str, Any]) -> tuple[str, str]:
    """Return a key's type and default in words: none for keys of Compose, and no default that is null."""
    found: Mapping[str, Any] = {"$ref": f"#/$defs/{ServeBlock.__name__}"}
    for name in path:
        block = schema["$defs"][found["$ref"].rpartition("/")[2]]
        if name not in block["properties"]:
            return "", ""
        found = block["properties"][name]
        for variant in found.get("anyOf", ()):
            if "$ref" in variant:
                found = variant
    if "$ref" in found:
        return "block", ""
    default = found.get("default")
    variants = [one for one in found.get("anyOf", [found]) if one.get("type") != "null"]
    types = " or ".join(type_in_words({**one, "default": None}) for one in variants)
    return types, "" if default is None else f"`{json.dumps(default)}`"


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
