"""Reads YAML as Compose does: by the core schema of YAML 1.2, where `1e+06` is a number and `=`, `<<`, `on` are text.

PyYAML follows YAML 1.1: it would turn dates into objects and fail on a bare `=`. `docker compose config` prints both.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    _SafeLoader = yaml.SafeLoader
else:
    # libyaml's parser, where PyYAML was built with it: ten times faster, with the same result.
    _SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_TAG = "tag:yaml.org,2002:"
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]{0,30})", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+0123456789.")),
)


class ResolvedLoader(_SafeLoader):
    """For the output of Compose: no tags, no merge keys, no dates."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as PyYAML declares it


for _name, _pattern, _first in _SCALARS:
    ResolvedLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)


class WrittenLoader(ResolvedLoader):
    """For the files as the user wrote them: with merge keys, and Compose's tags (`!reset`, `!override`) are dropped."""


def _without_tag(loader: Any, _suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(node)


WrittenLoader.add_implicit_resolver(_TAG + "merge", re.compile(r"<<\Z"), ["<"])
WrittenLoader.add_multi_constructor("!", _without_tag)


def load_resolved(text: str) -> Any:
    """The value that `docker compose config` printed. Raises yaml.YAMLError.

    Compose doubles every "$" of its output, so that the output can be read as a compose file again.
    """
    return _load(text.replace("$$", "$"), ResolvedLoader)


def load_written(text: str) -> Any:
    """The value of one compose file as written, without variables or includes resolved. Raises yaml.YAMLError."""
    return _load(text, WrittenLoader)


def nodes_of(text: str) -> yaml.Node | None:
    """One compose file as written, with the place of each key; None = it is empty. Raises yaml.YAMLError."""
    return yaml.compose(text, Loader=WrittenLoader)


def _load(text: str, loader: type[ResolvedLoader]) -> Any:
    try:
        return yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader by inheritance
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:
        # PyYAML trusts tags and raises other errors for a value that does not fit: `!!bool maybe`, `!!timestamp hello`.
        raise yaml.YAMLError(f"a value is not what its tag says ({type(error).__name__}: {error})") from error
