"""One exchange with a socket: what is an answer, an error, an end, and what never reaches HAProxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controller.errors import RoutingError, RoutingUnreachable
from controller.routing import haproxy_socket
from controller.routing.haproxy_socket import CommandRefused, MasterSocket, RuntimeSocket, command
from tests.harness.waiting import PATIENCE_S


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # pytest's own directories are too deep for the path of a unix socket.
    with tempfile.TemporaryDirectory(prefix="pierhead-haproxy-") as directory:
        yield Path(directory)


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[Path]:
    """A socket that answers every connection with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    with tempfile.TemporaryDirectory(prefix="pierhead-socket-") as directory:
        path = Path(directory) / "s"
        async with await asyncio.start_unix_server(serve, path=str(path)):
            yield path


async def test_answers_come_in_order_and_without_severity() -> None:
    async with answering(b"\n[6]: one\ntwo\n\n\n# table\nrow\n\n") as path:
        assert await RuntimeSocket(path).ask_all(["a", "b", "c"]) == ["one\ntwo", "", "# table\nrow"]


@pytest.mark.parametrize("answer", [b"\n[3]: No such server.\n\n", b"\n[6]: Unknown command: 'x'.\n\n"])
async def test_an_error_quotes_the_command(answer: bytes) -> None:
    async with answering(answer) as path:
        with pytest.raises(CommandRefused, match=r"HAProxy refused `del server a/b`: (No such server|Unknown command)"):
            await RuntimeSocket(path).ask("del server a/b")


@pytest.mark.parametrize("answer", [b"", b"\n", b"\n[6]: half an ans", b"\nwhole\n\nhalf\n"])
async def test_an_end_before_the_last_answer_is_a_failure(answer: bytes) -> None:
    async with answering(answer) as path:
        with pytest.raises(RoutingUnreachable, match=r"closed .* before it had answered `one; two`"):
            await RuntimeSocket(path).ask_all(["one", "two"])


async def test_silence_is_a_failure_and_a_cancelled_exchange_closes_its_connection(run_dir: Path) -> None:
    path, asked, closed = run_dir / "s", asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        asked.set()
        assert await reader.read() == b""
        closed.set()
        writer.close()

    async with asyncio.timeout(PATIENCE_S), await asyncio.start_unix_server(serve, path=str(path)):
        with pytest.raises(RoutingUnreachable, match=r"did not answer `.*show info` on .* within 0.05 s"):
            await RuntimeSocket(path).ask("show info", timeout_s=0.05)
        await closed.wait()
        asked.clear()
        closed.clear()
        asking = asyncio.create_task(RuntimeSocket(path).ask("show info", timeout_s=3600.0))
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await closed.wait()


async def test_a_command_waits_for_a_free_connection_and_one_that_was_cancelled_is_not_sent(run_dir: Path) -> None:
    received: list[bytes] = []
    with contextlib.ExitStack() as held:
        server = held.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(run_dir / "s"))
        server.listen(0)
        waiting: list[socket.socket] = []
        with contextlib.suppress(BlockingIOError):  # until its queue is full
            while True:
                waiting.append(held.enter_context(socket.socket(socket.AF_UNIX)))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(run_dir / "s"))
        cancelled = asyncio.create_task(RuntimeSocket(run_dir / "s").ask("del server a/b"))
        asking = asyncio.create_task(RuntimeSocket(run_dir / "s").ask("show info"))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        for one in waiting:
            one.close()

        def accept() -> None:
            server.settimeout(PATIENCE_S)
            while not any(b"show info" in line for line in received):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(PATIENCE_S)
                    received.append(connection.recv(1000))
                    if received[-1]:
                        connection.sendall(b"\n[6]: here\n\n")

        await asyncio.to_thread(accept)
        assert await asking == "here"
    assert [line for line in received if line] == [b"set severity-output number;show info\n"]


async def test_the_last_command_gets_the_payload_and_no_message_shows_it(run_dir: Path) -> None:
    path, received = run_dir / "s", list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"\n\n"))
        writer.write(b"\ndone\n\n")
        writer.close()

    async with await asyncio.start_unix_server(serve, path=str(path)):
        assert await RuntimeSocket(path).ask("set ssl cert a", payload="one\n\n  \ntwo\n") == "done"
    assert received == [b"set severity-output number;set ssl cert a <<\none\ntwo\n\n"]
    with pytest.raises(RoutingUnreachable, match=r"for `set severity-output number;set ssl cert a <<`: ") as nobody:
        await RuntimeSocket(run_dir / "none").ask("set ssl cert a", payload="secret")
    assert "secret" not in str(nobody.value)


async def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy_socket, "_MASTER_AWAY_S", 0.05)
    with pytest.raises(RoutingUnreachable, match="cannot be reached"):
        await RuntimeSocket(tmp_path / "none").ask("show info")
    with pytest.raises(RoutingUnreachable, match=r"cannot be reached on .* for `reload`"):
        await MasterSocket(tmp_path / "none").reload()


async def test_a_line_is_one_command(tmp_path: Path) -> None:
    for line in ("show info;del server a/b", "show info\ndel server a/b"):
        with pytest.raises(RoutingError, match="more than one HAProxy command"):
            await RuntimeSocket(tmp_path / "none").ask(line)


@given(st.text(), st.text(alphabet=";\n\r\\ \t\v\u2028\x00", min_size=1), st.text())
@example("", "", "")
@example("a", "<<", "b")
def test_a_word_cannot_become_another_command(before: str, bad: str, after: str) -> None:
    with pytest.raises(RoutingError, match="cannot be part of a HAProxy command"):
        command("del", "server", before + bad + after)


async def test_a_reload_that_fails_says_why() -> None:
    log = b"Success=0\n--\n[NOTICE]   (1) : x\n[ALERT]    (1) : config : unknown keyword 'y'.\n\n"
    async with answering(log) as path:
        with pytest.raises(RoutingError, match=r"keeps the one it has: \[ALERT\] .*unknown keyword 'y'\.$"):
            await MasterSocket(path).reload()
    async with answering(b"") as path:
        with pytest.raises(RoutingUnreachable, match="without the outcome of `reload`"):
            await MasterSocket(path).reload()


async def test_leaving_workers_are_found() -> None:
    table = (
        b"#<PID>          <type>          <reloads>\n1               master          5 [failed: 0]\n# workers\n"
        b"31              worker          0\n# old workers\n27              worker          1\n"
        b"23              worker          2\n# programs\n\n"
    )
    async with answering(table) as path:
        assert await MasterSocket(path).leaving_workers() == (27, 23)
