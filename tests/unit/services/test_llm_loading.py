"""Model sources: what an interrupted fetch leaves, and the refusals that need a file system which fails.

Buckets are fsspec's own in-memory file system: the interface that s3:// and gs:// are read through. What holds for
every bucket is in tests/contract/test_llm_buckets.py.
"""

from __future__ import annotations

import errno
import fcntl
import io
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from services.llm.server.errors import LLMStartError
from services.llm.server.models import cache
from services.llm.server.models.loading import fetch

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


class Breaks:
    """File systems whose large object breaks off after `after` bytes, until `broken` is False. In the place of all of
    a class: each fetch has one of its own."""

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
    monkeypatch.setattr(type(bucket), "open", breaks.open)
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
    monkeypatch.setattr(type(bucket), "open", breaks.open)
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


def test_what_an_interrupted_fetch_has_needs_no_room_again(
    bucket: Any, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = Breaks(bucket, after=90_000, error=ConnectionResetError("the line broke"))
    monkeypatch.setattr(type(bucket), "open", breaks.open)
    with pytest.raises(LLMStartError, match="could not be fetched"):
        fetch(SOURCE, tmp_path, told)
    breaks.broken = False
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=len(WEIGHTS) - 80_000))
    assert (fetch(SOURCE, tmp_path, told) / "weights" / "model.safetensors").read_bytes() == WEIGHTS


def test_sources_of_like_names_have_directories_of_their_own(bucket: Any, tmp_path: Path, told: Told) -> None:
    bucket.pipe("/bucket/team_a/weights", b"one")
    bucket.pipe("/bucket/team/a/weights", b"two")
    one, two = fetch("memory://bucket/team_a", tmp_path, told), fetch("memory://bucket/team/a", tmp_path, told)
    assert ((one / "weights").read_bytes(), (two / "weights").read_bytes()) == (b"one", b"two")


def test_a_file_that_lost_its_content_is_fetched_again(bucket: Any, tmp_path: Path, told: Told) -> None:
    """A machine that loses its power may keep a name and no content."""
    weights = fetch(SOURCE, tmp_path, told) / "weights" / "model.safetensors"
    weights.write_bytes(b"")
    fetch(SOURCE, tmp_path, told)
    assert weights.read_bytes() == WEIGHTS


def test_parts_of_former_contents_do_not_stay(
    bucket: Any, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = Breaks(bucket, after=50_000, error=ConnectionResetError("the line broke"))
    monkeypatch.setattr(type(bucket), "open", breaks.open)
    with pytest.raises(LLMStartError, match="could not be fetched"):
        fetch(SOURCE, tmp_path, told)
    breaks.broken = False
    assert len(list(tmp_path.rglob("*.pierhead-part"))) == 1
    bucket.pipe("/bucket/qwen/weights/model.safetensors", WEIGHTS + b"more")
    fetch(SOURCE, tmp_path, told)
    assert not list(tmp_path.rglob("*.pierhead-part"))


def test_who_has_waited_goes_by_what_is_stored_then(
    bucket: Any, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "ASK_AGAIN_S", 0.01)
    (tmp_path / "locks").mkdir()
    with (tmp_path / "locks" / cache.file_name(SOURCE)).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def meanwhile(doing: str, done: float | None, total: float) -> None:
            told(doing, done, total)
            if doing.startswith("waiting"):
                bucket.pipe("/bucket/qwen/config.json", b"changed")
                fcntl.flock(lock, fcntl.LOCK_UN)

        found = fetch(SOURCE, tmp_path, meanwhile)
    assert told.lines[0][0].startswith("waiting")
    assert (found / "config.json").read_bytes() == b"changed"


def test_a_directory_may_become_a_file(bucket: Any, tmp_path: Path, told: Told) -> None:
    fetch(SOURCE, tmp_path, told)
    bucket.rm("/bucket/qwen/weights/model.safetensors")
    bucket.pipe("/bucket/qwen/weights", b"all of them")
    assert (fetch(SOURCE, tmp_path, told) / "weights").read_bytes() == b"all of them"


def test_an_error_of_the_library_s_own_is_told_as_any_other(
    bucket: Any, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowDown(Exception):
        """No OSError."""

    breaks = Breaks(bucket, after=50_000, error=SlowDown("too many requests"))  # type: ignore[arg-type]
    monkeypatch.setattr(type(bucket), "open", breaks.open)
    with pytest.raises(LLMStartError, match="could not be fetched: SlowDown: too many requests; the next try goes on"):
        fetch(SOURCE, tmp_path, told)


def test_an_unknown_store_is_told(tmp_path: Path, told: Told) -> None:
    with pytest.raises(LLMStartError, match="this image cannot read nonsense://"):
        fetch("nonsense://bucket/other", tmp_path, told)


def test_a_cache_that_cannot_be_written_is_told(bucket: Any, tmp_path: Path, told: Told) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LLMStartError, match="could not be fetched into"):
        fetch(SOURCE, tmp_path / "file", told)


# ------------------------------------------------------------------------------------------------- Hugging Face's hub


class NoConnection(Exception):
    """As the hub's HTTP library has it: no OSError."""


class OfHub(Exception):
    """Base of the hub's errors, with the names that are asked for."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hub's library, as far as it is used; nobody answers."""
    names = ("HfHubHTTPError", "GatedRepoError", "LocalEntryNotFoundError", "RepositoryNotFoundError")
    errors = types.SimpleNamespace(**{name: type(name, (OfHub,), {}) for name in (*names, "RevisionNotFoundError")})

    class Api:
        def model_info(self, name: str, **_: Any) -> Any:
            raise NoConnection("connection refused")

    def snapshot_download(name: str, *, cache_dir: Path, **_: Any) -> str:
        if not (cache_dir / name).is_dir():
            raise errors.LocalEntryNotFoundError("and it is not in the cache")
        return str(cache_dir / name)

    library = types.ModuleType("huggingface_hub")
    vars(library).update(HfApi=Api, snapshot_download=snapshot_download, errors=errors)
    bars = types.ModuleType("tqdm.auto")
    vars(bars).update(tqdm=object)
    for name, module in {"huggingface_hub": library, "huggingface_hub.errors": errors, "tqdm.auto": bars}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return library


def test_without_the_hub_a_model_of_the_cache_is_served(hub: Any, tmp_path: Path, told: Told) -> None:
    (tmp_path / "hub" / "org" / "model").mkdir(parents=True)
    assert fetch("org/model", tmp_path, told) == tmp_path / "hub" / "org" / "model"


def test_without_the_hub_a_model_that_is_not_in_the_cache_says_what_to_do(hub: Any, tmp_path: Path, told: Told) -> None:
    with pytest.raises(LLMStartError, match=r"the Hugging Face hub cannot be reached for org/model, and .* does not"):
        fetch("org/model", tmp_path, told)
