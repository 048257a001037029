"""Logs to standard error: one line per record, as JSON or for people, with the id of the record's request.

Logging never waits for the stream: lines go through a `LineWriter`. The standard library's QueueHandler would do the
same for records, but is too slow for the line per request: creating a record costs five times the whole line's budget.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from json.encoder import encode_basestring
from typing import Any, TextIO

from pierhead.edge.line_writer import LineWriter
from pierhead.request import current_request
from pierhead.settings import Settings

RequestLog = Callable[[str, str, float, str], None]
"""Called at the end of a request with its method or route, status, seconds and request id."""

RequestLine = Callable[[str, str, str, float, str], str]
"""Formats that line from the time as text, method, status, milliseconds and request id."""

ACCESS_LOGGER = "pierhead.access"

_IDS = 2**32


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, service, replica, request_id, error."""

    def __init__(self, service: str, replica: str) -> None:
        super().__init__()
        self._names = {name: value for name, value in (("service", service), ("replica", replica)) if value}

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._names,
        }
        # Set when the record was made: the code that formats it may work on another request by then, or on none.
        request_id = getattr(record, "request_id", "")
        if request_id:
            line["request_id"] = request_id
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Formats a record for people: time, level, logger, [request id], message; a traceback follows on lines of its own.

    Without the names of service and replica: the reader has opened that replica's log.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        time_of_it = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = _text_line(
            time_of_it, record.levelname, record.name, getattr(record, "request_id", ""), record.getMessage()
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _text_line(time_of_it: str, level: str, logger: str, request_id: str, message: str) -> str:
    request = f" [{request_id}]" if request_id else ""
    return f"{time_of_it} {level:<7} {logger}{request} {message}"


class RecordFactory:
    """Creates log records with the id of their request."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        """`make`: the factory that was in force before."""
        self.make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        """A record of the former factory, with `request_id` set."""
        record = self.make(*args, **kwargs)
        request = current_request()
        record.request_id = request.request_id if request is not None else ""
        return record


class LineHandler(logging.Handler):
    """Formats records in the code that logs and passes the lines to a writer; errors are written at once."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging`."""
        try:
            self.writer.put(self.format(record), urgent=record.levelno >= logging.ERROR)
        except Exception:  # as in every handler: a line that cannot be formatted is reported, not raised
            self.handleError(record)

    def flush(self) -> None:
        """Write the buffered lines."""
        self.writer.flush()

    def close(self) -> None:
        """Write the buffered lines, for the last time. Called by `logging` at exit."""
        self.writer.close()
        super().close()


class RequestLines:
    """Writes the lines of requests that have ended: of all, or of errors, slow requests and a sample.

    The sample is made of the request ids alone, as in HAProxy, so a request of the sample has its line in every part.
    On the path of every request, hence without a log record.
    """

    def __init__(self, writer: LineWriter, settings: Settings) -> None:
        self._put = writer.put
        self._line = _text_request if settings.log_encoding == "text" else _json_request(settings)
        self._slow_s = settings.slow_request_s
        self._bound = _IDS if settings.access_log == "all" else round(settings.access_log_sample * _IDS)
        self._second = 0
        self._date = ""

    def __call__(self, method: str, status: str, seconds: float, request_id: str) -> None:
        """`method`: gRPC method or HTTP route as declared; `status`: HTTP status or the name of the gRPC one."""
        if (
            seconds < self._slow_s
            and (status == "OK" or status < "400")  # names of gRPC's other statuses come after digits
            and zlib.crc32(request_id.encode()) >= self._bound
        ):
            return
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second, self._date = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        time_of_it = f"{self._date}.{int((now - second) * 1000):03}+00:00"
        self._put(self._line(time_of_it, method, status, seconds * 1000, request_id))


def _json_request(settings: Settings) -> RequestLine:
    names = {"level": "info", "logger": ACCESS_LOGGER}
    names |= {"service": settings.service} if settings.service else {}
    names |= {"replica": settings.replica} if settings.replica else {}
    same = json.dumps(names, ensure_ascii=False)[1:-1]

    def line(time_of_it: str, method: str, status: str, duration_ms: float, request_id: str) -> str:
        return (
            f'{{"time": "{time_of_it}", {same}, "method": {encode_basestring(method)}, "status": "{status}", '
            f'"duration_ms": {duration_ms:.3f}, "request_id": {encode_basestring(request_id)}}}'
        )

    return line


def _text_request(time_of_it: str, method: str, status: str, duration_ms: float, request_id: str) -> str:
    if not method.isprintable() or not request_id.isprintable():  # a client's text must not start new lines
        method, request_id = encode_basestring(method), encode_basestring(request_id)
    return _text_line(time_of_it, "INFO", ACCESS_LOGGER, request_id, f"{method} {status} {duration_ms:.3f} ms")


_handler: LineHandler | None = None
_requests: RequestLog | None = None


def configure(settings: Settings, stream: TextIO | None = None) -> None:
    """Send all records of this process's root logger through the formatter. Called by `serve`, never at import."""
    global _handler, _requests
    # gRPC's core writes lines of its own, for example when connections end. Its errors are still written.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    writer = LineWriter(stream or sys.stderr, _complaint(settings))
    handler = LineHandler(writer)
    handler.setFormatter(_formatter(settings))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    factory = logging.getLogRecordFactory()
    if not isinstance(factory, RecordFactory):
        logging.setLogRecordFactory(RecordFactory(factory))
    wanted = settings.access_log != "off" and root.isEnabledFor(logging.INFO)
    if _handler is not None:
        _handler.close()
    _handler, _requests = handler, RequestLines(writer, settings) if wanted else None


def request_log() -> RequestLog | None:
    """The function that writes requests' lines; None if they are switched off, or if the runtime does not log."""
    return _requests


def dropped() -> int:
    """Lines that were not written: the buffer was full, or the stream closed."""
    return _handler.writer.dropped if _handler is not None else 0


def _formatter(settings: Settings) -> logging.Formatter:
    return TextFormatter() if settings.log_encoding == "text" else JsonFormatter(settings.service, settings.replica)


def _complaint(settings: Settings) -> Callable[[int], str]:
    formatter = _formatter(settings)

    def complain(count: int) -> str:
        message = "%d log lines were dropped: they came faster than they could be written"
        return formatter.format(logging.LogRecord("pierhead", logging.WARNING, __file__, 0, message, (count,), None))

    return complain
