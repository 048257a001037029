"""Files of the operator that HAProxy has: copies of checked files, on the volume that it shares with the controller.

HAProxy never reads the user's files, so a wrong one cannot keep it from starting, or from taking other routes. Each set
of files has a directory of its own, which the configuration names: another set is another configuration.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

from .haproxy_file import write
from .haproxy_text import DIGEST, NONE


class PublishedFiles:
    """The directories in `run_dir`/<kind>. Files and directories are root's alone, as HAProxy's master is root."""

    def __init__(self, run_dir: Path, kind: str) -> None:
        self._place = run_dir / kind
        self._named = re.compile(rf"/run/haproxy/{kind}/({DIGEST})\b")
        self._latest = NONE
        self._changing = threading.Lock()

    def in_container(self, name: str) -> str:
        """Where HAProxy finds a directory."""
        return f"/run/haproxy/{self._place.name}/{name}"

    def in_config(self, text: str) -> str:
        """The directory that a configuration names; NONE where it names none."""
        found = self._named.search(text)
        return found.group(1) if found else NONE

    def names(self, directory: str) -> tuple[str, ...]:
        """The files of a directory."""
        return tuple(sorted(path.name for path in (self._place / directory).glob("[!.]*")))

    def publish(self, files: Mapping[str, str]) -> str:
        """Write the files, by name, into a directory of their own; its name."""
        name = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:16]
        with self._changing:
            for directory in (self._place, self._place / name):
                directory.mkdir(mode=0o700, exist_ok=True)
            for file, text in files.items():
                write(self._place / name / file, text)
            self._latest = name
        return name

    def keep_only(self, name: str) -> None:
        """Remove the directories, with the files in them, but for this one and the latest."""
        with self._changing:
            for directory in self._place.glob("*"):
                if directory.name not in (name, self._latest):
                    shutil.rmtree(directory, ignore_errors=True)
