"""Fetches a source into the cache: only missing files, and resumes interrupted ones."""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from pierhead.files import replace_file
from pierhead.llm.server.engine import Report
from pierhead.llm.server.errors import LLMStartError, SourceNotFoundError
from pierhead.llm.server.models.cache import file_name, one_at_a_time
from pierhead.llm.server.models.source import ModelSource, PartFile, SourceFile, in_a_line

REPORT_S = 0.5
"""Between two reports of progress."""

logger = logging.getLogger(__name__)

_GIB = 1024**3
_STATE = ".pierhead-fetched.json"
_WHOLE = ".pierhead-whole"
"""Is there while the directory has all files of the source."""
_PART = ".pierhead-part"


def download(source: ModelSource, cache: Path, report: Report) -> Path:
    """A local copy of everything that a source has. Where the source cannot be asked, what was fetched before is used.

    Raises LLMStartError, SourceNotFoundError, OSError.
    """
    target = cache / source.directory / file_name(source.name)
    try:
        files = source.files()
    except SourceNotFoundError:
        raise
    except LLMStartError as error:
        if not (target / _WHOLE).exists():
            raise
        logger.warning("%s; what was fetched before is served", error)
        return target
    with one_at_a_time(cache, source.name, report) as waited:
        if waited:  # as long as a download took: what was listed before may be gone
            files = source.files()
        fetched = _Fetch(source, target, files, report).run()
        if fetched:
            _reject_changed(fetched, source)
        (target / _WHOLE).touch()
    return target


def _reject_changed(fetched: list[SourceFile], source: ModelSource) -> None:
    """Some stores do not pin a reader to one version: an object that is replaced during the fetch may be a mix of both.
    Raises LLMStartError."""
    now = set(source.files())
    changed = [entry.path for entry in fetched if entry not in now]
    if changed:
        raise LLMStartError(
            f"{source.name} was changed while it was fetched ({len(changed)} objects, the first is {changed[0]}); "
            "the next try fetches them again"
        )


class _Fetch:
    """Fetches the files of one source into a directory, and remembers which ones it has."""

    def __init__(self, source: ModelSource, target: Path, files: list[SourceFile], report: Report) -> None:
        self._source, self._target, self._files, self._report = source, target, files, report
        self._done = 0
        self._total = sum(entry.size for entry in files)
        self._reported = float("-inf")

    def run(self) -> list[SourceFile]:
        """Fetch what is missing or has changed, and return it; remove files that are no longer stored.

        Raises LLMStartError, OSError.
        """
        self._target.mkdir(parents=True, exist_ok=True)
        had = self._remembered()
        missing = [entry for entry in self._files if not self._has(entry, had)]
        for part in set(self._target.rglob(f"*{_PART}")) - {self._part_of(entry) for entry in missing}:
            part.unlink()  # of a content that is no longer stored
        self._reject_too_little_room(sum(entry.size - _size(self._part_of(entry)) for entry in missing))
        self._done = self._total - sum(entry.size for entry in missing)
        wanted = {str(entry.relative) for entry in self._files}
        if missing or set(had) - wanted:
            (self._target / _WHOLE).unlink(missing_ok=True)
        for stale in set(had) - wanted:
            self._remove(PurePosixPath(stale))
        had = {name: tag for name, tag in had.items() if name in wanted}
        for entry in missing:
            self._fetch(entry)
            had[str(entry.relative)] = entry.tag
            self._remember(had)
        self._remember(had)
        return missing

    def _has(self, entry: SourceFile, had: Mapping[str, str]) -> bool:
        """The size counts, too: after a power failure a file may exist without its content."""
        file = self._target / entry.relative
        return had.get(str(entry.relative)) == entry.tag and file.is_file() and _size(file) == entry.size

    def _part_of(self, entry: SourceFile) -> Path:
        """The file that the content is written to until it is complete; its name depends on the content."""
        file = self._target / entry.relative
        return file.with_name(f"{file.name}.{_mark(entry.tag)}{_PART}")

    def _remove(self, stale: PurePosixPath) -> None:
        """Remove a file that is no longer stored, and the directories that it leaves empty."""
        file = self._target / stale
        file.unlink(missing_ok=True)
        for directory in list(file.parents)[: len(stale.parts) - 1]:
            if not directory.is_dir() or any(directory.iterdir()):
                return
            directory.rmdir()

    def _fetch(self, entry: SourceFile) -> None:
        """Fetch one file; an interrupted fetch of the same content is continued."""
        file = self._target / entry.relative
        file.parent.mkdir(parents=True, exist_ok=True)
        begun = self._part_of(entry)
        at = _size(begun)
        if at > entry.size:
            begun.unlink()
            at = 0
        before = self._done
        with PartFile(begun, lambda there: self._advance(before + there)) as part:
            if at < entry.size:
                self._copy(entry, at, part)
        if begun.stat().st_size != entry.size:
            begun.unlink()
            raise LLMStartError(
                f"{entry.path} of {self._source.name} ended early, or was changed during the download; it is fetched "
                "again"
            )
        begun.replace(file)
        self._done = before + entry.size

    def _copy(self, entry: SourceFile, at: int, part: PartFile) -> None:
        try:
            self._source.copy(entry, at, part)
        except LLMStartError:
            raise
        except Exception as error:  # libraries of sources have errors of their own
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise LLMStartError(
                f"{entry.path} of {self._source.name} could not be fetched: {in_a_line(error)}; "
                "the next try continues from there"
            ) from error

    def _advance(self, done: int) -> None:
        now = time.monotonic()
        if now - self._reported >= REPORT_S or done >= self._total:
            self._reported = now
            self._report(f"downloading {self._source.name}", done, self._total)

    def _reject_too_little_room(self, needed: int) -> None:
        free = shutil.disk_usage(self._target).free
        if needed > free:
            raise LLMStartError(
                f"{self._source.name} needs {needed / _GIB:.1f} GiB and {self._target} has {free / _GIB:.1f} "
                "GiB free; enlarge the cache volume, or remove models from it"
            )

    def _remembered(self) -> dict[str, str]:
        try:
            known = json.loads((self._target / _STATE).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return {str(name): str(tag) for name, tag in known.items()} if isinstance(known, dict) else {}

    def _remember(self, had: Mapping[str, str]) -> None:
        replace_file(self._target / _STATE, json.dumps(had, indent=0, sort_keys=True).encode())


def _size(file: Path) -> int:
    """Bytes; 0 where there is no such file."""
    return file.stat().st_size if file.is_file() else 0


def _mark(tag: str) -> str:
    """The content's mark in the name of a part: the fetch of a changed file is not continued."""
    return re.sub(r"[^A-Za-z0-9]+", "", tag)[-24:] or "0"
