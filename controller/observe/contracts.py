"""Reads the contracts that images carry, each image once and outside the ticks."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from pierhead.classes.compare import IMAGE_PATH

from ..engines.base import ClusterEngine
from ..errors import EngineError, EngineUnreachable
from ..outlive import Background

logger = logging.getLogger(__name__)

RETRY_S = 2.0
"""Between two readings of an image while the engine does not answer."""
MOST_KEPT = 64
"""Images whose contracts are kept, the latest that were asked for: a version changes from one to another."""


@dataclass(eq=False)
class ImageContracts:
    """Answers from what was read; a question for another image begins a reading, whose end wakes the loop."""

    _engine: ClusterEngine
    _project: str
    _background: Background

    def __post_init__(self) -> None:
        self._known: dict[str, bytes] = {}
        self._reading: set[str] = set()
        self._one = asyncio.Lock()
        """Images are read one by one: the engine's threads are for replicas."""

    def of(self, image: str) -> bytes | None:
        """The contract in an image, by the image's id; b"" = there is none, None = it is being read."""
        found = self._known.pop(image, None)
        if found is not None:
            self._known[image] = found
        elif image not in self._reading:
            self._reading.add(image)
            self._background.begin("reading the contract of an image", partial(self._read, image))
        return found

    async def _read(self, image: str) -> None:
        try:
            async with self._one:
                self._known[image] = await self._engine.file_of_image(image, IMAGE_PATH, self._project) or b""
        except EngineUnreachable as error:
            logger.warning("the contract of image %s is read again: %s", image, error)
            await asyncio.sleep(RETRY_S)
        except EngineError as error:
            logger.warning("the contract of image %s counts as none, the first replica tells its own: %s", image, error)
            self._known[image] = b""
        self._reading.discard(image)
        while len(self._known) > MOST_KEPT:
            del self._known[next(iter(self._known))]
        self._background.wake()
