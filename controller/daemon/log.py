"""Logs: one JSON object a line on standard output."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

FIELDS = ("kind", "service", "target", "outcome", "action", "method", "path", "status")
"""What `extra=` may carry."""


class JsonFormatter(logging.Formatter):
    """{"at", "level", "message", ...the record's own fields}."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line |= {name: value for name in FIELDS if (value := getattr(record, name, "")) != ""}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        # A lone surrogate has no form in UTF-8, so it is written as its escape.
        return json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace").decode()


def configure(level: str) -> None:
    """Send everything at `level` and above to standard output."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
