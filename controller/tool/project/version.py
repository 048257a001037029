"""The version of a wheel: the release, and the commit that it is built from.

proto/hatch_metadata.py reads it as well, so it imports nothing of this package.
"""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path


def release_of(root: Path) -> str:
    """The release that the files in `root` are of, or come before: `0.1.0`."""
    declared = tomllib.loads((root / "services" / "runtime" / "pyproject.toml").read_text(encoding="utf-8"))
    return str(declared["project"]["version"])


def version_of(root: Path) -> str:
    """The version of a wheel of these files, as PEP 440 writes it. The 412th commit: `0.1.0.dev412+g18d4da11`, and
    `.dirty` where files differ from it. The commit with the tag `v0.1.0`, and files without git: `0.1.0`.
    """
    release = release_of(root)
    if not (root / ".git").exists():  # a repository around it is another one's
        return release
    count = _git(root, "rev-list", "--count", "HEAD")
    described = _git(root, "describe", "--tags", "--match", f"v{release}", "--always", "--dirty")
    if not count or described == f"v{release}":
        return release
    dirty = ".dirty" * described.endswith("-dirty")
    return f"{release}.dev{count}+g{_git(root, 'rev-parse', '--short=8', 'HEAD')}{dirty}"


def _git(root: Path, *words: str) -> str:
    """What git answers; "" where it is missing or refuses."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
