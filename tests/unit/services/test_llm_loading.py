"""Model sources: what an interrupted fetch leaves, and the refusals that need a file system which fails.

Buckets are fsspec's own in-memory file system: the interface that s3:// and gs:// are read through. What holds for
every source is in tests/contract/test_llm_sources.py.
"""

from __future__ import annotations

import errno
import io
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pytest
from pierhead.llm.server.errors import LLMStartError
from pierhead.llm.server.models.hub import needed
from pierhead.llm.server.models.loading import fetch
from pierhead.llm.server.models.source import SourceFile, in_a_line

SOURCE = "memory://bucket/qwen"
WEIGHTS = bytes(range(256)) * 400


def silent(doing: str, done: float | None, total: float) -> None:
    """A report of progress that is not read."""


@pytest.fixture
def bucket() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    files.pipe("/bucket/qwen/config.json", b"{}")
    files.pipe("/bucket/qwen/weights/model.safetensors", WEIGHTS)
    yield files
    files.store.clear()


@pytest.mark.parametrize(
    ("stored", "missing"),
    [
        ("model.safetensors pytorch_model.bin openvino/model.bin checkpoint-9/pytorch_model.bin",
         "pytorch_model.bin openvino/model.bin checkpoint-9/pytorch_model.bin"),
        ("model.safetensors 1_Pooling/config.json 2_Dense/config.json 2_Dense/pytorch_model.bin", ""),
        ("model.safetensors 2_Dense/model.safetensors 2_Dense/pytorch_model.bin", "2_Dense/pytorch_model.bin"),
        ("model.safetensors sparse_linear.pt colbert_linear.pt other.pt", "other.pt"),
        ("pytorch_model.bin onnx/model.onnx", ""),
    ],
)  # fmt: skip
def test_weights_of_a_part_that_are_there_in_one_form_alone_are_fetched(stored: str, missing: str) -> None:
    files = [SourceFile(path, PurePosixPath(path), 1, "a") for path in stored.split()]
    assert [each.path for each in files if each not in needed(files)] == missing.split()


def test_a_directory_is_taken_as_it_is_if_it_has_a_model(tmp_path: Path) -> None:
    directory = tmp_path / "qwen"
    with pytest.raises(LLMStartError, match="does not exist inside the container; mount it"):
        fetch(str(directory), tmp_path / "cache", silent)
    directory.mkdir()
    with pytest.raises(LLMStartError, match="is empty; put the model's"):
        fetch(str(directory), tmp_path / "cache", silent)
    (directory / "config.json").write_text("{}")
    assert fetch(str(directory), tmp_path / "cache", silent) == directory


class Breaks:
    """Opens the large object of file systems so that it breaks off at byte 50,000 until `broken` is False."""

    def __init__(self, files: Any) -> None:
        self.real = files.open
        self.error: Exception = ConnectionResetError("the line broke")
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
        if self.breaks.broken and self.tell() >= 50_000:
            raise self.breaks.error
        return super().read(1000)

    def seek(self, at: int, whence: int = 0) -> int:
        self.breaks.seeks.append(at)
        return super().seek(at, whence)


@pytest.fixture
def breaks(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> Breaks:
    made = Breaks(bucket)
    monkeypatch.setattr(type(bucket), "open", made.open)  # of the class: each fetch has a file system of its own
    return made


class SlowDown(Exception):
    """An error of a library's own: no OSError."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionResetError("the line broke"), "could not be fetched: ConnectionResetError: the line broke"),
        (SlowDown("too many requests"), "could not be fetched: SlowDown: too many requests; the next try continues"),
        (OSError(errno.ENOSPC, "No space left on device"), "no space left in .* enlarge the cache volume"),
    ],
    ids=["network", "library", "disk"],
)
def test_a_fetch_that_breaks_off_says_why(breaks: Breaks, tmp_path: Path, error: Exception, words: str) -> None:
    breaks.error = error
    with pytest.raises(LLMStartError, match=words):
        fetch(SOURCE, tmp_path, silent)


def test_an_interrupted_fetch_continues_within_the_file(
    bucket: Any, breaks: Breaks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LLMStartError, match="could not be fetched"):
        fetch(SOURCE, tmp_path, silent)
    breaks.broken = False
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=len(WEIGHTS) - 40_000))
    found = fetch(SOURCE, tmp_path, silent)
    assert (found / "weights" / "model.safetensors").read_bytes() == WEIGHTS, "what is there needs no room again"
    assert breaks.seeks == [0, 50_000]


def test_an_interrupted_fetch_of_another_content_is_not_continued(bucket: Any, breaks: Breaks, tmp_path: Path) -> None:
    with pytest.raises(LLMStartError, match="could not be fetched"):
        fetch(SOURCE, tmp_path, silent)
    breaks.broken = False
    assert len(list(tmp_path.rglob("*.pierhead-part"))) == 1
    bucket.pipe("/bucket/qwen/weights/model.safetensors", WEIGHTS[::-1])
    assert (fetch(SOURCE, tmp_path, silent) / "weights" / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert breaks.seeks == [0, 0]
    assert not list(tmp_path.rglob("*.pierhead-part"))


def test_sources_of_like_names_have_directories_of_their_own(bucket: Any, tmp_path: Path) -> None:
    bucket.pipe("/bucket/team_a/weights", b"one")
    bucket.pipe("/bucket/team/a/weights", b"two")
    one, two = fetch("memory://bucket/team_a", tmp_path, silent), fetch("memory://bucket/team/a", tmp_path, silent)
    assert ((one / "weights").read_bytes(), (two / "weights").read_bytes()) == (b"one", b"two")


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("source", "cache", "words"),
    [
        ("nonsense://bucket/other", "cache", "this image cannot read nonsense://"),
        (SOURCE, "file", "could not be fetched into"),
        ("org/model", "cache", "org/model: this image cannot read the Hugging Face hub: "),
    ],
    ids=["store", "cache", "hub"],
)
def test_a_source_that_cannot_be_had_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, cache: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(LLMStartError, match=words):
        fetch(source, tmp_path / cache, silent)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("two\n  lines", "ValueError: two lines"),
        ("no answer of http://me:secret@proxy:3128/", "ValueError: no answer of http://proxy:3128/"),
        ("404 for 'https://cdn/a?Signature=secret&Key=1'.", "ValueError: 404 for 'https://cdn/a'."),
        ("mail to me@example.com?", "ValueError: mail to me@example.com?"),
    ],
    ids=["lines", "password", "signature", "neither"],
)
def test_errors_of_libraries_are_told_in_a_line_without_secrets(error: str, told: str) -> None:
    assert in_a_line(ValueError(error)) == told
