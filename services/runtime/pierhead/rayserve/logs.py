"""What `serve.run` writes of the logger `ray.serve`: lines to stderr, as text or JSON, with replica and request.

INFO 2026-11-27 10:00:00,000 default_Model 1a2b3c4d <request id> -- Hello
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from pierhead.rayserve.context import _get_serve_request_context, current_replica
from pierhead.rayserve.schema import LoggingConfig

_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
"""What every record has; the rest are a user's `extra`."""


def write_logs() -> None:
    """Write the logger's lines, unless the program has set up logging itself."""
    logger = logging.getLogger("ray.serve")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines())
    handler.addFilter(_is_wanted)
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.propagate = False


def let_through(config: LoggingConfig | None) -> None:
    """Lower the logger's level to that of a deployment's config. The lines of others are filtered by their own."""
    logger = logging.getLogger("ray.serve")
    if config is not None and any(isinstance(each.formatter, _Lines) for each in logger.handlers):
        logger.setLevel(min(logger.level, _number(config.log_level)))


def _number(level: str | int) -> int:
    return level if isinstance(level, int) else logging.getLevelNamesMapping()[level]


def _config() -> LoggingConfig:
    replica = current_replica()
    found = None if replica is None else replica._deployment_config.logging_config
    return found or LoggingConfig()


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= _number(_config().log_level)


class _Lines(logging.Formatter):
    """Writes a record in the encoding of its deployment."""

    def format(self, record: logging.LogRecord) -> str:
        config, replica, request = _config(), current_replica(), _get_serve_request_context()
        text = super().format(record)  # with the traceback
        asctime = self.formatTime(record)
        extra = {name: value for name, value in vars(record).items() if name not in _PLAIN}
        extra |= {name: getattr(record, name, None) for name in config.additional_log_standard_attrs}
        if getattr(config.encoding, "value", config.encoding) == "JSON":
            line: dict[str, Any] = {
                "asctime": asctime,
                "levelname": record.levelname,
                "message": text,
                "filename": record.filename,
                "lineno": record.lineno,
                "timestamp_ns": int(record.created * 1e9),
            }
            if replica is not None:
                line |= {"deployment": f"{replica.app_name}_{replica.deployment}", "replica": replica.replica_tag}
                line |= {"application": replica.app_name}
            if request.request_id:
                line |= {"request_id": request.request_id, "route": request.route}
            return json.dumps(line | extra, default=str)
        where = "" if replica is None else f"{replica.app_name}_{replica.deployment} {replica.replica_tag}"
        words = [record.levelname, asctime, where, request.request_id, *map(str, extra.values())]
        return f"{' '.join(word for word in words if word)} -- {text}"
