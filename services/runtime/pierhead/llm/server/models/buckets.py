"""Fetches models and adapters from buckets (s3://, gs://): only missing files, and resumes interrupted ones."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pierhead.files import replace_file
from pierhead.llm.server.engine import Report
from pierhead.llm.server.errors import LLMStartError, SourceNotFoundError
from pierhead.llm.server.models.cache import file_name, one_at_a_time

CHUNK_BYTES = 8 * 1024 * 1024
REPORT_S = 0.5
"""Between two reports of progress."""

_GIB = 1024**3
_STATE = ".pierhead-fetched.json"
_PART = ".pierhead-part"
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; AWS_ENDPOINT_URL for a store other than Amazon's",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, a key's file inside the container",
}
"""What the libraries read, by scheme."""
_ZONAL = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
"""Unless this is "false", gcsfs asks by gRPC for a bucket's type before each read, which takes a minute where only
HTTPS gets through. Zonal buckets cannot be read without: a user's "true" stays."""


@dataclass(frozen=True, slots=True)
class _Object:
    """One object of a bucket."""

    path: str
    """As its file system names it."""
    relative: PurePosixPath
    size: int
    tag: str
    """Changes with the content: ETag, generation or time of change."""


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A source in a bucket. Its file system object is its own: a shared one of fsspec would have the settings and
    credentials of its first user."""

    source: str
    files: Any
    root: str

    def objects(self) -> list[_Object]:
        """The objects that are stored now. Raises SourceNotFoundError, LLMStartError."""
        self.files.invalidate_cache()  # else files are opened as an earlier listing had them
        try:
            found = list(_objects(self.files, self.root))
        except FileNotFoundError:
            found = []
        except Exception as error:  # libraries of buckets have errors of their own
            raise _cannot_list(self.source, error) from error
        if not found:
            raise SourceNotFoundError(f"nothing is stored below {self.source}; check bucket and prefix")
        return found


def _prefix(source: str) -> _Prefix:
    """Raises LLMStartError."""
    if source.startswith("gs://"):
        os.environ.setdefault(_ZONAL, "false")  # read when gcsfs is imported
    try:
        import fsspec

        files, root = fsspec.core.url_to_fs(source, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        raise LLMStartError(f"{source}: this image cannot read {source.partition(':')[0]}://: {error}") from error
    except Exception as error:  # credentials that cannot be read
        raise _cannot_list(source, error) from error
    return _Prefix(source, files, root)


def _cannot_list(source: str, error: Exception) -> LLMStartError:
    variables = _VARIABLES.get(source.partition(":")[0])
    return LLMStartError(
        f"{source} cannot be listed: {_in_a_line(error)}; check the bucket's name, and credentials and endpoint in the "
        f"service's environment{f' ({variables})' if variables else ''}"
    )


def _in_a_line(error: Exception) -> str:
    """Some libraries put the body of an answer into their messages."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def from_bucket(source: str, cache: Path, report: Report) -> Path:
    """A local copy of everything below a prefix. Raises LLMStartError, SourceNotFoundError, OSError."""
    prefix = _prefix(source)
    objects = prefix.objects()
    target = cache / "buckets" / file_name(source)
    with one_at_a_time(cache, source, report) as waited:
        if waited:  # as long as a download took: what was listed before may be gone
            objects = prefix.objects()
        fetched = _Fetch(prefix.files, target, source, objects, report).run()
        if fetched:
            _reject_changed(fetched, prefix)
    return target


def _reject_changed(fetched: list[_Object], prefix: _Prefix) -> None:
    """Some stores do not pin a reader to one version: an object that is replaced during the fetch may be a mix of both.
    Raises LLMStartError."""
    now = set(prefix.objects())
    changed = [entry.path for entry in fetched if entry not in now]
    if changed:
        raise LLMStartError(
            f"{prefix.source} was changed while it was fetched ({len(changed)} objects, the first is {changed[0]}); "
            "the next try fetches them again"
        )


def _objects(files: Any, root: str) -> Iterator[_Object]:
    """Everything below a prefix. Raises what the library raises."""
    for path, details in sorted(files.find(root, detail=True).items()):
        if path.endswith("/") or details.get("type") == "directory":
            continue  # a folder of a console: an object without content whose name is the prefix of others
        if path != root and not path.startswith(root.rstrip("/") + "/"):
            continue  # a neighbour with the same beginning of its name
        relative = PurePosixPath(path[len(root) :].lstrip("/") or PurePosixPath(path).name)
        if ".." in relative.parts or relative.is_absolute():
            raise ValueError(f"an object's name leads out of the prefix: {path}")
        size = int(details.get("size") or 0)
        tag = next(
            (str(details[key]) for key in ("ETag", "generation", "etag", "mtime", "created") if key in details), ""
        )
        yield _Object(path, relative, size, f"{size} {tag}")


class _Fetch:
    """Fetches the objects of one prefix into a directory, and remembers which ones it has."""

    def __init__(self, files: Any, target: Path, source: str, objects: list[_Object], report: Report) -> None:
        self._files, self._target, self._objects, self._report = files, target, objects, report
        self._source = source
        self._done = 0
        self._total = sum(entry.size for entry in objects)
        self._reported = float("-inf")

    def run(self) -> list[_Object]:
        """Fetch what is missing or has changed, and return it; remove files that are no longer stored.

        Raises LLMStartError, OSError.
        """
        self._target.mkdir(parents=True, exist_ok=True)
        had = self._remembered()
        missing = [entry for entry in self._objects if not self._has(entry, had)]
        for part in set(self._target.rglob(f"*{_PART}")) - {self._part_of(entry) for entry in missing}:
            part.unlink()  # of a content that is no longer stored
        self._reject_too_little_room(sum(entry.size - _size(self._part_of(entry)) for entry in missing))
        self._done = self._total - sum(entry.size for entry in missing)
        wanted = {str(entry.relative) for entry in self._objects}
        for stale in set(had) - wanted:
            self._remove(PurePosixPath(stale))
        had = {name: tag for name, tag in had.items() if name in wanted}
        for entry in missing:
            self._fetch(entry)
            had[str(entry.relative)] = entry.tag
            self._remember(had)
        self._remember(had)
        return missing

    def _has(self, entry: _Object, had: Mapping[str, str]) -> bool:
        """The size counts, too: after a power failure a file may exist without its content."""
        file = self._target / entry.relative
        return had.get(str(entry.relative)) == entry.tag and file.is_file() and _size(file) == entry.size

    def _part_of(self, entry: _Object) -> Path:
        """The file that the object is written to until it is complete; its name depends on the content."""
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

    def _fetch(self, entry: _Object) -> None:
        """Fetch one object; an interrupted fetch of the same content is continued."""
        file = self._target / entry.relative
        file.parent.mkdir(parents=True, exist_ok=True)
        begun = self._part_of(entry)
        at = _size(begun)
        if at > entry.size:
            begun.unlink()
            at = 0
        self._done += at
        with begun.open("ab") as out:
            if at < entry.size:
                self._copy(entry, at, out)
        if begun.stat().st_size != entry.size:
            begun.unlink()
            raise LLMStartError(
                f"{entry.path} of {self._source} ended early, or was changed during the download; it is fetched again"
            )
        begun.replace(file)

    def _copy(self, entry: _Object, at: int, out: Any) -> None:
        try:
            with self._files.open(entry.path, "rb", block_size=CHUNK_BYTES, cache_type="none") as stream:
                stream.seek(at)
                while chunk := stream.read(CHUNK_BYTES):
                    out.write(chunk)
                    self._advance(len(chunk))
        except Exception as error:  # libraries of buckets have errors of their own
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            raise LLMStartError(
                f"{entry.path} of {self._source} could not be fetched: {_in_a_line(error)}; "
                "the next try continues from there"
            ) from error

    def _advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._reported >= REPORT_S or self._done >= self._total:
            self._reported = now
            self._report(f"downloading {self._source}", self._done, self._total)

    def _reject_too_little_room(self, needed: int) -> None:
        free = shutil.disk_usage(self._target).free
        if needed > free:
            raise LLMStartError(
                f"{self._source} needs {needed / _GIB:.1f} GiB and {self._target} has {free / _GIB:.1f} "
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
    """The content's mark in the name of a part: the fetch of a changed object is not continued."""
    return re.sub(r"[^A-Za-z0-9]+", "", tag)[-24:] or "0"
