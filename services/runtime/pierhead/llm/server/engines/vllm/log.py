"""vLLM's log while it starts: its stages, and the lines that say why it failed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any, cast

from pierhead.llm.server.engine import Report
from pierhead.llm.server.engines.vllm.start import stage_of

_LOOK_EVERY_S = 0.5


class StartLog:
    """vLLM's log, also in a file, where this process can read what the engine's processes say while they start."""

    def __init__(self, place: Path) -> None:
        self._file = place / "log"
        self._file.touch()
        self._own = "VLLM_LOGGING_CONFIG_PATH" not in os.environ
        if self._own:
            configuration = place / "logging.json"
            configuration.write_text(json.dumps(_logging_also_to(self._file)))
            os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(configuration)

    def lines(self) -> list[str]:
        """The lines so far."""
        return self._file.read_text(errors="replace").splitlines()

    async def report_stages(self, report: Report) -> None:
        """Report each stage that the log begins, until cancelled."""
        seen, last = 0, "starting vLLM"
        report(last, None, 1.0)
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            lines = await asyncio.to_thread(self.lines)
            for line in lines[seen:]:
                stage = stage_of(line)
                if stage is not None and stage != last:
                    last = stage
                    report(stage, None, 1.0)
            seen = len(lines)

    def close(self) -> None:
        """Stop logging to the file. Processes that still have it open write to a file without a name."""
        if self._own:
            os.environ.pop("VLLM_LOGGING_CONFIG_PATH", None)
            for handler in list(logging.getLogger("vllm").handlers):
                if isinstance(handler, logging.FileHandler):
                    logging.getLogger("vllm").removeHandler(handler)
                    handler.close()


def _logging_also_to(file: Path) -> dict[str, Any]:
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    own = cast(dict[str, Any], json.loads(json.dumps(DEFAULT_LOGGING_CONFIG)))
    handler = {"class": "logging.FileHandler", "filename": str(file), "formatter": "vllm", "level": "INFO"}
    own["handlers"]["start"] = handler
    own["loggers"]["vllm"]["handlers"] = ["vllm", "start"]
    return own
