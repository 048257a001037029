"""The metrics page of the server behind the engine, without what the replica's own page has. Pure."""

from __future__ import annotations

_OURS = (b"process_", b"python_", b"pierhead_")
"""Families that the replica has itself."""


def without_ours(text: bytes) -> bytes:
    """A page of metrics without the families that the replica's own page has."""
    kept = [line for line in text.splitlines() if line and line != b"# EOF" and not _family(line).startswith(_OURS)]
    return b"\n".join(kept) + b"\n" if kept else b""


def _family(line: bytes) -> bytes:
    words = line.split(None, 3)
    return words[2] if line.startswith(b"#") and len(words) > 2 else line
