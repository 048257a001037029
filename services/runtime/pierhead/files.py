"""Writes whole files. Other users may write in the same directory."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int | None = None, *, durable: bool = False) -> None:
    """Put content in the place of a file, in one step. A link of that name is replaced, and what it leads to stays.

    `mode`: the file's; None: that of the file which is there, else what the user's umask makes of 0666. `durable`: also
    after a power cut there is the old or the new one. Raises OSError.
    """
    if mode is None and path.is_file() and not path.is_symlink():
        mode = path.stat().st_mode & 0o777
    fresh = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    number = os.open(
        fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666 if mode is None else 0o600
    )
    try:
        with os.fdopen(number, "wb") as file:
            if mode is not None:
                os.fchmod(number, mode)
            file.write(content)
            if durable:
                file.flush()
                os.fsync(number)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
