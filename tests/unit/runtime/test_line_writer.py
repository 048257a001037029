from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from pierhead.edge.line_writer import LineWriter

FOREVER_S = 3600.0


class Pipe(io.StringIO):
    """A stream whose other end may be slow, and that tells when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.entered.set()
        assert self.open.wait(10)
        self.writes.append(text)
        return len(text)

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + 10
        while len(self.writes) < count:
            assert time.monotonic() < deadline, self.writes
            time.sleep(0.001)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.open.set()


def test_lines_are_written_together_and_in_order(pipe: Pipe) -> None:
    writer = LineWriter(pipe, linger_s=FOREVER_S)
    for number in range(100):
        writer.put(str(number))
    assert pipe.writes == []
    writer.flush()
    assert pipe.writes == ["".join(f"{number}\n" for number in range(100))]
    writer.close()


def test_lines_are_written_by_themselves_in_the_end(pipe: Pipe) -> None:
    writer = LineWriter(pipe, linger_s=0.001)
    writer.put("one")
    pipe.wait(1)
    writer.put("two")
    pipe.wait(2)
    assert pipe.writes == ["one\n", "two\n"]
    writer.close()


def test_an_urgent_line_does_not_wait_and_neither_do_those_before_it(pipe: Pipe) -> None:
    writer = LineWriter(pipe, linger_s=FOREVER_S)
    writer.put("one")
    writer.put("two", urgent=True)
    pipe.wait(1)
    assert pipe.writes == ["one\ntwo\n"]
    writer.close()


def test_a_stream_that_blocks_holds_up_no_caller_and_lines_without_room_are_dropped(pipe: Pipe) -> None:
    pipe.open.clear()
    writer = LineWriter(pipe, lambda dropped: f"{dropped} dropped", max_buffered=10, linger_s=0)
    writer.put("first", urgent=True)
    assert pipe.entered.wait(10)  # the thread is stuck
    for word in ("second", "th", "fourth", "5"):
        writer.put(word)
    assert writer.dropped == 1
    pipe.open.set()
    pipe.wait(2)
    assert "".join(pipe.writes) == "first\nsecond\nth\n5\n1 dropped\n"
    writer.put("after")
    writer.close()
    assert "".join(pipe.writes).endswith("1 dropped\nafter\n"), "and it is logged once"


def test_closing_writes_what_is_left_and_later_lines_at_once(pipe: Pipe) -> None:
    writer = LineWriter(pipe, linger_s=FOREVER_S)
    writer.put("one")
    writer.close()
    writer.put("two")
    assert "".join(pipe.writes) == "one\ntwo\n"
    assert not [thread for thread in threading.enumerate() if thread.name == "pierhead log"]


def test_a_stream_that_cannot_be_written_is_survived_and_counted(pipe: Pipe) -> None:
    writer = LineWriter(pipe, linger_s=FOREVER_S)
    pipe.write = _broken  # type: ignore[method-assign]
    writer.put("one")
    writer.put("two")
    writer.flush()
    assert writer.dropped == 2
    writer.close()


def _broken(text: str) -> int:
    raise BrokenPipeError


def test_a_destructor_may_log_while_a_line_is_put(pipe: Pipe) -> None:
    writer = LineWriter(pipe, linger_s=FOREVER_S)

    class Last(str):
        def __len__(self) -> int:
            if not words:
                words.append("last")
                writer.put("last")
            return 1

    words: list[str] = []
    writer.put(Last("x"))
    writer.close()
    assert sorted("".join(pipe.writes).split()) == ["last", "x"]


def test_a_process_that_ends_has_written_everything() -> None:
    program = (
        "import logging\n"
        "from pierhead import Settings\n"
        "from pierhead.edge import logs\n"
        "logs.configure(Settings())\n"
        "for number in range(1000): logging.info('%d', number)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr.count("\n") == 1000
    assert '"message": "999"' in ended.stderr.splitlines()[-1]


def test_a_forked_child_writes_its_own_lines_and_not_its_parent_s() -> None:
    program = (
        "import os, sys\n"
        "from pierhead.edge.line_writer import LineWriter\n"
        "writer = LineWriter(sys.stderr, linger_s=3600)\n"
        "writer.put('parent')\n"
        "if os.fork() == 0:\n"
        "    writer.put('child', urgent=True)\n"
        "    writer.close()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "writer.close()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ),
    )  # fmt: skip
    assert ended.stderr.splitlines() == ["child", "parent"]
