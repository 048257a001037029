"""The resolved compose files that a command has stored, where the files themselves are on another machine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import yaml

from ...errors import ControllerError, SpecError
from ...files.parse import parse
from ...files.yaml import load_resolved
from ...model.spec import Spec
from ..state.text import KeptText
from .dialect import DIALECTS


class KeptProject:
    """See `SpecSource`."""

    def __init__(self, project: str, text: KeptText) -> None:
        self._project = project
        self._text = text

    async def fingerprint(self) -> Hashable:
        """See `SpecSource.fingerprint`."""
        return await self._text.edition()

    async def load(self) -> Spec:
        """See `SpecSource.load`."""
        try:
            text = await self._text.read()
            config = None if text is None else load_resolved(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ControllerError(
                f"the stored compose files are damaged ({error}); `pierhead deploy` stores them again"
            ) from error
        if not isinstance(config, Mapping):
            raise SpecError(["no compose files are stored in Swarm; `pierhead up` or `pierhead deploy` stores them"])
        return parse(self._project, config, DIALECTS)
