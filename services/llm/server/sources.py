"""Where the model's files come from."""

from __future__ import annotations

import importlib
from pathlib import Path

from pierhead.llm_config import LLMConfig

from services.llm.server.engine import Report


def of(config: LLMConfig) -> str:
    """What the config names: a directory, a Hugging Face id, s3://... or gs://..."""
    return config.model_loading.model_source or config.model_loading.model_id


def fetch(source: str, cache: Path, report: Report) -> Path:
    """A local directory with everything of `source`. Blocks. Raises LLMStartError, SourceNotFoundError."""
    # Not before it is needed: the libraries that read hubs and buckets are large.
    loading = importlib.import_module("services.llm.server.loading")
    return Path(loading.fetch(source, cache, report))
