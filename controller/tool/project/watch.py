"""`pierhead up --watch`: after `up`, each save brings what it changes up to date.

    what was saved                                     what follows
    a file of an image's build context                 the image is built, and the services that run it are rolled out
    a compose file, .env, a Dockerfile, .dockerignore  `up` once more, and what it changes is rolled out

Rollouts have no bake time. A failure changes nothing, and is tried again together with the next save.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pierhead.dev.saves import MISSING, Stamps, difference, named, saved, stamps

from ...errors import ControllerError
from ...files.project_files import ProjectFiles
from . import stack_files
from .built import affected, images_of
from .project import FILES, Project, own_files
from .update import Edited

Up = Callable[[], None]
Update = Callable[[Edited | None], None]
"""See `update`. As Up, it raises ControllerError."""
Say = Callable[[str], object]


class FilesWatch:
    """Follows the files of one project."""

    def __init__(
        self, project: Project, resolved: Callable[[], Mapping[str, Any]], up: Up, update: Update, say: Say
    ) -> None:
        """`resolved`: what `docker compose config` says. Raises InvalidRequest."""
        self._project = project
        self._resolved = resolved
        self._up = up
        self._update = update
        self._say = say
        self._read()

    async def follow(self, since: float) -> None:
        """Bring up to date whatever was saved since then (unix time), and whatever is. Raises InvalidRequest."""
        names = _names((*image.managed, *image.others) for image in self._images)
        watched = f"the files of {', '.join(names)}" if names else "the compose files alone, as no image is built here"
        self._say(f"Watching {watched}. Ctrl-C ends that; the stack keeps running.")
        seen, behind = self._seen({}, since), set[Path]()
        while True:
            now = await saved(self._look, seen)
            since, began, images = time.time(), time.monotonic(), self._images
            fresh, seen = difference(seen, now), now
            self._say(f"{named(fresh)} changed")
            behind |= fresh
            try:
                done = self._bring(behind)
            except ControllerError as error:
                done = ""
                if str(error):
                    self._say(f"pierhead: {error}")
            if done:
                self._say(f"{done} up to date, {time.monotonic() - began:.1f} s after the save of {named(behind)}.")
                behind.clear()
            else:
                self._say("Running services are not affected. The next save tries it again.")
            if self._images is not images:  # there may be other files to watch
                seen = self._seen(seen, since)

    def _seen(self, before: Stamps, since: float) -> Stamps:
        """The former state of the files, and that of those that were not watched then, without later changes."""
        now = self._look()
        return {file: before.get(file, now[file]) for file in now if file in before or now[file][0] < since * 1e9}

    def _bring(self, changed: set[Path]) -> str:
        """Carry out what these files change. Returns what is up to date now, in words. Raises ControllerError."""
        if changed & (self._recipes() | self._compose_files()):
            self._up()
            self._read()
            self._update(None)
            return "The project is"
        images = affected(self._images, changed)
        managed, others = _names(image.managed for image in images), _names(image.others for image in images)
        self._update(Edited([image.builder for image in images], managed, others))
        return _listed([*managed, *others])

    def _look(self) -> Stamps:
        one_of_each = {image.recipe: image for image in self._images}  # a context that several have is looked at once
        files = {file for image in one_of_each.values() for file in image.files()}
        found = stamps(files | self._recipes() | self._compose_files())
        return {file: stamp for file, stamp in found.items() if stamp != MISSING}

    def _recipes(self) -> set[Path]:
        return {file for image in self._images for file in image.recipe}

    def _compose_files(self) -> set[Path]:
        files = (Path(path) for path, *_ in self._files.fingerprint())
        return {file for file in files if stack_files.DIRECTORY not in file.parts}

    def _read(self) -> None:
        files = own_files(self._project, os.environ)
        self._files = ProjectFiles(self._project.root, {FILES: os.pathsep.join(files)})
        self._images = images_of(self._resolved(), self._project.root / stack_files.DIRECTORY)


def _names(groups: Iterable[Iterable[str]]) -> list[str]:
    return sorted({name for group in groups for name in group})


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
