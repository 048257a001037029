"""Stores with buckets, as processes on loopback that speak S3's and Google's protocols: moto and gcp-storage-emulator.

Everything goes in by plain HTTP, so that no library which is under test has a part in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

from tests.harness.ports import free_port
from tests.harness.waiting import eventually

ANSWER_S = 20.0
_SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=tests/20260101/us-east-1/s3/aws4_request"}
"""What moto takes for signed, as long as it does not look at keys."""
STARTED_WITHIN_S = 60.0


@dataclass
class Memory:
    """fsspec's in-memory file system, which other tests of the loader use as a bucket."""

    prefix: str = "memory://"

    @property
    def variables(self) -> Mapping[str, str]:
        return {}

    def make(self, bucket: str) -> None:
        self._files.mkdir(f"/{bucket}")

    def put(self, bucket: str, name: str, content: bytes) -> None:
        self._files.pipe(f"/{bucket}/{name}", content)

    def remove(self, bucket: str, name: str) -> None:
        self._files.rm(f"/{bucket}/{name}")

    def forget(self) -> None:
        """Removes everything: the process has one such file system."""
        self._files.store.clear()
        self._files.pseudo_dirs[:] = [""]

    @property
    def _files(self) -> Any:
        import fsspec

        return fsspec.filesystem("memory")


@dataclass
class S3:
    """moto's server. It accepts any key outside `looking_at_keys`."""

    url: str
    prefix: str = "s3://"

    @property
    def variables(self) -> Mapping[str, str]:
        # By name, like a store in the stack: with an address no library forms "<bucket>.<host>".
        endpoint = self.url.replace("127.0.0.1", "localhost")
        return {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "anything"}

    def make(self, bucket: str) -> None:
        _ask("PUT", f"{self.url}/{bucket}", headers=_SIGNED)

    def put(self, bucket: str, name: str, content: bytes) -> None:
        _ask("PUT", f"{self.url}/{bucket}/{quote(name)}", content, _SIGNED)

    def remove(self, bucket: str, name: str) -> None:
        _ask("DELETE", f"{self.url}/{bucket}/{quote(name)}", headers=_SIGNED)

    def publish(self, bucket: str) -> Mapping[str, str]:
        """Lets everybody read the bucket. Returns the environment of a reader without a key."""
        what = {"Effect": "Allow", "Principal": "*", "Action": ["s3:ListBucket", "s3:GetObject"]}
        where = {"Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]}
        policy = {"Version": "2012-10-17", "Statement": [what | where]}
        _ask("PUT", f"{self.url}/{bucket}?policy", json.dumps(policy).encode(), _SIGNED)
        return {"AWS_ENDPOINT_URL": self.url, "FSSPEC_S3": '{"anon": true}'}

    @contextmanager
    def looking_at_keys(self) -> Iterator[None]:
        """Inside the block every request is refused: the server knows no key."""
        _ask("POST", f"{self.url}/moto-api/reset-auth", b"0")
        try:
            yield
        finally:
            _ask("POST", f"{self.url}/moto-api/reset-auth", b"inf")


@dataclass
class GoogleStorage:
    """gcp-storage-emulator. It asks for no credentials."""

    url: str
    prefix: str = "gs://"

    @property
    def variables(self) -> Mapping[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.url}

    def make(self, bucket: str) -> None:
        named = json.dumps({"name": bucket}).encode()
        _ask("POST", f"{self.url}/storage/v1/b?project=tests", named, {"Content-Type": "application/json"})

    def put(self, bucket: str, name: str, content: bytes) -> None:
        where = f"{self.url}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
        _ask("POST", where, content)

    def remove(self, bucket: str, name: str) -> None:
        _ask("DELETE", f"{self.url}/storage/v1/b/{bucket}/o/{quote(name, safe='')}")

    def publish(self, bucket: str) -> Mapping[str, str]:
        """Returns the environment of a reader without a key; everybody may read anyway."""
        return {"STORAGE_EMULATOR_HOST": self.url, "FSSPEC_GS": '{"token": "anon"}'}


Store = Memory | S3 | GoogleStorage
"""Buckets that a test fills."""


@contextmanager
def moto(log: Path) -> Iterator[S3]:
    """Runs moto's server until the block is left."""
    port = free_port()
    with _running(["moto.server", "--port", str(port)], f"http://127.0.0.1:{port}/moto-api/", log):
        yield S3(f"http://127.0.0.1:{port}")


@contextmanager
def google_emulator(log: Path) -> Iterator[GoogleStorage]:
    """Runs gcp-storage-emulator until the block is left."""
    port = free_port()
    options = ["start", "--host", "127.0.0.1", "--port", str(port), "--in-memory"]
    with _running(["gcp_storage_emulator", *options], f"http://127.0.0.1:{port}/storage/v1/b?project=tests", log):
        yield GoogleStorage(f"http://127.0.0.1:{port}")


@contextmanager
def _running(module: list[str], page: str, log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        server = subprocess.Popen([sys.executable, "-m", *module], stdout=out, stderr=out, env=dict(os.environ))
    try:
        eventually(lambda: server.poll() is not None or _ask("GET", page), f"{page} answers", STARTED_WITHIN_S)
        assert server.poll() is None, log.read_text()[-2000:]
        yield
    finally:
        server.kill()
        server.wait(10)


def _ask(method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
    # Not urllib's own type, which has servers look for a form in it.
    named = {"Content-Type": "application/octet-stream", **(headers or {})}
    with urlopen(Request(url, body, named, method=method), timeout=ANSWER_S) as reply:
        content: bytes = reply.read()
    return content or b"-"
