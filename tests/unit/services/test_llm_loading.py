"""Model sources: what is fetched, what is not fetched again, what an interrupted fetch leaves, and every refusal.

Buckets are fsspec's own in-memory file system: the same interface that s3:// and gs:// are read through.
"""

from __future__ import annotations

import errno
import io
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from services.llm.server import loading
from services.llm.server.errors import LLMStartError, SourceNotFoundError
from services.llm.server.loading import fetch

SOURCE = "memory://bucket/qwen"
WEIGHTS = bytes(range(256)) * 400


class Told:
    """What the start was told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, float | None, float]] = []

    def __call__(self, doing: str, done: float | None, total: float) -> None:
        self.lines.append((doing, done, total))


@pytest.fixture
def bucket() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    files.pipe("/bucket/qwen/config.json", b"{}")
    files.pipe("/bucket/qwen/weights/model.safetensors", WEIGHTS)
    yield files
    files.store.clear()


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_directory_is_taken_as_it_is(tmp_path: Path, told: Told) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert fetch(str(tmp_path), tmp_path / "cache", told) == tmp_path


@pytest.mark.parametrize(
    ("make", "words"), [(False, "does not exist inside the container; mount it"), (True, "is empty; put the model's")]
)
def test_a_directory_without_a_model_is_told(tmp_path: Path, told: Told, make: bool, words: str) -> None:
    directory = tmp_path / "qwen"
    if make:
        directory.mkdir()
    with pytest.raises(LLMStartError, match=words):
        fetch(str(directory), tmp_path / "cache", told)


def test_a_bucket_is_fetched_whole_with_progress(bucket: Any, tmp_path: Path, told: Told) -> None:
    found = fetch(SOURCE, tmp_path, told)
    assert (found / "config.json").read_bytes() == b"{}"
    assert (found / "weights" / "model.safetensors").read_bytes() == WEIGHTS
    last: object = told.lines[-1]  # of any total
    assert last == (f"downloading {SOURCE}", len(WEIGHTS) + 2, len(WEIGHTS) + 2)
    assert not list(found.rglob("*.pierhead-part"))


def test_what_is_there_is_not_fetched_again(bucket: Any, tmp_path: Path, told: Told, monkeypatch: Any) -> None:
    found = fetch(SOURCE, tmp_path, told)
    monkeypatch.setattr(type(bucket), "_open", lambda *_, **__: pytest.fail("read again"))
    assert fetch(SOURCE, tmp_path, told) == found


def test_what_has_changed_is_fetched_and_what_is_gone_is_removed(bucket: Any, tmp_path: Path, told: Told) -> None:
    found = fetch(SOURCE, tmp_path, told)
    bucket.rm("/bucket/qwen/config.json")
    bucket.pipe("/bucket/qwen/weights/model.safetensors", WEIGHTS[::-1])
    assert fetch(SOURCE, tmp_path, told) == found
    assert (found / "weights" / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert not (found / "config.json").exists()


class Breaks:
    """A file system whose large object breaks off after `after` bytes, until `broken` is False."""

    def __init__(self, files: Any, after: int, error: OSError) -> None:
        self.files, self.real, self.after, self.error = files, files.open, after, error
        self.seeks: list[int] = []
        self.broken = True

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "rb":
            return self.real(path, mode, **kwargs)
        with self.real(path, mode) as stream:
            content = stream.read()
        return _Stream(self, content) if path.endswith(".safetensors") else io.BytesIO(content)


class _Stream(io.BytesIO):
    def __init__(self, breaks: Breaks, content: bytes) -> None:
        super().__init__(content)
        self.breaks = breaks

    def read(self, count: int | None = -1) -> bytes:
        if self.breaks.broken and self.tell() >= self.breaks.after:
            raise self.breaks.error
        return super().read(1000)

    def seek(self, at: int, whence: int = 0) -> int:
        self.breaks.seeks.append(at)
        return super().seek(at, whence)


def test_an_interrupted_fetch_goes_on_within_the_file(
    bucket: Any, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = Breaks(bucket, after=50_000, error=ConnectionResetError("the line broke"))
    monkeypatch.setattr(bucket, "open", breaks.open)
    with pytest.raises(LLMStartError, match="could not be fetched: ConnectionResetError: the line broke"):
        fetch(SOURCE, tmp_path, told)
    breaks.broken = False
    found = fetch(SOURCE, tmp_path, told)
    assert (found / "weights" / "model.safetensors").read_bytes() == WEIGHTS
    assert breaks.seeks == [0, 50_000]
    bucket.pipe("/bucket/qwen/weights/model.safetensors", WEIGHTS[::-1])
    assert (fetch(SOURCE, tmp_path, told) / "weights" / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert breaks.seeks == [0, 50_000, 0], "another content is not continued"


def test_a_full_disk_says_so(bucket: Any, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = Breaks(bucket, after=50_000, error=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(bucket, "open", breaks.open)
    with pytest.raises(LLMStartError, match=r"no space left in .* enlarge the cache volume"):
        fetch(SOURCE, tmp_path, told)


def test_too_little_room_is_told_before_anything_is_fetched(
    bucket: Any, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=1000))
    with pytest.raises(LLMStartError, match=r"needs 0\.0 GiB and .* has 0\.0 GiB free"):
        fetch(SOURCE, tmp_path, told)
    assert told.lines == []


def test_an_empty_prefix_and_an_unknown_store_are_told(bucket: Any, tmp_path: Path, told: Told) -> None:
    with pytest.raises(SourceNotFoundError, match="nothing is stored below memory://bucket/other"):
        fetch("memory://bucket/other", tmp_path, told)
    with pytest.raises(LLMStartError, match="this image cannot read nonsense://"):
        fetch("nonsense://bucket/other", tmp_path, told)


def test_a_cache_that_cannot_be_written_is_told(bucket: Any, tmp_path: Path, told: Told) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LLMStartError, match="could not be fetched into"):
        fetch(SOURCE, tmp_path / "file", told)


def test_of_two_replicas_one_fetches_and_the_other_waits(
    bucket: Any, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins while the first one is in the middle of a file, and reads nothing itself."""
    monkeypatch.setattr(loading, "ASK_AGAIN_S", 0.01)
    in_the_middle, go_on = threading.Event(), threading.Event()
    opened: list[str] = []
    real = type(bucket)._open

    def slowly(files: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        opened.append(path)
        in_the_middle.set()
        assert go_on.wait(10)
        return real(files, path, *args, **kwargs)

    monkeypatch.setattr(type(bucket), "_open", slowly)  # each thread has a file system object of its own
    other = Told()

    def waits(doing: str, done: float | None, total: float) -> None:
        other(doing, done, total)
        if doing.startswith("waiting"):
            go_on.set()

    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(fetch(SOURCE, tmp_path, told)))
    first.start()
    assert in_the_middle.wait(10)
    second = fetch(SOURCE, tmp_path, waits)
    first.join(10)
    assert found == [second]
    assert len(opened) == 2
    assert other.lines[0] == (f"waiting for another replica that downloads {SOURCE}", 1, 0)
