"""HAProxy's two sockets without HAProxy: the commands that the controller uses, on real unix sockets.

It passes tests/contract/test_routing_contract.py, as the real HAProxy does. No traffic goes through it: a test says
what servers are doing, and calls `restart` and `go_away`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

BAKED_IN = Path(__file__).resolve().parents[2] / "haproxy" / "haproxy.cfg"
_SEVERITY_ERROR, _SEVERITY_INFO = 3, 6
_MAINT, _DRAIN = 0x01, 0x08
_OPTIONS_WITHOUT_VALUE = {"check", "disabled"}
UNKNOWN_KEYWORD = "unheard-of"
"""The one line that makes a configuration one that HAProxy refuses."""


class _Refused(Exception):
    """An answer of severity "error"."""


@dataclass(slots=True)
class FakeServer:
    """One server of a backend."""

    address: str
    number: int
    admin: int = _MAINT
    up: bool = True
    in_flight: int = 0
    weight: int = 1


@dataclass(slots=True)
class _Worker:
    """What one worker process runs."""

    pid: int
    routing_hash: str
    backends: dict[str, dict[str, FakeServer]] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    """Backends whose waiting room is closed."""


class FakeHAProxy:
    """Serves `admin.sock` and `master.sock` in `run_dir` from `haproxy.cfg` there (where missing: the image's own)."""

    def __init__(self, run_dir: Path, version: str = "3.0.11-1+deb13u5") -> None:
        self.version = version
        self.reloads = 0
        self.commands: list[str] = []
        """Every command the worker was given, in order."""
        self._run_dir = run_dir
        self._config_file = run_dir / "haproxy.cfg"
        self._next_pid = 100
        self._starts = 0
        self._worker: _Worker | None = None
        self._leaving: list[_Worker] = []
        self._sockets: list[asyncio.Server] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeHAProxy]:
        """Start, and go away at the end."""
        await self.start()
        try:
            yield self
        finally:
            await self.go_away()

    async def start(self) -> None:
        """Start as a container does: with what the file on disk says."""
        if not self._config_file.exists():
            self._config_file.write_text(BAKED_IN.read_text())
        self._worker = self._load()
        self._starts += 1
        for name, answer in (("admin.sock", self._admin), ("master.sock", self._master)):
            path = self._run_dir / name
            path.unlink(missing_ok=True)
            self._sockets.append(await asyncio.start_unix_server(_served(answer), path=str(path)))

    async def go_away(self) -> None:
        """Die, leaving the sockets' files behind, as a killed process does."""
        for server in self._sockets:
            server.close()
            await server.wait_closed()
        self._sockets.clear()
        self._leaving.clear()

    async def restart(self) -> None:
        """Die and start again."""
        await self.go_away()
        await self.start()

    def server(self, backend: str, name: str) -> FakeServer:
        """A server of the worker that takes new requests. Raises KeyError."""
        assert self._worker is not None
        return self._worker.backends[backend][name]

    def finish_leaving_workers(self) -> None:
        """Let the workers of before a reload end."""
        self._leaving.clear()

    # ------------------------------------------------------------------------------------------------ the master

    async def _master(self, line: str) -> str:
        if line == "show proc":
            return self._show_proc() + "\n"
        if line == "reload":
            return self._reload() + "\n"
        if addressed := re.fullmatch(r"@!(\d+) show stat -1 [46] -1", line):
            worker = next((w for w in self._leaving if w.pid == int(addressed.group(1))), None)
            if worker is None:
                return f"Can't find the target PID matching the prefix '@!{addressed.group(1)}'\n"
            return _show_stat(worker) + "\n"
        return f"Unknown command: '{line}'\n"

    def _show_proc(self) -> str:
        assert self._worker is not None
        rows = ["#<PID>          <type>          <reloads>       <uptime>        <version>      "]
        rows += [f"{1:<16}{'master':<16}{self.reloads} [failed: 0]", "# workers", f"{self._worker.pid:<16}worker"]
        if self._leaving:
            rows += ["# old workers", *(f"{worker.pid:<16}worker" for worker in self._leaving)]
        return "\n".join((*rows, "# programs", ""))

    def _reload(self) -> str:
        try:
            fresh = self._load()
        except _Refused as refused:
            return f"Success=0\n--\n[NOTICE]   (1) : haproxy version is {self.version}\n{refused}\n"
        assert self._worker is not None
        self.reloads += 1
        if any(server.in_flight for servers in self._worker.backends.values() for server in servers.values()):
            self._leaving.append(self._worker)
        self._worker = fresh
        return f"Success=1\n--\n[NOTICE]   (1) : New worker ({fresh.pid}) forked\n[NOTICE]   (1) : Loading success.\n"

    def _load(self) -> _Worker:
        worker = _Worker(self._next_pid, "")
        states = _read_states(self._run_dir / "servers.state")
        backend = ""
        for number, line in enumerate(self._config_file.read_text().splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if words[0] == UNKNOWN_KEYWORD:
                raise _Refused(
                    f"[ALERT]    (1) : config : parsing [haproxy.cfg:{number}] : unknown keyword '{words[0]}'."
                )
            if words[0] == "backend":
                backend = words[1]
                worker.backends[backend] = {}
            elif words[0] == "server" and (not backend.startswith("svc_") or words[1] == "hold"):
                pass  # a way into the waiting room
            elif words[0] == "server":
                admin = _MAINT if "disabled" in words else 0
                server = FakeServer(words[2], int(words[words.index("id") + 1]), admin=admin)
                server.admin, server.up = states.get((backend, words[1]), (server.admin, server.up))
                worker.backends[backend][words[1]] = server
            elif set_hash := re.search(r"set-var proc\.pierhead_routing str\((.*)\)", line):
                worker.routing_hash = set_hash.group(1)
        self._next_pid += 1
        return worker

    # ------------------------------------------------------------------------------------------------ the worker

    async def _admin(self, line: str) -> str:
        numbered = False
        answers = []
        for command in line.split(";"):
            if command == "set severity-output number":
                numbered = True
                answers.append("")
                continue
            self.commands.append(command)
            words = shlex.split(command)
            if words[0] == "wait":
                await self._wait_removable(words[3], float(words[1].removesuffix("s")))
            try:
                severity, answer = _SEVERITY_INFO, self._run(words)
                numbering = numbered and not answer.startswith(("Name:", "1\n", "#"))
            except _Refused as refused:
                severity, answer, numbering = _SEVERITY_ERROR, str(refused), numbered
            answers.append((f"[{severity}]: " if numbering and answer else "") + answer)
        return "".join(f"{answer}\n\n" if answer else "\n" for answer in (a.rstrip("\n") for a in answers))

    async def _wait_removable(self, path: str, seconds: float) -> None:
        """Return when the server may be deleted, or after `seconds`."""
        assert self._worker is not None
        with contextlib.suppress(TimeoutError, _Refused):
            async with asyncio.timeout(seconds):
                while not _is_removable(self._worker, path):  # noqa: ASYNC110  a test changes it
                    await asyncio.sleep(0.01)

    def _run(self, words: list[str]) -> str:  # noqa: C901  one line for each command
        worker = self._worker
        assert worker is not None
        match words:
            case ["show", "info"]:
                # Every start is a second later than the one before.
                started = 1_700_000_000 + self._starts
                return f"Name: HAProxy\nVersion: {self.version}\nPid: {worker.pid}\nStart_time_sec: {started}"
            case ["get", "var", "proc.pierhead_routing"]:
                return f"proc.pierhead_routing: type=str value=<{worker.routing_hash}>"
            case ["show", "servers", "state"]:
                return _show_servers_state(worker)
            case ["show", "stat", "-1", "6", "-1"]:
                return _show_stat(worker)
            case ["show", "held"]:
                return _show_held(worker)
            case ["set", "held", backend, state]:
                return _set_held(worker, backend, state)
            case ["add", "server", path, address, *options]:
                return _add_server(worker, path, address, options)
            case ["enable", "health", path]:
                _find(worker, path)
                return ""
            case ["enable", "server", path] | ["set", "server", path, "state", "ready"]:
                _find(worker, path).admin = 0
                return ""
            case ["set", "server", path, "state", "drain"]:
                _find(worker, path).admin = _DRAIN
                return ""
            case ["set", "server", path, "state", "maint"]:
                _find(worker, path).admin = _MAINT
                return ""
            case ["set", "server", path, "weight", weight]:
                _find(worker, path).weight = int(weight)
                return ""
            case ["shutdown", "sessions", "server", path]:
                _find(worker, path).in_flight = 0
                return ""
            case ["wait", _, "srv-removable", path]:
                if _is_removable(worker, path):
                    return "Done."
                raise _Refused("Wait delay expired.")
            case ["del", "server", path]:
                return _delete_server(worker, path)
        return f"Unknown command: '{words[0]}', but maybe one of the following ones is a better match:"


def _served(
    answer: Callable[[str], Awaitable[str]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], asyncio.Future[None]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = (await reader.readline()).decode().rstrip("\n")
            writer.write((await answer(line)).encode())
            await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):  # the other side may have left without waiting for the answer
                await writer.wait_closed()

    return serve  # type: ignore[return-value]


def _find(worker: _Worker, path: str) -> FakeServer:
    backend, _, name = path.partition("/")
    if backend not in worker.backends:
        raise _Refused("No such backend.")
    if name not in worker.backends[backend]:
        raise _Refused("No such server.")
    return worker.backends[backend][name]


def _add_server(worker: _Worker, path: str, address: str, options: list[str]) -> str:
    backend, _, name = path.partition("/")
    if backend not in worker.backends:
        raise _Refused("No such backend.")
    servers = worker.backends[backend]
    values = dict(_pairs(options))
    number = int(values["id"])
    if any(server.number == number for server in servers.values()):
        raise _Refused(f"'id' : custom id {number} already used at (null):0 ('server {name}').")
    if name in servers:
        raise _Refused("Already exists a server with the same name in backend.")
    servers[name] = FakeServer(address, number)
    return "New server registered."


def _pairs(options: list[str]) -> list[tuple[str, str]]:
    words = iter(options)
    return [(word, "" if word in _OPTIONS_WITHOUT_VALUE else next(words)) for word in words]


def _is_removable(worker: _Worker, path: str) -> bool:
    server = _find(worker, path)
    return bool(server.admin & _MAINT) and not server.in_flight


def _delete_server(worker: _Worker, path: str) -> str:
    if not _find(worker, path).admin & _MAINT:
        raise _Refused("Only servers in maintenance mode can be deleted.")
    if not _is_removable(worker, path):
        raise _Refused("Server still has connections attached to it, cannot remove it.")
    backend, _, name = path.partition("/")
    del worker.backends[backend][name]
    return "Server deleted."


def _show_servers_state(worker: _Worker) -> str:
    rows = ["1", "# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_fqdn srv_port"]
    for number, (backend, servers) in enumerate(worker.backends.items(), 5):
        for name, server in servers.items():
            ip, _, port = server.address.rpartition(":")
            up = 2 if server.up and not server.admin & _MAINT else 0
            state = f"{up} {server.admin} {server.weight}"
            rows.append(f"{number} {backend} {server.number} {name} {ip.strip('[]')} {state} - {port}")
    return "\n".join(rows) + "\n"


def _read_states(path: Path) -> dict[tuple[str, str], tuple[int, bool]]:
    rows = [line.split() for line in path.read_text().splitlines()[2:]] if path.exists() else []
    return {(row[1], row[3]): (int(row[6]), row[5] != "0") for row in rows if row}


def _show_held(worker: _Worker) -> str:
    rows = [f"{backend} 0 0 0 0 0 1" for backend in sorted(worker.closed)]
    return "\n".join(["# backend held served expired left refused closed", *rows, ""])


def _set_held(worker: _Worker, backend: str, state: str) -> str:
    """A command of hold.lua: what it refuses has no severity."""
    if backend not in worker.backends:
        return "No such backend."
    if state not in ("open", "closed"):
        return "Expected open or closed."
    (worker.closed.add if state == "closed" else worker.closed.discard)(backend)
    return ""


def _show_stat(worker: _Worker) -> str:
    rows = ["# pxname,svname,qcur,scur,hrsp_1xx,hrsp_2xx,hrsp_3xx,hrsp_4xx,hrsp_5xx,check_status,"]
    for backend, servers in worker.backends.items():
        rows += [f"{backend},{name},0,{server.in_flight},0,0,0,0,0,L7OK," for name, server in servers.items()]
        rows.append(f"{backend},BACKEND,0,{sum(server.in_flight for server in servers.values())},0,0,0,0,0,,")
    return "\n".join(rows) + "\n"
