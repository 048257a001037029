from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pierhead import Settings
from pierhead.edge import logs
from pierhead.edge.admission import Admission
from pierhead.edge.edge import Edge
from pierhead.edge.logs import JsonFormatter
from pierhead.metrics import RuntimeMetrics
from pierhead.request import CURRENT, RequestContext


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what `logs.configure` changes for the whole process."""
    monkeypatch.setenv("GRPC_VERBOSITY", "ERROR")
    root = logging.getLogger()
    handlers, level, factory = root.handlers[:], root.level, logging.getLogRecordFactory()
    yield
    if logs._handler is not None:
        logs._handler.close()
    logs._handler, logs._requests = None, None
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.setLogRecordFactory(factory)


class Written(io.StringIO):
    """A stream, and its lines once everything put has been written."""

    def lines(self) -> list[dict[str, Any]]:
        logging.getLogger().handlers[0].flush()
        return [json.loads(line) for line in self.getvalue().splitlines()]


@pytest.fixture
def written(restored: None) -> Written:
    stream = Written()
    logs.configure(Settings(service="ranker", replica="ranker-1", access_log="all"), stream)
    return stream


def line(level: int = logging.INFO, message: str = "hello %s", **extra: object) -> dict[str, str]:
    record = logging.LogRecord("pierhead", level, __file__, 1, message, ("wörld\n",), None)
    vars(record).update(extra)
    formatted = JsonFormatter("ranker", "ranker-1").format(record)
    assert "\n" not in formatted
    parsed: dict[str, str] = json.loads(formatted)
    return parsed


def test_a_line_is_json() -> None:
    parsed = line()
    assert parsed["message"] == "hello wörld\n"
    assert (parsed["level"], parsed["service"], parsed["replica"]) == ("info", "ranker", "ranker-1")
    assert parsed["time"].endswith("+00:00")
    assert "request_id" not in parsed
    failed = line(logging.ERROR, exc_info=(ValueError, ValueError("boom"), None))
    assert failed["error"].endswith("ValueError: boom")


class Keeping(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class TestRequestId:
    async def test_it_is_the_request_that_made_the_record_not_the_one_that_formats_it(self, written: Written) -> None:
        """A service that puts a buffering handler before ours must not get the id of the request that flushes it."""
        records: list[logging.LogRecord] = []
        logger = logging.getLogger("buffered")
        logger.addHandler(Keeping(records))
        logger.propagate = False

        async def work(name: str) -> None:
            CURRENT.set(RequestContext(name, 0))
            logger.info("at work")

        await asyncio.gather(work("request-1"), work("request-2"))
        CURRENT.set(RequestContext("another", 0))
        for record in records:
            logging.getLogger().handle(record)
        assert [parsed["request_id"] for parsed in written.lines()] == ["request-1", "request-2"]


class TestRequestLog:
    async def test_a_request_has_one_line(self, written: Written) -> None:
        edge = Edge(Settings(), Admission(1), RuntimeMetrics())
        edge.finished("GET /items/{id}", "200", 0.0012345, "mine")
        edge.finished("pierhead.echo.v1.Echo/Echo", "OK", 0.1, "request-1")
        parsed, current = written.lines()
        assert current["request_id"] == "request-1"
        assert parsed.pop("time").endswith("+00:00")
        assert parsed == {
            "level": "info",
            "logger": "pierhead.access",
            "service": "ranker",
            "replica": "ranker-1",
            "method": "GET /items/{id}",
            "status": "200",
            "duration_ms": 1.234,
            "request_id": "mine",
        }

    @pytest.mark.parametrize("text", ['a"b', "a\\b", "GET /grüezi", "tab\t"])
    def test_what_it_names_stays_within_its_field(self, written: Written, text: str) -> None:
        Edge(Settings(), Admission(1), RuntimeMetrics()).finished(text, "200", 0, text)
        (parsed,) = written.lines()
        assert (parsed["method"], parsed["request_id"]) == (text, text)

    @pytest.mark.parametrize("settings", [Settings(access_log="off"), Settings(log_level="warning")])
    def test_it_can_be_turned_off(self, restored: None, settings: Settings) -> None:
        stream = Written()
        logs.configure(settings, stream)
        Edge(settings, Admission(1), RuntimeMetrics()).finished("GET /", "200", 0, "mine")
        assert stream.lines() == []

    def test_errors_slow_requests_and_a_sample_have_lines(self, restored: None) -> None:
        stream = Written()
        settings = Settings(slow_request_s=2.0)
        logs.configure(settings, stream)
        edge = Edge(settings, Admission(1), RuntimeMetrics())
        for status, seconds, request_id in (
            ("200", 1.9, "other"),
            ("304", 0.1, "other"),
            ("OK", 0.1, "other"),
            ("OK", 0.1, "my-request-25"),  # crc32 below 1 % of 2**32
            ("404", 0.1, "not found"),
            ("RESOURCE_EXHAUSTED", 0.1, "refused"),
            ("200", 2.0, "slow"),
        ):
            edge.finished("GET /", status, seconds, request_id)
        assert [line["request_id"] for line in stream.lines()] == ["my-request-25", "not found", "refused", "slow"]


class TestText:
    """Lines for people."""

    @pytest.fixture
    def text(self, restored: None) -> Callable[[], list[str]]:
        stream = io.StringIO()
        logs.configure(Settings(service="ranker", replica="ranker-1", access_log="all", log_encoding="text"), stream)

        def lines() -> list[str]:
            logging.getLogger().handlers[0].flush()
            return stream.getvalue().splitlines()

        return lines

    async def test_a_line_has_time_level_logger_request_and_message(self, text: Callable[[], list[str]]) -> None:
        logging.getLogger("of a service").warning("the shelf is %s", "empty")
        CURRENT.set(RequestContext("request-1", 0))
        logging.getLogger("of a service").info("at work")
        first, second = text()
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]{8}\.\d{3}\+00:00 WARNING of a service the shelf is empty", first)
        assert second.endswith("+00:00 INFO    of a service [request-1] at work")
        logging.getLogger("of a service").error("it failed", exc_info=ValueError("boom"))
        *_, third, traceback = text()
        assert third.endswith(" ERROR   of a service [request-1] it failed")
        assert traceback == "ValueError: boom"

    def test_a_request_has_one_line(self, text: Callable[[], list[str]]) -> None:
        Edge(Settings(), Admission(1), RuntimeMetrics()).finished("GET /items/{id}", "200", 0.0012345, "mine")
        (line,) = text()
        assert re.fullmatch(
            r"20\d\d-\d\d-\d\dT[\d:]{8}\.\d{3}\+00:00 INFO    pierhead.access \[mine\] "
            r"GET /items/\{id\} 200 1\.23[45] ms",
            line,
        )

    @pytest.mark.parametrize("sent", ["GET /a\nb", "a\rb", "a\x1b[2Jb"])
    def test_what_clients_send_makes_no_lines(self, text: Callable[[], list[str]], sent: str) -> None:
        Edge(Settings(), Admission(1), RuntimeMetrics()).finished(sent, "200", 0, sent)
        (line,) = text()
        assert line.isprintable()


def test_dropped_lines_are_reported(restored: None) -> None:
    stream = Written()
    logs.configure(Settings(service="ranker"), stream)
    assert logs._handler is not None
    logs._handler.writer.dropped = 7
    (parsed,) = stream.lines()
    assert (parsed["level"], parsed["service"]) == ("warning", "ranker")
    assert parsed["message"] == "7 log lines were dropped: they came faster than they could be written"
    assert logs.dropped() == 7
