"""One JSON object per line on standard error, the request's id on each that belongs to one."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TextIO

from pierhead.request import current_request
from pierhead.settings import Settings


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, service, replica, request_id, error."""

    def __init__(self, service: str, replica: str) -> None:
        super().__init__()
        self._service = service
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, str] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._service:
            line["service"] = self._service
        if self._replica:
            line["replica"] = self._replica
        request = current_request()
        if request is not None:
            line["request_id"] = request.request_id
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(settings: Settings, stream: TextIO | None = None) -> None:
    """Send everything of this process's root logger through the formatter. Called by `serve`, never at import."""
    # gRPC's core writes lines of its own, connections that end included. Its errors still come.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(settings.service, settings.replica))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
