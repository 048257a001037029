"""Finds the files of a Compose project and detects changes of them. It reads and stats files; it runs no command.

The files are: those of COMPOSE_FILE or the default names, `.env`, and the files named in `include`, `extends.file`,
`env_file` and `label_file`. A name with a variable in it is skipped, as only Compose can resolve it. A file that does
not exist is watched as well, because its creation changes the project.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pierhead.compose_names import DEFAULT_NAMES
from pierhead.dotenv import DotEnv

from .yaml import load_written

OVERRIDE_NAMES = (
    "compose.override.yml",
    "compose.override.yaml",
    "docker-compose.override.yml",
    "docker-compose.override.yaml",
)
_MAX_FILES = 1000

_Kind = Literal["compose", "directory", "other"]

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""(path, mtime_ns, size, inode) of every file; the numbers are -1 for a file that does not exist."""


def compose_files(project_dir: Path, environment: Mapping[str, str]) -> list[Path]:
    """The absolute paths of the files in COMPOSE_FILE, which need not exist; else the existing default files."""
    named = environment.get("COMPOSE_FILE", "") or _compose_file_of_dotenv(project_dir)
    separator = environment.get("COMPOSE_PATH_SEPARATOR", os.pathsep)
    if named:
        return [_absolute(project_dir, name) for name in named.split(separator) if name]
    return [project_dir / name for name in (*DEFAULT_NAMES, *OVERRIDE_NAMES) if (project_dir / name).exists()]


def _compose_file_of_dotenv(project_dir: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):  # Compose reports the error
        return DotEnv(project_dir / ".env").get("COMPOSE_FILE") or ""
    return ""


class ProjectFiles:
    """The files of one project. Not thread-safe."""

    def __init__(self, project_dir: Path, environment: Mapping[str, str]) -> None:
        self._project_dir = project_dir
        self._environment = dict(environment)
        self._watched: tuple[Path, ...] = ()
        self._fingerprint: Fingerprint | None = None

    def fingerprint(self) -> Fingerprint:
        """A value that changes when a file of the project does. It costs a few `stat` calls; files are read only after
        a change."""
        if self._fingerprint is None or tuple(map(stat_of, self._watched)) != self._fingerprint:
            self._watched = tuple(sorted(self._find()))
            self._fingerprint = tuple(map(stat_of, self._watched))
        return self._fingerprint

    def names(self) -> list[str]:
        """The absolute paths of the files."""
        return [name for name, *_ in self.fingerprint()]

    def _find(self) -> set[Path]:
        roots = compose_files(self._project_dir, self._environment)
        first_dir = roots[0].parent if roots else self._project_dir
        found = {directory / ".env" for directory in (self._project_dir, first_dir)}
        env_files = self._environment.get("COMPOSE_ENV_FILES", "").split(",")
        found |= {_absolute(self._project_dir, name) for name in env_files if name}
        if not self._environment.get("COMPOSE_FILE"):
            found |= {self._project_dir / name for name in (*DEFAULT_NAMES, *OVERRIDE_NAMES)}
        pending = list(roots)
        bases = {first_dir}
        while pending and len(found) < _MAX_FILES:
            file = pending.pop()
            if file in found and file not in roots:
                continue
            found.add(file)
            for named, kind in _named_in(file):
                # Names are relative to the file with them (include, extends) or to the project (env_file): watch both.
                candidates = {_absolute(base, named) for base in {file.parent, *bases}}
                if kind == "compose":
                    pending += sorted(candidates - found)
                    found |= {candidate.parent / ".env" for candidate in candidates}
                elif kind == "directory":
                    bases |= candidates
                    found |= {candidate / ".env" for candidate in candidates}
                else:
                    found |= candidates
        return found


def _absolute(base: Path, name: str) -> Path:
    return Path(os.path.normpath(base / name))


def stat_of(file: Path) -> tuple[str, int, int, int]:
    """What of a file is in a fingerprint."""
    try:
        status = file.stat()
    except (OSError, ValueError):  # ValueError: no file can have such a name
        return (str(file), -1, -1, -1)
    return (str(file), status.st_mtime_ns, status.st_size, status.st_ino)


def _named_in(file: Path) -> list[tuple[str, _Kind]]:
    """The names in one compose file: (name, "compose" file, "directory" of a project or "other" file)."""
    try:
        written = load_written(file.read_text())
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError):
        return []  # Compose reports the error; the file itself is watched, so its correction is noticed
    return [(name, kind) for name, kind in _names(written) if name and "$" not in name]


def _names(written: Any) -> Iterator[tuple[str, _Kind]]:
    if not isinstance(written, Mapping):
        return
    for entry in _as_list(written.get("include")):
        fields = entry if isinstance(entry, Mapping) else {"path": entry}
        if isinstance(fields.get("project_directory"), str):
            yield fields["project_directory"], "directory"
        yield from ((name, "compose") for name in _as_list(fields.get("path")) if isinstance(name, str))
        yield from ((name, "other") for name in _as_list(fields.get("env_file")) if isinstance(name, str))
    services = written.get("services")
    for service in services.values() if isinstance(services, Mapping) else ():
        if not isinstance(service, Mapping):
            continue
        extends = service.get("extends")
        if isinstance(extends, Mapping) and isinstance(extends.get("file"), str):
            yield extends["file"], "compose"
        for entry in (*_as_list(service.get("env_file")), *_as_list(service.get("label_file"))):
            name = entry.get("path") if isinstance(entry, Mapping) else entry
            if isinstance(name, str):
                yield name, "other"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
