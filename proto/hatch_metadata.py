"""The tool's dependencies and extras are the runtime's and its own; one wheel has both. Its version names the build."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ToolMetadata(MetadataHookInterface):  # type: ignore[misc]
    """Sets what pyproject.toml declares as dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Take it from services/runtime/pyproject.toml, from the hook's own table, and from git."""
        root, own = Path(self.root), self.config
        runtime = tomllib.loads((root / "services/runtime/pyproject.toml").read_text(encoding="utf-8"))["project"]
        version_of = runpy.run_path(str(root / "controller/tool/project/version.py"))["version_of"]
        metadata["version"] = version_of(root)
        metadata["dependencies"] = [*runtime["dependencies"], *own["dependencies"]]
        metadata["optional-dependencies"] = {**runtime["optional-dependencies"], **own["optional-dependencies"]}
        metadata["entry-points"] = runtime["entry-points"]
