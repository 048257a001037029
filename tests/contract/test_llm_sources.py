"""What every source of a model does: a directory, the Hugging Face hub, a bucket. The images' libraries fetch from
servers on loopback that speak their protocols; where a library is not here, its source is skipped and says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pierhead.llm.server.errors import LLMStartError, SourceNotFoundError
from pierhead.llm.server.models import buckets, download
from pierhead.llm.server.models.loading import fetch

from tests.harness.bucket_stores import S3, GoogleStorage, Memory, Store, google_emulator, moto
from tests.harness.fetching import STEP_BYTES
from tests.harness.http_answers import sends, serving
from tests.harness.hub_server import HubServer, hub_server

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
SECRETS = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN")
ITS_OWN = (
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT",
    "FSSPEC_S3",
    "FSSPEC_GS",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_ROLE_ARN",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
)
_numbers = count()


@dataclass(frozen=True)
class Directories:
    """Models in directories of the replica."""

    prefix: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def make(self, bucket: str) -> None:
        Path(self.prefix, bucket).mkdir()

    def put(self, bucket: str, name: str, content: bytes) -> None:
        file = Path(self.prefix, bucket, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def remove(self, bucket: str, name: str) -> None:
        Path(self.prefix, bucket, name).unlink()


@dataclass(frozen=True)
class Origin:
    """A bucket, a directory or a namespace of the hub of a test's own, with a model below qwen/."""

    store: Store | HubServer | Directories
    name: str

    @property
    def model(self) -> str:
        return self.source("qwen")

    def source(self, prefix: str) -> str:
        """In the words of LLMConfig."""
        return f"{self.store.prefix}{self.name}/{prefix}"

    def put(self, name: str, content: bytes) -> None:
        self.store.put(self.name, name, content)

    def remove(self, name: str) -> None:
        self.store.remove(self.name, name)


LIBRARIES = {
    "directory": (),
    "hub": ("huggingface_hub", "aiohttp"),
    "memory": ("fsspec",),
    "s3": ("s3fs", "moto"),
    "gs": ("gcsfs", "gcp_storage_emulator"),
}  # fmt: skip


def missing(kind: str) -> str:
    absent = [name for name in LIBRARIES[kind] if importlib.util.find_spec(name) is None]
    return f"{kind}: not installed here: {', '.join(absent)}" if absent else ""


@pytest.fixture
def directory(tmp_path: Path) -> Directories:
    return Directories(f"{tmp_path}/")


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with hub_server() as hub:
        yield hub


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
    """An environment that says nothing of sources."""
    for name in ITS_OWN:
        monkeypatch.delenv(name, raising=False)
    for name, value in NOT_THIS_MACHINE_S.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture(params=LIBRARIES)
def origin(request: pytest.FixtureRequest, of_nobody: pytest.MonkeyPatch) -> Origin:
    """An origin, and the environment of a reader that has its key."""
    kind: str = request.param
    if why := missing(kind):
        pytest.skip(why)
    store: Store | HubServer | Directories = request.getfixturevalue(kind)
    for name, value in store.variables.items():
        of_nobody.setenv(name, value)
    made = Origin(store, f"bucket-{next(_numbers)}")
    store.make(made.name)
    for name, content in MODEL.items():
        made.put(f"qwen/{name}", content)
    return made


def silent(doing: str, done: float | None, total: float) -> None:
    """A report of progress that is not read."""


def of(*kinds: str) -> pytest.MarkDecorator:
    """Only these origins."""
    return pytest.mark.parametrize("origin", kinds, indirect=True)


fetched = of("hub", "memory", "s3", "gs")
from_servers = of("hub", "s3", "gs")
on_hub = of("hub")
on_s3 = of("s3")


def files_of(directory: Path) -> dict[str, bytes]:
    """What a fetch has brought; its own notes are not."""
    files = {str(file.relative_to(directory)): file for file in directory.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if not name.startswith(".pierhead-")}


# --------------------------------------------------------------------------------------------------- what is fetched


@fetched
def test_a_model_is_fetched_once_whole_and_with_progress(origin: Origin, tmp_path: Path) -> None:
    origin.put("qwen-large/config.json", b"a neighbour's")
    told: list[tuple[str, float | None, float]] = []
    found = fetch(origin.model, tmp_path, lambda *line: told.append(line))
    assert files_of(found) == MODEL
    size = sum(map(len, MODEL.values()))
    assert {(doing, total) for doing, _, total in told} == {(f"downloading {origin.model}", size)}
    done = [line[1] or 0 for line in told]
    assert done == sorted(done)
    assert done[-1] == size
    before = {name: (found / name).stat().st_ino for name in MODEL}
    told.clear()
    assert fetch(origin.model, tmp_path, lambda *line: told.append(line)) == found
    assert {name: (found / name).stat().st_ino for name in MODEL} == before
    assert not told


@of("memory", "s3", "gs")
def test_one_object_or_a_whole_bucket_is_a_source_too(origin: Origin, tmp_path: Path) -> None:
    found = fetch(origin.source("qwen/config.json"), tmp_path, silent)
    assert files_of(found) == {"config.json": MODEL["config.json"]}
    found = fetch(origin.source("").rstrip("/"), tmp_path, silent)
    assert files_of(found) == {f"qwen/{name}": content for name, content in MODEL.items()}


@fetched
def test_names_are_taken_as_they_are(origin: Origin, tmp_path: Path) -> None:
    names = ("part 1+2=3.bin", "%20.bin", "Gewichte für die Prüfung.bin", "a#1.bin", "b?c=d&e.bin", "[0]*.bin")
    for name in names:
        origin.put(f"odd/{name}", name.encode())
    assert files_of(fetch(origin.source("odd" if origin.store.prefix == "" else "odd/"), tmp_path, silent)) == {
        name: name.encode() for name in names
    }


@on_s3
def test_a_folder_of_a_console_is_no_file(origin: Origin, tmp_path: Path) -> None:
    origin.put("qwen/", b"")
    origin.put("qwen/weights/", b"")
    origin.put("qwen/empty.txt", b"")
    assert files_of(fetch(origin.model, tmp_path, silent)) == {**MODEL, "empty.txt": b""}


@fetched
def test_what_has_changed_is_fetched_and_what_is_gone_is_removed(origin: Origin, tmp_path: Path) -> None:
    """By the same process, which may remember what it has seen."""
    found = fetch(origin.model, tmp_path, silent)
    kept = (found / "tokenizer.json").stat().st_ino
    origin.remove("qwen/config.json")
    origin.put("qwen/weights/model.safetensors", WEIGHTS[::-1] + b"more")
    origin.put("qwen/new.json", b"[]")
    assert fetch(origin.model, tmp_path, silent) == found
    tokenizer = MODEL["tokenizer.json"]
    changed = {"weights/model.safetensors": WEIGHTS[::-1] + b"more", "new.json": b"[]", "tokenizer.json": tokenizer}
    assert files_of(found) == changed
    assert (found / "tokenizer.json").stat().st_ino == kept


@of("memory", "s3", "gs")
def test_an_object_that_changes_while_it_is_fetched_is_not_mixed(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "CHUNK_BYTES", STEP_BYTES)
    monkeypatch.setattr(download, "REPORT_S", 0.0)
    weights = "weights/model.safetensors"

    def change_it(doing: str, done: float | None, total: float) -> None:
        if done and done > total - len(WEIGHTS) // 2 and not changed:
            changed.append(done)
            origin.put(f"qwen/{weights}", WEIGHTS[::-1])

    changed: list[float] = []
    with pytest.raises(LLMStartError, match=f"{origin.name}/qwen/{weights}"):  # S3's library notices, Google's does not
        fetch(origin.model, tmp_path, change_it)
    assert changed
    found = fetch(origin.model, tmp_path, silent)
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


@contextlib.contextmanager
def replica(source: str, cache: Path, *, steps: bool = False, disk: str = "") -> Iterator[Replica]:
    """With `disk`, a size, the cache is a disk of its own."""
    command = [sys.executable, "-m", "tests.harness.fetching", source, str(cache), *["steps"][:steps]]
    if disk:
        mount = f'mount -t tmpfs -o size={disk} tmpfs "$1"; shift; exec "$@"'
        command = [*UNSHARE, "sh", "-ec", mount, "sh", str(cache), *command]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    ) as process:
        try:
            yield Replica(process)
        finally:
            process.kill()


@from_servers
def test_of_two_replicas_that_start_at_once_one_fetches_for_both(origin: Origin, tmp_path: Path) -> None:
    with replica(origin.model, tmp_path, steps=True) as first:
        assert first.next()[0] == f"downloading {origin.model}"
        with replica(origin.model, tmp_path) as second:
            assert second.next()[0] == f"waiting for another replica that downloads {origin.model}"
            ends = first.end(), second.end()
    assert ends[0] == ends[1]
    assert files_of(Path(ends[0]["path"])) == MODEL
    assert not second.downloaded


@from_servers
def test_a_replica_that_waits_continues_where_a_killed_one_has_come_to(origin: Origin, tmp_path: Path) -> None:
    with replica(origin.model, tmp_path, steps=True) as first, contextlib.ExitStack() as later:
        while first.next()[1] < len(MODEL["config.json"]) + len(MODEL["tokenizer.json"]) + 2 * STEP_BYTES:
            first.go_on()
        second = later.enter_context(replica(origin.model, tmp_path))
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


NOTHING_THERE = {
    "directory": "{source} does not exist inside the container; mount it",
    "hub": "{source} does not exist on the Hugging Face hub, or is private (then set HF_TOKEN)",
    "bucket": "nothing is stored below {source}; check bucket and prefix",
}


def test_a_source_that_does_not_exist_is_not_found(origin: Origin, tmp_path: Path) -> None:
    kind = {Directories: "directory", HubServer: "hub"}.get(type(origin.store), "bucket")
    for source in (origin.source("none"), f"{origin.store.prefix}nobody-s-bucket/qwen"):
        with pytest.raises(SourceNotFoundError, match=re.escape(NOTHING_THERE[kind].format(source=source))):
            fetch(source, tmp_path / "cache", silent)
    assert not (tmp_path / "cache").exists(), "nothing is kept of them"


@fetched
def test_too_little_room_is_an_error_before_anything_is_fetched(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=1000))
    told = refused(origin.model, tmp_path)
    assert f"{origin.model} needs 0.0 GiB and {tmp_path}" in told
    assert "has 0.0 GiB free; enlarge the cache volume, or remove models from it" in told
    assert not list(tmp_path.rglob("*.safetensors*"))


UNSHARE = ("unshare", "--map-root-user", "--mount")


def has_mounts_of_its_own() -> bool:
    return (
        shutil.which("unshare") is not None
        and not subprocess.run([*UNSHARE, "true"], stderr=subprocess.DEVNULL, check=False).returncode
    )


@pytest.mark.skipif(not has_mounts_of_its_own(), reason="a user may not mount here")
@from_servers
def test_a_disk_that_gets_full_is_an_error_that_says_which(origin: Origin, tmp_path: Path) -> None:
    """A disk of 8 MiB, and somebody else who fills it during the download."""
    with replica(origin.model, tmp_path, steps=True, disk="8m") as first:
        first.next()
        seen = Path(f"/proc/{first.process.pid}/root{tmp_path}")
        with contextlib.suppress(OSError), (seen / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        end = first.end()
    assert end["error"] == (
        f"no space left in {tmp_path} for {origin.model}; enlarge the cache volume, or remove models from it"
    )


@fetched
def test_a_file_that_lost_its_content_is_fetched_again(origin: Origin, tmp_path: Path) -> None:
    """A machine that loses its power may keep a name and no content."""
    weights = fetch(origin.model, tmp_path, silent) / "weights" / "model.safetensors"
    weights.write_bytes(b"")
    assert files_of(fetch(origin.model, tmp_path, silent)) == MODEL


@on_s3
def test_a_key_that_the_store_does_not_know_is_an_error(origin: Origin, tmp_path: Path) -> None:
    assert isinstance(origin.store, S3)
    with origin.store.looking_at_keys():
        error = refused(origin.model, tmp_path)
    assert (
        f"{origin.model} cannot be listed: PermissionError: The AWS Access Key Id you provided does not exist" in error
    )
    assert "check the bucket's name" in error
    assert "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" in error


@on_s3
def test_while_a_store_cannot_be_asked_what_the_cache_has_is_served(origin: Origin, tmp_path: Path) -> None:
    assert isinstance(origin.store, S3)
    found = fetch(origin.model, tmp_path, silent)
    with origin.store.looking_at_keys():
        assert fetch(origin.model, tmp_path, silent) == found
        (found / ".pierhead-whole").unlink()
        refused(origin.model, tmp_path)


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
    origin: Origin, tmp_path: Path, of_nobody: pytest.MonkeyPatch, variables: dict[str, str | None], error: str
) -> None:
    for name, value in variables.items():
        of_nobody.delenv(name) if value is None else of_nobody.setenv(name, value)
    told = refused(origin.model, tmp_path)
    assert f"{origin.model} cannot be listed: " in told
    assert error in told
    assert "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; AWS_ENDPOINT_URL" in told


@of("s3", "gs")
def test_a_public_bucket_is_read_without_a_key(origin: Origin, tmp_path: Path, of_nobody: pytest.MonkeyPatch) -> None:
    """And without gRPC, for which there is no server here: gcsfs would try it for minutes."""
    assert isinstance(origin.store, S3 | GoogleStorage)
    for name in origin.store.variables:
        of_nobody.delenv(name)
    for name, value in origin.store.publish(origin.name).items():
        of_nobody.setenv(name, value)
    with replica(origin.model, tmp_path) as reader:  # a process of its own: some is read when modules are imported
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


# -------------------------------------------------------------------------------------------------- Hugging Face's hub


@pytest.fixture
def at_hub(origin: Origin) -> Iterator[HubServer]:
    """The origin's hub, which works again after the test."""
    assert isinstance(origin.store, HubServer)
    origin.store.works_again()
    yield origin.store
    origin.store.works_again()


@on_hub
def test_a_revision_is_a_source_of_its_own(origin: Origin, at_hub: HubServer, tmp_path: Path) -> None:
    repository = at_hub.repositories[origin.model]
    first = repository.names["main"]
    repository.commit({"config.json": b"of a branch"}, "fix/a-branch")
    repository.commit({"config.json": b"of now"})
    found = {each: fetch(f"{origin.model}{each}", tmp_path, silent) for each in ("", f"@{first}", "@fix/a-branch")}
    assert files_of(found[f"@{first}"]) == MODEL
    assert files_of(found["@fix/a-branch"]) == {"config.json": b"of a branch"}
    assert files_of(found[""]) == {"config.json": b"of now"}
    told = refused(f"{origin.model}@v9", tmp_path, SourceNotFoundError)
    assert told == (
        f"{origin.model} has no revision v9 on the Hugging Face hub; correct what stands behind the @, a branch, a tag "
        "or a commit"
    )


@on_hub
@pytest.mark.usefixtures("at_hub")
def test_other_forms_of_the_same_weights_are_not_fetched(origin: Origin, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "model.gguf", "onnx/model.onnx", "original/consolidated.00.pth"):
        origin.put(f"qwen/{name}", b"the same")
        origin.put(f"bare/{name}", b"the only")
    assert files_of(fetch(origin.model, tmp_path, silent)) == MODEL
    assert "pytorch_model.bin" in files_of(fetch(origin.source("bare"), tmp_path, silent))


@on_hub
@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_a_download_that_is_cut_continues_where_it_was_cut(
    origin: Origin, at_hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reset: bool
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", STEP_BYTES)
    weights = "weights/model.safetensors"
    for name in ("config.json", "tokenizer.json"):
        origin.remove(f"qwen/{name}")
    at_hub.cuts = [(3 * STEP_BYTES, is_reset)]
    cut = 3 * STEP_BYTES
    if is_reset:  # the library does not try again by itself
        told = refused(origin.model, tmp_path)
        assert f"{weights} of {origin.model} could not be fetched: ReadError: " in told
        assert told.endswith("; the next try continues from there")
        (part,) = tmp_path.rglob("*.pierhead-part")
        cut = part.stat().st_size
    found = fetch(origin.model, tmp_path, silent)
    assert files_of(found) == {weights: WEIGHTS}
    assert at_hub.bodies(weights)[-1] == cut
    assert not list(tmp_path.rglob("*.pierhead-part"))


@on_hub
def test_a_file_of_xet_is_fetched_by_it_and_continued_by_http(
    origin: Origin, at_hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Xet's own server is not here: its part is a function that counts as the library's does."""
    from huggingface_hub import file_download
    from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

    class Report(NamedTuple):
        total_bytes_completed: int
        total_transfer_bytes_completed: int
        total_bytes: int
        total_bytes_completion_rate: float
        total_transfer_bytes_completion_rate: float

    def xet_get(
        *, incomplete_path: Path, expected_size: int, tqdm_class: type, xet_file_data: Any, headers: Any
    ) -> None:
        assert (xet_file_data.file_hash, headers["authorization"]) == (
            hashlib.sha256(WEIGHTS).hexdigest(),
            f"Bearer {TOKEN}",
        )
        incomplete_path.write_bytes(WEIGHTS)
        bars = {"reconstruction_desc": "a", "total": expected_size, "log_level": 30, "tqdm_class": tqdm_class}
        with XetDownloadProgressReporter(**bars) as reporter:
            for done in (1000, expected_size):
                reporter.update_progress(Report(done, done // 2, expected_size, 1.0, 1.0))

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(file_download, "xet_get", xet_get)
    monkeypatch.setattr(download, "REPORT_S", 0.0)
    at_hub.by_xet = True
    told: list[float | None] = []
    assert files_of(fetch(origin.model, tmp_path, lambda _, done, __: told.append(done))) == MODEL
    small = len(MODEL["config.json"]) + len(MODEL["tokenizer.json"])
    assert told[-2:] == [small + 1000, small + len(WEIGHTS)]
    assert not at_hub.bodies("weights/model.safetensors")


TOKEN = "hf_of-a-reader"
"""What the hub's repositories ask for in these tests."""


GATED = "{model} is gated on the Hugging Face hub"
UNKNOWN = "{model} does not exist on the Hugging Face hub, or is private"
NO_ACCESS = "the account of HF_TOKEN has no access to it"
REFUSED = "the Hugging Face hub does not accept HF_TOKEN for {model}: Invalid credentials in Authorization header"


@on_hub
@pytest.mark.parametrize(
    ("gated", "token", "error", "what_to_do"),
    [
        (True, "", GATED, ": accept its licence there, and set HF_TOKEN in the service's environment"),
        (
            True, "hf_of-another", f"{GATED}, and {NO_ACCESS}",
            ": accept its licence there with that account, or set another account's token",
        ),
        (False, "", UNKNOWN, ' (then set HF_TOKEN); a directory begins with "/"'),
        (False, "hf_of-another", UNKNOWN, f' and {NO_ACCESS}; a directory begins with "/"'),
        (False, "invalid-token", REFUSED, "; set a valid one, or none for a public model"),
    ],
    ids=["gated", "gated, another account", "private", "private, another account", "no token"],
)  # fmt: skip
def test_a_model_that_may_not_be_read_says_what_is_needed(
    origin: Origin,
    at_hub: HubServer,
    tmp_path: Path,
    of_nobody: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gated: bool,
    token: str,
    error: str,
    what_to_do: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    repository = at_hub.repositories[origin.model]
    repository.token, repository.gated = TOKEN, gated
    if token:
        of_nobody.setenv("HF_TOKEN", token)
    assert refused(origin.model, tmp_path, LLMStartError) == error.format(model=origin.model) + what_to_do
    of_nobody.setenv("HF_TOKEN", TOKEN)
    assert files_of(fetch(origin.model, tmp_path, silent)) == MODEL
    at_the_cdn = {each.token for each in at_hub.asked if each.path.startswith("/cdn/")}
    assert at_the_cdn == {""}, "the token stays at the hub"
    assert TOKEN not in caplog.text


@on_hub
def test_a_file_that_is_listed_and_missing_is_named(origin: Origin, at_hub: HubServer, tmp_path: Path) -> None:
    at_hub.missing.add("tokenizer.json")
    told = refused(origin.model, tmp_path)
    assert f"tokenizer.json of {origin.model} could not be fetched: " in told
    assert "Entry Not Found" in told


@on_hub
def test_a_hub_that_breaks_down_during_a_download_is_an_error(
    origin: Origin, at_hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "REPORT_S", 0.0)
    with pytest.raises(
        LLMStartError, match=r"tokenizer\.json of .* could not be fetched: HfHubHTTPError: .*503"
    ) as caught:
        fetch(origin.model, tmp_path, lambda *_: setattr(at_hub, "status", 503))
    assert "\n" not in str(caught.value)
    at_hub.works_again()
    assert files_of(fetch(origin.model, tmp_path, silent)) == MODEL
    assert not at_hub.bodies("config.json"), "it was there"


@on_hub
@pytest.mark.usefixtures("origin")
def test_a_name_that_no_model_can_have_is_an_error(tmp_path: Path) -> None:
    assert refused("models--qwen", tmp_path).startswith("models--qwen is no model of the hub: HFValidationError: ")


@on_hub
def test_while_the_hub_is_down_what_the_cache_has_is_served(
    origin: Origin, at_hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    at_hub.status = 503
    told = refused(origin.model, tmp_path)
    assert f"the Hugging Face hub cannot be reached for {origin.model}: " in told
    assert "503" in told
    assert told.endswith("check the network of the container, or mount the model's directory and name that")
    at_hub.status = 0
    origin.put("qwen/pytorch_model.bin", b"not needed")
    found = fetch(origin.model, tmp_path, silent)
    at_hub.status = 503
    assert fetch(origin.model, tmp_path, silent) == found
    assert "what was fetched before is served" in caplog.text
    assert files_of(found) == MODEL


@on_hub
def test_a_part_of_a_model_is_not_served_while_the_hub_is_down(
    origin: Origin, at_hub: HubServer, tmp_path: Path
) -> None:
    at_hub.missing.add("weights/model.safetensors")
    refused(origin.model, tmp_path)
    at_hub.status = 503
    assert "cannot be reached" in refused(origin.model, tmp_path)


@on_hub
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "offline mode is enabled"),
        ({"HF_ENDPOINT": NOBODY}, "ConnectError: "),
        ({"HTTP_PROXY": "http://me:secret@127.0.0.1:1", "NO_PROXY": ""}, "ConnectError: "),
    ],
    ids=["offline", "nobody at the endpoint", "nobody at the proxy"],
)  # fmt: skip
def test_without_a_network_the_cache_is_enough(
    origin: Origin,
    at_hub: HubServer,
    tmp_path: Path,
    of_nobody: pytest.MonkeyPatch,
    variables: dict[str, str],
    words: str,
) -> None:
    for name, value in variables.items():
        of_nobody.setenv(name, value)
    with replica(origin.model, tmp_path) as first:  # a process of its own: the library reads its settings once
        told = first.end()["error"]
    assert f"the Hugging Face hub cannot be reached for {origin.model}: " in told
    assert words in told
    assert "secret" not in told
    for name in variables:
        of_nobody.delenv(name)
    of_nobody.setenv("HF_ENDPOINT", at_hub.url)
    found = fetch(origin.model, tmp_path, silent)
    for name, value in variables.items():
        of_nobody.setenv(name, value)
    with replica(origin.model, tmp_path) as second:
        assert second.end() == {"path": str(found)}


@on_hub
def test_the_hub_is_reached_through_a_proxy(
    origin: Origin, at_hub: HubServer, tmp_path: Path, of_nobody: pytest.MonkeyPatch
) -> None:
    repository = at_hub.repositories[origin.model]
    repository.commit({"config.json": b"{}"})  # small files come from the hub's own address
    for name, value in {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": at_hub.url, "NO_PROXY": ""}.items():
        of_nobody.setenv(name, value)
    with replica(origin.model, tmp_path) as reader:
        found = reader.end()
    assert files_of(Path(found["path"])) == {"config.json": b"{}"}


def refused(source: str, cache: Path, kind: type[LLMStartError] | None = None) -> str:
    """The error of a source that cannot be fetched: one line, without the reader's secrets."""
    with pytest.raises(kind or LLMStartError) as caught:
        fetch(source, cache, silent)
    told = str(caught.value)
    assert kind or not isinstance(caught.value, SourceNotFoundError)
    assert "\n" not in told
    assert not [name for name in SECRETS if os.environ.get(name) and os.environ[name] in told]
    return told
