"""The secrets and configs that compose files take from files, as secrets and configs of Swarm. Pure.

Other nodes do not have the files. Their content cannot change in Swarm, so each content has a name of its own, and a
changed file is a new version of the services that have it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ..names import LONGEST_NAME

KINDS = ("secrets", "configs")
_DIGITS = 12

Place = tuple[str, str]
"""Kind ("secrets", "configs") and the key in that section of the compose files."""


def in_swarm(config: Mapping[str, Any], contents: Mapping[Place, bytes]) -> tuple[dict[str, Any], dict[Place, bytes]]:
    """The compose files with names of Swarm in place of the files, and (kind, name) -> content of what has to be there.

    `contents`: of each secret and config that is not in Swarm yet.
    """
    named: dict[str, Any] = {**config, **{kind: {**config[kind]} for kind in KINDS if config.get(kind)}}
    wanted = {}
    for kind in KINDS:
        for key, definition in (config.get(kind) or {}).items():
            content = contents.get((kind, str(key)))
            if content is not None:
                digits = hashlib.sha256(content).hexdigest()[:_DIGITS]
                name = f"{str(definition.get('name', key))[: LONGEST_NAME - _DIGITS - 1]}-{digits}"
                named[kind][key] = {"name": name, "external": True}
                wanted[kind, name] = content
    return named, wanted
