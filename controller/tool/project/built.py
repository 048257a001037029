"""The images that Compose builds for a project: what each is made of, and which services run it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pierhead.compose_names import image_name
from pierhead.dev.saves import files_below

_PARTS = re.compile(r"\*\*/?|\*|\?|\[[^\]]+\]|\\.|.", re.DOTALL)
_PLAIN = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@dataclass(frozen=True)
class Ignored:
    """The patterns of a `.dockerignore`, in its order: whether each puts files out or back in."""

    patterns: tuple[tuple[re.Pattern[str], bool], ...] = ()

    @classmethod
    def of(cls, text: str) -> Ignored:
        """As the builder reads them: the last one that fits a file, or a directory above it, decides."""
        lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
        return cls(tuple((_pattern(line.removeprefix("!")), not line.startswith("!")) for line in lines if line))

    @property
    def has_exceptions(self) -> bool:
        """Whether something in a directory that is out may be in."""
        return not all(is_out for _, is_out in self.patterns)

    def has(self, path: str) -> bool:
        """Whether a file, by its path in the context, is not in it."""
        return next((is_out for pattern, is_out in reversed(self.patterns) if pattern.fullmatch(path)), False)


def _pattern(written: str) -> re.Pattern[str]:
    """Go's filepath.Match, with `**` for any number of directories."""
    return re.compile(
        "".join(map(_part, _PARTS.findall(written.strip().strip("/").removeprefix("./")))) + "(?:/.*)?", re.DOTALL
    )


def _part(token: str) -> str:
    if token.startswith("[") and len(token) > 1:
        return token
    return _PLAIN.get(token) or re.escape(token[-1])


@dataclass(frozen=True)
class BuiltImage:
    """An image, and the services that run it."""

    builder: str
    """The service that has its `build`."""
    context: Path
    dockerfile: Path
    managed: tuple[str, ...]
    """Services with an x-serve block."""
    others: tuple[str, ...]

    @property
    def recipe(self) -> tuple[Path, ...]:
        """The files that say how it is built. One that is missing may appear."""
        return (
            self.dockerfile,
            self.dockerfile.with_name(f"{self.dockerfile.name}.dockerignore"),
            self.context / ".dockerignore",
        )

    def has(self, file: Path) -> bool:
        """Whether a file is in its context."""
        return file.is_relative_to(self.context) and not self._is_out(self._ignored(), file)

    def files(self) -> Iterator[Path]:
        """The files of its context, without hidden directories and virtual environments."""
        ignored = self._ignored()
        leave_out = partial(self._is_out, Ignored() if ignored.has_exceptions else ignored)
        return (file for file in files_below(self.context, leave_out) if not self._is_out(ignored, file))

    def _ignored(self) -> Ignored:
        for file in self.recipe[1:]:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                return Ignored.of(file.read_text(encoding="utf-8"))
        return Ignored()

    def _is_out(self, ignored: Ignored, path: Path) -> bool:
        return ignored.has(path.relative_to(self.context).as_posix())


def images_of(config: Mapping[str, Any], without: Path) -> list[BuiltImage]:
    """The images of a project by what `docker compose config` says; `without`: the directory of the stack's own."""
    services = config["services"]
    name_of = {name: image_name(config["name"], name, one) for name, one in services.items()}
    found = []
    for name, service in services.items():
        build = service.get("build") or {}
        context = Path(build.get("context") or "")
        if not context.is_absolute() or context.is_relative_to(without):  # none, or a repository elsewhere
            continue
        users = [user for user in services if name_of[user] == name_of[name]]
        managed = tuple(user for user in users if "x-serve" in services[user])
        others = tuple(user for user in users if user not in managed)
        found.append(BuiltImage(name, context, context / build.get("dockerfile", "Dockerfile"), managed, others))
    return found


def affected(images: Iterable[BuiltImage], changed: Iterable[Path]) -> list[BuiltImage]:
    """The images that have one of these files in their context."""
    files = list(changed)
    return [image for image in images if any(map(image.has, files))]
