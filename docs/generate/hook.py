"""MkDocs hook: adds the pages that are made of code, compose files and settings, so that none of them can drift."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from docs.generate import command, error_codes, metrics, rest_api, serve_block, settings, swarm_keys  # noqa: E402

PAGES: dict[str, Callable[[Path], str]] = {
    "reference/command.md": command.page,
    "reference/x-serve.md": serve_block.page,
    "reference/rest-api.md": rest_api.page,
    "reference/openapi.json": rest_api.document_text,
    "reference/error-codes.md": error_codes.page,
    "reference/metrics.md": metrics.page,
    "reference/settings.md": settings.page,
    "reference/swarm-keys.md": swarm_keys.page,
    "reference/changelog.md": lambda root: (root / "CHANGELOG.md").read_text(encoding="utf-8"),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each page of PAGES."""
    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page(ROOT)))
    return files
