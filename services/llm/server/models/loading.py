"""Where models and adapters come from: a directory, the Hugging Face hub, or a bucket (s3://, gs://).

    fetch(source) --> a local directory, complete

What is fetched is kept below a cache directory that replicas share, usually a volume: one fetches, the others wait for
it. A fetch that was interrupted goes on where it was, in the middle of a file, too. Blocks: to be called in a thread.
"""

from __future__ import annotations

from pathlib import Path

from services.llm.server.engine import Report
from services.llm.server.errors import LLMStartError
from services.llm.server.models.buckets import from_bucket
from services.llm.server.models.cache import cannot_keep
from services.llm.server.models.hub import from_hub


def fetch(source: str, cache: Path, report: Report) -> Path:
    """A local directory with everything of `source`, which has one of LLMConfig's forms.

    Raises LLMStartError with what a person can act on, but for the key that names the source; SourceNotFoundError where
    a bucket has nothing of that name.
    """
    if source.startswith("/"):
        return _local(Path(source))
    try:
        return from_bucket(source, cache, report) if "://" in source else from_hub(source, cache, report)
    except OSError as error:
        raise cannot_keep(source, cache, error) from error


def _local(directory: Path) -> Path:
    if not directory.exists():
        raise LLMStartError(
            f"{directory} does not exist inside the container; mount it (volumes: in the compose "
            "file) or correct the path"
        )
    if directory.is_dir() and not any(directory.iterdir()):
        raise LLMStartError(f"{directory} is empty; put the model's files there, or mount another one")
    return directory
