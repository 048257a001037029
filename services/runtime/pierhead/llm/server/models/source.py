"""What is behind a model's files: a bucket, the Hugging Face hub. `download` fetches from any of them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source. Raises ValueError for a name that leads out of the source."""

    path: str
    """As the source names it."""
    relative: PurePosixPath
    """Below the directory of the model."""
    size: int
    tag: str
    """Changes with the content."""

    def __post_init__(self) -> None:
        if ".." in self.relative.parts or self.relative.is_absolute():
            raise ValueError(f"a file's name leads out of the source: {self.path}")


class PartFile(io.BufferedWriter):
    """The file that a download appends to until it is whole."""

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path, "a"))
        self.path = path
        self.advance = advance
        """Called with the bytes that are there, as progress."""

    def write(self, content: object) -> int:
        """Append, and report the progress."""
        count = super().write(content)  # type: ignore[arg-type]
        self.advance(self.tell())
        return count


class ModelSource(Protocol):
    """Where a model's files are stored."""

    name: str
    """As the user wrote it."""
    directory: str
    """Below the cache: what is fetched from sources of this kind."""

    def files(self) -> list[SourceFile]:
        """The files that are stored now. Raises SourceNotFoundError where there are none, LLMStartError."""
        ...

    def copy(self, file: SourceFile, at: int, part: PartFile) -> None:
        """Append a file's content from byte `at` on. Raises LLMStartError, and what the source's library raises."""
        ...


def in_a_line(error: Exception) -> str:
    """An error of a library, for a message: in one line, without passwords and signatures in its addresses."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"(://)[^/\s@]+@|(://[^\s?]+)\?[^\s'\"]+", r"\1\2", words)
