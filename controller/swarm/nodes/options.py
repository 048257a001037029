"""What a user types after `pierhead node`: init, join or token, with options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...errors import InvalidRequest


@dataclass(frozen=True)
class NodeOptions:
    """Of init, join and token, by their names."""

    advertise_addr: str = ""
    """The address that the other machines reach this one at, where it has several."""
    gpus: str = ""
    """UUIDs in place of what nvidia-smi lists, with commas; or "none"."""
    registry: str = ""
    """host:port of a registry without TLS, as PIERHEAD_REGISTRY=here runs one."""
    address_pool: str = ""
    """Where overlay networks get their addresses from."""
    restart: bool = False
    """The engine may be restarted although containers run."""
    manager: bool = False
    """The command is for a new manager."""


def read(words: Sequence[str]) -> tuple[list[str], NodeOptions]:
    """The command with its arguments, and its options. Raises InvalidRequest."""
    known = {f"--{one.name.replace('_', '-')}": one for one in fields(NodeOptions)}
    plain, given, left = list[str](), dict[str, Any](), iter(words)
    for word in left:
        if word in known:
            given[known[word].name] = known[word].default is False or next(left, "")
            if not given[known[word].name]:
                raise InvalidRequest(f"node: {word} needs a value.")
        elif word.startswith("-"):
            raise InvalidRequest(f"node: there is no option {word}.")
        else:
            plain.append(word)
    return plain, NodeOptions(**given)
