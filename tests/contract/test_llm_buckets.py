"""What comes from buckets, whichever store has them: a fake, and the images' libraries against servers on loopback that
speak the stores' protocols. Stores whose library is not here are skipped, and say what is missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pierhead.llm.server.errors import LLMStartError, SourceNotFoundError
from pierhead.llm.server.models import buckets
from pierhead.llm.server.models.loading import fetch

from tests.harness.bucket_stores import S3, GoogleStorage, Memory, Store, google_emulator, moto
from tests.harness.fetching import STEP_BYTES
from tests.harness.http_answers import sends, serving

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = bytes(range(256)) * (4 * STEP_BYTES // 256)
MODEL = {
    "config.json": b'{"model_type": "qwen2"}', "tokenizer.json": b"{}" * 1000, "weights/model.safetensors": WEIGHTS,
}  # fmt: skip
ANSWER_S = 60.0
NOBODY = "http://127.0.0.1:1"
"""An endpoint where nobody listens."""
NOT_THIS_MACHINE_S = {
    # Its settings, and servers of metadata that may be near it.
    "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true",
    "NO_GCE_CHECK": "true", "CLOUDSDK_CONFIG": "/nowhere", "NO_PROXY": "*",
}  # fmt: skip
ITS_OWN = (
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT",
    "FSSPEC_S3",
    "FSSPEC_GS",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_ROLE_ARN",
    "GOOGLE_APPLICATION_CREDENTIALS",
)
_numbers = count()


@dataclass(frozen=True)
class Bucket:
    """One of a test's own, with a model below qwen/."""

    store: Store
    name: str

    @property
    def model(self) -> str:
        return self.source("qwen")

    def source(self, prefix: str) -> str:
        return f"{self.store.scheme}://{self.name}/{prefix}"

    def put(self, name: str, content: bytes) -> None:
        self.store.put(self.name, name, content)

    def remove(self, name: str) -> None:
        self.store.remove(self.name, name)


LIBRARIES = {"memory": ("fsspec",), "s3": ("s3fs", "moto"), "gs": ("gcsfs", "gcp_storage_emulator")}


def missing(scheme: str) -> str:
    absent = [name for name in LIBRARIES[scheme] if importlib.util.find_spec(name) is None]
    return f"{scheme}: not installed here: {', '.join(absent)}" if absent else ""


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with moto(tmp_path_factory.mktemp("s3") / "log") as store:
        yield store


@pytest.fixture(scope="module")
def gs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleStorage]:
    with google_emulator(tmp_path_factory.mktemp("gs") / "log") as store:
        yield store


@pytest.fixture(scope="module")
def memory() -> Iterator[Memory]:
    store = Memory()
    yield store
    store.forget()


@pytest.fixture
def of_nobody(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that says nothing of buckets."""
    for name in ITS_OWN:
        monkeypatch.delenv(name, raising=False)
    for name, value in NOT_THIS_MACHINE_S.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture(params=LIBRARIES)
def bucket(request: pytest.FixtureRequest, of_nobody: pytest.MonkeyPatch) -> Bucket:
    """A bucket, and the environment of a reader that has its key."""
    scheme: str = request.param
    if why := missing(scheme):
        pytest.skip(why)
    store: Store = request.getfixturevalue(scheme)
    for name, value in store.variables.items():
        of_nobody.setenv(name, value)
    made = Bucket(store, f"bucket-{next(_numbers)}")
    store.make(made.name)
    for name, content in MODEL.items():
        made.put(f"qwen/{name}", content)
    return made


def silent(doing: str, done: float | None, total: float) -> None:
    """A report of progress that is not read."""


on_servers = pytest.mark.parametrize("bucket", ["s3", "gs"], indirect=True)
on_s3 = pytest.mark.parametrize("bucket", ["s3"], indirect=True)


def files_of(directory: Path) -> dict[str, bytes]:
    """What a fetch has brought; its own notes are not."""
    files = {str(file.relative_to(directory)): file for file in directory.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if name != ".pierhead-fetched.json"}


# --------------------------------------------------------------------------------------------------- what is fetched


def test_a_model_is_fetched_once_whole_and_with_progress(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("qwen-large/config.json", b"a neighbour's")
    told: list[tuple[str, float | None, float]] = []
    found = fetch(bucket.model, tmp_path, lambda *line: told.append(line))
    assert files_of(found) == MODEL
    size = sum(map(len, MODEL.values()))
    assert {(doing, total) for doing, _, total in told} == {(f"downloading {bucket.model}", size)}
    done = [line[1] or 0 for line in told]
    assert done == sorted(done)
    assert done[-1] == size
    before = {name: (found / name).stat().st_ino for name in MODEL}
    told.clear()
    assert fetch(bucket.model, tmp_path, lambda *line: told.append(line)) == found
    assert {name: (found / name).stat().st_ino for name in MODEL} == before
    assert not told


def test_one_object_or_a_whole_bucket_is_a_source_too(bucket: Bucket, tmp_path: Path) -> None:
    found = fetch(bucket.source("qwen/config.json"), tmp_path, silent)
    assert files_of(found) == {"config.json": MODEL["config.json"]}
    found = fetch(bucket.source("").rstrip("/"), tmp_path, silent)
    assert files_of(found) == {f"qwen/{name}": content for name, content in MODEL.items()}


def test_names_are_taken_as_they_are(bucket: Bucket, tmp_path: Path) -> None:
    names = ("part 1+2=3.bin", "%20.bin", "Gewichte für die Prüfung.bin", "a#1.bin", "b?c=d&e.bin", "[0]*.bin")
    for name in names:
        bucket.put(f"odd/{name}", name.encode())
    assert files_of(fetch(bucket.source("odd/"), tmp_path, silent)) == {name: name.encode() for name in names}


@on_s3
def test_a_folder_of_a_console_is_no_file(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("qwen/", b"")
    bucket.put("qwen/weights/", b"")
    bucket.put("qwen/empty.txt", b"")
    assert files_of(fetch(bucket.model, tmp_path, silent)) == {**MODEL, "empty.txt": b""}


def test_what_has_changed_is_fetched_and_what_is_gone_is_removed(bucket: Bucket, tmp_path: Path) -> None:
    """By the same process, which may remember what it has seen."""
    found = fetch(bucket.model, tmp_path, silent)
    kept = (found / "tokenizer.json").stat().st_ino
    bucket.remove("qwen/config.json")
    bucket.put("qwen/weights/model.safetensors", WEIGHTS[::-1] + b"more")
    bucket.put("qwen/new.json", b"[]")
    assert fetch(bucket.model, tmp_path, silent) == found
    tokenizer = MODEL["tokenizer.json"]
    changed = {"weights/model.safetensors": WEIGHTS[::-1] + b"more", "new.json": b"[]", "tokenizer.json": tokenizer}
    assert files_of(found) == changed
    assert (found / "tokenizer.json").stat().st_ino == kept


def test_an_object_that_changes_while_it_is_fetched_is_not_mixed(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "CHUNK_BYTES", STEP_BYTES)
    monkeypatch.setattr(buckets, "REPORT_S", 0.0)
    weights = "weights/model.safetensors"

    def change_it(doing: str, done: float | None, total: float) -> None:
        if done and done > total - len(WEIGHTS) // 2 and not changed:
            changed.append(done)
            bucket.put(f"qwen/{weights}", WEIGHTS[::-1])

    changed: list[float] = []
    with pytest.raises(LLMStartError, match=f"{bucket.name}/qwen/{weights}"):  # S3's library notices, Google's does not
        fetch(bucket.model, tmp_path, change_it)
    assert changed
    found = fetch(bucket.model, tmp_path, silent)
    assert files_of(found)[weights] == WEIGHTS[::-1]


# -------------------------------------------------------------------------------------------------- several replicas


@dataclass
class Replica:
    """A process that fetches. With `steps` it waits after each report for `go_on`."""

    process: subprocess.Popen[str]
    lines: list[Any] = field(default_factory=list)

    def next(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait(ANSWER_S)} after {self.lines}"
        self.lines.append(json.loads(line))
        return self.lines[-1]

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        """Let it run to its end, and return how it ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        while isinstance(self.next(), list):
            pass
        return self.lines[-1]

    @property
    def downloaded(self) -> list[float]:
        """The progress of its own download, as it reported it."""
        return [line[1] for line in self.lines if isinstance(line, list) and line[0].startswith("downloading")]


@contextmanager
def replica(source: str, cache: Path, *, steps: bool = False) -> Iterator[Replica]:
    command = [sys.executable, "-m", "tests.harness.fetching", source, str(cache), *["steps"][:steps]]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    ) as process:
        try:
            yield Replica(process)
        finally:
            process.kill()


@on_servers
def test_of_two_replicas_that_start_at_once_one_fetches_for_both(bucket: Bucket, tmp_path: Path) -> None:
    with replica(bucket.model, tmp_path, steps=True) as first:
        assert first.next()[0] == f"downloading {bucket.model}"
        with replica(bucket.model, tmp_path) as second:
            assert second.next()[0] == f"waiting for another replica that downloads {bucket.model}"
            ends = first.end(), second.end()
    assert ends[0] == ends[1]
    assert files_of(Path(ends[0]["path"])) == MODEL
    assert not second.downloaded


@on_servers
def test_a_replica_that_waits_continues_where_a_killed_one_has_come_to(bucket: Bucket, tmp_path: Path) -> None:
    with replica(bucket.model, tmp_path, steps=True) as first, ExitStack() as later:
        while first.next()[1] < len(MODEL["config.json"]) + len(MODEL["tokenizer.json"]) + 2 * STEP_BYTES:
            first.go_on()
        second = later.enter_context(replica(bucket.model, tmp_path))
        assert second.next()[0].startswith("waiting")
        (part,) = tmp_path.rglob("*.pierhead-part")
        (tokenizer,) = tmp_path.rglob("tokenizer.json")
        begun = part.stat().st_ino, tokenizer.stat().st_ino
        first.process.kill()
        found = Path(second.end()["path"])
    assert files_of(found) == MODEL
    assert ((found / "weights/model.safetensors").stat().st_ino, tokenizer.stat().st_ino) == begun, "the same files"
    size = sum(map(len, MODEL.values()))
    assert second.downloaded == [size], "the rest in one piece, on top of what was there"


# -------------------------------------------------------------------------------------------------------- refusals


def test_a_path_without_objects_and_a_missing_bucket_are_not_found(bucket: Bucket, tmp_path: Path) -> None:
    for source in (bucket.source("none"), f"{bucket.store.scheme}://nobody-s-bucket/qwen"):
        with pytest.raises(SourceNotFoundError, match=f"nothing is stored below {source}; check bucket and prefix"):
            fetch(source, tmp_path, silent)
    assert not list(tmp_path.rglob("*")), "nothing is kept of them"


@on_s3
def test_a_key_that_the_store_does_not_know_is_an_error(bucket: Bucket, tmp_path: Path) -> None:
    assert isinstance(bucket.store, S3)
    with bucket.store.looking_at_keys():
        error = refused(bucket.model, tmp_path)
    assert (
        f"{bucket.model} cannot be listed: PermissionError: The AWS Access Key Id you provided does not exist" in error
    )
    assert "check the bucket's name" in error
    assert "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" in error


@on_s3
@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "NoCredentialsError: Unable to locate credential"),
        (
            {"AWS_ENDPOINT_URL": NOBODY, "AWS_MAX_ATTEMPTS": "1"},
            f'Error: Could not connect to the endpoint URL: "{NOBODY}',
        ),
        ({"AWS_ENDPOINT_URL": "minio:9000"}, "ValueError: Invalid endpoint: minio:9000"),
    ],
    ids=["no key", "nobody at the endpoint", "no address"],
)
def test_a_store_that_cannot_be_asked_says_why_and_names_its_variables(
    bucket: Bucket, tmp_path: Path, of_nobody: pytest.MonkeyPatch, variables: dict[str, str | None], error: str
) -> None:
    for name, value in variables.items():
        of_nobody.delenv(name) if value is None else of_nobody.setenv(name, value)
    told = refused(bucket.model, tmp_path)
    assert f"{bucket.model} cannot be listed: " in told
    assert error in told
    assert "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; AWS_ENDPOINT_URL" in told


@on_servers
def test_a_public_bucket_is_read_without_a_key(bucket: Bucket, tmp_path: Path, of_nobody: pytest.MonkeyPatch) -> None:
    """And without gRPC, for which there is no server here: gcsfs would try it for minutes."""
    assert isinstance(bucket.store, S3 | GoogleStorage)
    for name in bucket.store.variables:
        of_nobody.delenv(name)
    for name, value in bucket.store.publish(bucket.name).items():
        of_nobody.setenv(name, value)
    with replica(bucket.model, tmp_path) as reader:  # a process of its own: some is read when modules are imported
        found = reader.end()
    assert files_of(Path(found["path"])) == MODEL


@pytest.mark.skipif(bool(missing("gs")), reason=missing("gs"))
def test_what_google_refuses_is_an_error_with_its_reason(tmp_path: Path, of_nobody: pytest.MonkeyPatch) -> None:
    """By an answer in Google's form: the emulator refuses no request."""
    words = "tests@example.iam.gserviceaccount.com does not have storage.objects.list access"
    body = json.dumps({"error": {"code": 403, "message": words}}).encode()
    with serving(lambda asked: sends(asked, 403, body, {"Content-Type": "application/json"})) as url:
        of_nobody.setenv("STORAGE_EMULATOR_HOST", url)
        told = refused("gs://models/qwen", tmp_path)
    assert "gs://models/qwen cannot be listed: OSError: Forbidden: b/models/o" in told
    assert words in told
    assert "check the bucket's name, and credentials and endpoint" in told
    assert "GOOGLE_APPLICATION_CREDENTIALS, a key's file inside the container" in told


def refused(source: str, cache: Path) -> str:
    """The error of a source that cannot be fetched, which is one line."""
    with pytest.raises(LLMStartError) as caught:
        fetch(source, cache, silent)
    assert not isinstance(caught.value, SourceNotFoundError)
    assert "\n" not in str(caught.value)
    return str(caught.value)
