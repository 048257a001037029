"""Fetches models and adapters from a directory, the Hugging Face hub, or a bucket (s3://, gs://).

    fetch(source) --> a local directory, complete

Fetched files are kept in a cache directory that replicas share, usually a volume: one replica fetches, the others wait.
An interrupted fetch is resumed, even in the middle of a file. Blocks: call it in a thread. `ModelSource` is the
interface of what is fetched from.
"""

from __future__ import annotations

from pathlib import Path

from pierhead.llm.server.engine import Report
from pierhead.llm.server.errors import LLMStartError, SourceNotFoundError
from pierhead.llm.server.models.buckets import Bucket
from pierhead.llm.server.models.cache import cannot_keep
from pierhead.llm.server.models.download import download
from pierhead.llm.server.models.hub import Hub


def fetch(source: str, cache: Path, report: Report) -> Path:
    """A local directory with everything of `source`, which has one of LLMConfig's forms.

    Raises LLMStartError whose message says what to do, without the key that names the source; SourceNotFoundError if
    there is nothing of that name.
    """
    if source.startswith("/"):
        return _local(Path(source))
    try:
        return download(Bucket(source) if "://" in source else Hub(source), cache, report)
    except OSError as error:
        raise cannot_keep(source, cache, error) from error


def _local(directory: Path) -> Path:
    if not directory.exists():
        raise SourceNotFoundError(
            f"{directory} does not exist inside the container; mount it (volumes: in the compose "
            "file) or correct the path"
        )
    if directory.is_dir() and not any(directory.iterdir()):
        raise LLMStartError(f"{directory} is empty; put the model's files there, or mount another one")
    return directory
