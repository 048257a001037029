"""The content of the files that replicas get as secrets and configs: a changed file is a new version.

A bind mount shows a file that changes in place, and not one that another file replaces, as most editors and tools do.
On an engine of several nodes the files are secrets and configs of its own, whose names say their content.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..model.spec import ServiceSpec, Spec
from .attachments import FILE_DIRECTORIES

_DIGITS = 12


def attached_files(config: object) -> frozenset[str]:
    """The paths of the files that resolved compose files give to secrets and configs."""
    sections = [config.get(kind) for kind in FILE_DIRECTORIES] if isinstance(config, Mapping) else []
    definitions = [one for section in sections if isinstance(section, Mapping) for one in section.values()]
    return frozenset(str(one["file"]) for one in definitions if isinstance(one, Mapping) and one.get("file"))


def with_contents(spec: Spec, paths: frozenset[str]) -> Spec:
    """The spec, in which each service has what these files contain now. Blocking: it reads them."""
    seen = {path: found for path in paths if (found := _seen(Path(path)))}
    return replace(spec, services={name: _with_files(one, seen) for name, one in spec.services.items()})


def _with_files(service: ServiceSpec, seen: Mapping[str, tuple[str, float]]) -> ServiceSpec:
    mounts: list[Mapping[str, Any]] = (service.container.get("HostConfig") or {}).get("Mounts") or []
    mine = {str(mount["Target"]): seen[mount["Source"]] for mount in mounts if mount.get("Source") in seen}
    if not mine:
        return service
    digests = {target: digest for target, (digest, _) in mine.items()}
    return replace(service, files=digests, files_changed_at=max(changed_at for _, changed_at in mine.values()))


def _seen(file: Path) -> tuple[str, float] | None:
    """(digest of its content, when it last changed); None for what is not there, or is no file that ends."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            return None
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()[:_DIGITS], status.st_ctime
    except (OSError, ValueError):  # it lies outside of what the controller sees
        return None
