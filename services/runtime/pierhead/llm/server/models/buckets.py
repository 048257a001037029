"""Models and adapters in buckets: s3://, gs://, and what else fsspec reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from pierhead.llm.server.errors import LLMStartError, SourceNotFoundError
from pierhead.llm.server.models.source import PartFile, SourceFile, in_a_line

CHUNK_BYTES = 8 * 1024 * 1024

_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; AWS_ENDPOINT_URL for a store other than Amazon's",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, a key's file inside the container",
}
"""What the libraries read, by scheme."""
_ZONAL = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
"""Unless this is "false", gcsfs asks by gRPC for a bucket's type before each read, which takes a minute where only
HTTPS gets through. Zonal buckets cannot be read without: a user's "true" stays."""


class Bucket:
    """Everything below a prefix of a bucket. Its file system object is its own: a shared one of fsspec would have the
    settings and credentials of its first user."""

    directory = "buckets"

    def __init__(self, name: str) -> None:
        self.name = name

    def files(self) -> list[SourceFile]:
        """The objects that are stored now. Raises SourceNotFoundError, LLMStartError."""
        files, root = self._opened
        files.invalidate_cache()  # else files are opened as an earlier listing had them
        try:
            found = list(_objects(files, root))
        except FileNotFoundError:
            found = []
        except Exception as error:  # libraries of buckets have errors of their own
            raise _cannot_list(self.name, error) from error
        if not found:
            raise SourceNotFoundError(f"nothing is stored below {self.name}; check bucket and prefix")
        return found

    def copy(self, file: SourceFile, at: int, part: PartFile) -> None:
        """Append an object's content from byte `at` on. Raises what the library raises."""
        with self._opened[0].open(file.path, "rb", block_size=CHUNK_BYTES, cache_type="none") as stream:
            stream.seek(at)
            while chunk := stream.read(CHUNK_BYTES):
                part.write(chunk)

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system, and the prefix in it. Raises LLMStartError."""
        if self.name.startswith("gs://"):
            os.environ.setdefault(_ZONAL, "false")  # read when gcsfs is imported
        try:
            import fsspec

            files, root = fsspec.core.url_to_fs(self.name, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            scheme = self.name.partition(":")[0]
            raise LLMStartError(f"{self.name}: this image cannot read {scheme}://: {error}") from error
        except Exception as error:  # credentials that cannot be read
            raise _cannot_list(self.name, error) from error
        return files, root


def _cannot_list(source: str, error: Exception) -> LLMStartError:
    variables = _VARIABLES.get(source.partition(":")[0])
    return LLMStartError(
        f"{source} cannot be listed: {in_a_line(error)}; check the bucket's name, and credentials and endpoint in the "
        f"service's environment{f' ({variables})' if variables else ''}"
    )


def _objects(files: Any, root: str) -> Iterator[SourceFile]:
    """Everything below a prefix. Raises what the library raises."""
    for path, details in sorted(files.find(root, detail=True).items()):
        if path.endswith("/") or details.get("type") == "directory":
            continue  # a folder of a console: an object without content whose name is the prefix of others
        if path != root and not path.startswith(root.rstrip("/") + "/"):
            continue  # a neighbour with the same beginning of its name
        relative = PurePosixPath(path[len(root) :].lstrip("/") or PurePosixPath(path).name)
        size = int(details.get("size") or 0)
        tag = next(
            (str(details[key]) for key in ("ETag", "generation", "etag", "mtime", "created") if key in details), ""
        )
        yield SourceFile(path, relative, size, f"{size} {tag}")
