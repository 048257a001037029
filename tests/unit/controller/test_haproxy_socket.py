"""One exchange with a socket: what is an answer, an error, an end, and what never reaches HAProxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import RoutingError, RoutingUnreachable
from controller.model.actions import AddServer, SetServerState, WriteRouting
from controller.model.spec import ProbeSpec, ServiceSpec
from controller.model.world import ServerState
from controller.routing import haproxy_socket
from controller.routing.haproxy import HAProxyRouter
from controller.routing.haproxy_socket import CommandRefused, MasterSocket, RuntimeSocket, command
from tests.fakes.fake_haproxy import FakeHAProxy


@contextlib.asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[Path]:
    """A socket that answers every connection with these bytes, or (None) never."""
    asked = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if answer is None:
            await asked.wait()
        else:
            writer.write(answer)
        writer.close()

    with tempfile.TemporaryDirectory(prefix="pierhead-socket-") as directory:
        path = Path(directory) / "s"
        server = await asyncio.start_unix_server(serve, path=str(path))
        try:
            yield path
        finally:
            asked.set()
            server.close()
            await server.wait_closed()


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


async def test_silence_is_a_failure() -> None:
    async with answering(None) as path:
        with pytest.raises(RoutingUnreachable, match=r"did not answer `.*show info` on .* within 0.05 s"):
            await RuntimeSocket(path).ask("show info", timeout_s=0.05)


async def test_the_event_loop_goes_on_during_an_exchange_and_one_that_is_given_up_ends() -> None:
    closed, asked = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        asked.set()
        assert await reader.read() == b""
        closed.set()
        writer.close()

    with tempfile.TemporaryDirectory(prefix="pierhead-socket-") as directory:
        path = Path(directory) / "s"
        async with await asyncio.start_unix_server(serve, path=str(path)):
            asking = asyncio.create_task(RuntimeSocket(path).ask("show info", timeout_s=60.0))
            await asyncio.wait_for(asked.wait(), 10.0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.wait_for(closed.wait(), 10.0)


async def test_what_was_given_up_is_not_said_any_more() -> None:
    said: list[bytes] = []
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said.append(await reader.read())
        closed.set()
        writer.close()

    with tempfile.TemporaryDirectory(prefix="pierhead-socket-") as directory:
        path = Path(directory) / "s"
        given_up = threading.Event()
        given_up.set()
        async with await asyncio.start_unix_server(serve, path=str(path)):
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(
                    haproxy_socket._talk, path, b"reload\n", time.monotonic() + 10.0, given_up, of_master=True
                )
            await asyncio.wait_for(closed.wait(), 10.0)
    assert said == [b""]


async def test_a_haproxy_without_a_place_for_one_more_connection_is_asked_when_it_has_one() -> None:
    with tempfile.TemporaryDirectory(prefix="pierhead-socket-") as directory, contextlib.ExitStack() as held:
        path = Path(directory) / "s"
        server = held.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(path))
        server.listen(0)
        while True:  # until its queue is full
            waiting = held.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            try:
                waiting.connect(str(path))
            except BlockingIOError:
                break
        asking = asyncio.create_task(RuntimeSocket(path).ask("show info"))

        def accept() -> None:
            server.settimeout(10.0)
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(0.1)
                    with contextlib.suppress(TimeoutError):
                        if connection.recv(1000):
                            connection.sendall(b"\n[6]: here\n\n")
                            return

        await asyncio.to_thread(accept)
        assert await asking == "here"


async def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy_socket, "_MASTER_AWAY_S", 0.05)
    with pytest.raises(RoutingUnreachable, match="cannot be reached"):
        await RuntimeSocket(tmp_path / "none").ask("show info")
    with pytest.raises(RoutingUnreachable, match=r"cannot be reached on .* for `reload`"):
        await MasterSocket(tmp_path / "none").reload()


@pytest.mark.parametrize("line", ["show info;del server a/b", "show info\ndel server a/b"])
async def test_a_line_is_one_command(tmp_path: Path, line: str) -> None:
    with pytest.raises(RoutingError, match="more than one HAProxy command"):
        await RuntimeSocket(tmp_path / "none").ask(line)


@given(st.text(), st.text(alphabet=";\n\r\\ \t\v\u2028\x00", min_size=1), st.text())
def test_a_word_cannot_become_another_command(before: str, bad: str, after: str) -> None:
    with pytest.raises(RoutingError, match="cannot be part of a HAProxy command"):
        command("del", "server", before + bad + after)


@pytest.mark.parametrize("word", ["", "a<<b"])
def test_a_word_is_a_word(word: str) -> None:
    with pytest.raises(RoutingError, match="cannot be part of a HAProxy command"):
        command("show", word)


async def test_the_master_tells_why_a_reload_failed() -> None:
    log = b"Success=0\n--\n[NOTICE]   (1) : x\n[ALERT]    (1) : config : unknown keyword 'y'.\n\n"
    async with answering(log) as path:
        with pytest.raises(RoutingError, match=r"goes on with the one it has: \[ALERT\] .*unknown keyword 'y'\.$"):
            await MasterSocket(path).reload()


async def test_the_master_may_end_without_an_outcome() -> None:
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


ECHO = ServiceSpec("echo", "echo", "http", 8080, 1, ProbeSpec(9100, "/readyz"), route="/echo")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # pytest's own directories are too deep for the path of a unix socket.
    with tempfile.TemporaryDirectory(prefix="pierhead-haproxy-") as directory:
        yield Path(directory)


async def test_every_option_is_given_with_every_server(run_dir: Path) -> None:
    async with FakeHAProxy(run_dir).running() as fake:
        router = HAProxyRouter(run_dir)
        await router.perform(WriteRouting(target="routing", services=(ECHO,), routing_hash=""))
        fake.commands.clear()
        add = AddServer(target="echo-1", service="echo", backend="svc_echo", address="10.0.0.1:8080", spec=ECHO)
        await router.perform(add)
        options = (
            "check check-proto h1 port 9100 inter 500ms fastinter 150ms downinter 500ms fall 3 rise 1 "
            "observe layer4 error-limit 3 on-error mark-down maxconn 100"
        )
        assert [line for line in fake.commands if not line.startswith(("show", "get"))] == [
            f"add server svc_echo/echo-1 10.0.0.1:8080 id 1 {options}",
            "enable health svc_echo/echo-1",
            "enable server svc_echo/echo-1",
        ]


async def test_a_server_whose_adding_was_interrupted_is_checked_once_it_is_ready(run_dir: Path) -> None:
    async with FakeHAProxy(run_dir).running() as fake:
        router = HAProxyRouter(run_dir)
        await router.perform(WriteRouting(target="routing", services=(ECHO,), routing_hash=""))
        await RuntimeSocket(run_dir / "admin.sock").ask("add server svc_echo/echo-1 10.0.0.1:8080 id 1 check")
        fake.commands.clear()
        ready = SetServerState(target="echo-1", service="echo", backend="svc_echo", state=ServerState.READY)
        await router.perform(ready)
        assert [line for line in fake.commands if not line.startswith(("show", "get"))] == [
            "enable health svc_echo/echo-1",
            "set server svc_echo/echo-1 state ready",
        ]


async def test_a_version_that_loses_servers_gets_no_routes(run_dir: Path) -> None:
    async with FakeHAProxy(run_dir, version="3.2.10").running():
        router = HAProxyRouter(run_dir)
        with pytest.raises(RoutingError, match=r"HAProxy version 3\.2\.10 may abort .* No routes were written\."):
            await router.perform(WriteRouting(target="routing", services=(ECHO,), routing_hash=""))


async def test_a_file_of_somebody_else_is_left_alone(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeHAProxy(run_dir).running():
        router = HAProxyRouter(run_dir)
        await router.perform(WriteRouting(target="routing", services=(ECHO,), routing_hash=""))
        (run_dir / "haproxy.cfg").write_text("backend mine\n")
        add = AddServer(target="echo-1", service="echo", backend="svc_echo", address="10.0.0.1:8080", spec=ECHO)
        await router.perform(add)
        assert (run_dir / "haproxy.cfg").read_text() == "backend mine\n"
        assert "is not what HAProxy runs and was left alone" in caplog.text
        # The next change of routes sees that the file is wrong, though HAProxy runs what is asked for.
        await router.perform(WriteRouting(target="routing", services=(ECHO,), routing_hash=""))
        assert "    server echo-1 10.0.0.1:8080 id 1" in (run_dir / "haproxy.cfg").read_text()
