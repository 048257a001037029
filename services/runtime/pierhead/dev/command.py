"""`python -m pierhead dev shop:shop`: serves an application without Docker, and again at every save."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any, Final

from pierhead.classes.target import TARGET, TARGET_HELP
from pierhead.dev.process_version import ProcessVersion
from pierhead.dev.project import FolderFiles
from pierhead.dev.server import DevServer, QuietPoller
from pierhead.dev.version import THREAD, ThreadVersion, VersionSource
from pierhead.edge import logs
from pierhead.runner.front import Front
from pierhead.settings import Settings

HTTP_PORT: Final = 8000
GRPC_PORT: Final = 9000
"""Those of HAProxy."""
LAST_PORT: Final = 65535
LINGER_S: Final = 0.5
"""How long the threads of versions that have ended may take to notice it."""


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    words = "serve an application without Docker, and again at every save"
    command: argparse.ArgumentParser = commands.add_parser("dev", help=words, description=words)
    command.add_argument("target", nargs="?", default=TARGET, help=TARGET_HELP)
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    command.add_argument("--port", type=_port, default=HTTP_PORT, help="port of HTTP (default: %(default)s)")
    command.add_argument(
        "--grpc-port", type=_port, help=f"port of gRPC (default: {GRPC_PORT}, or none where that is taken)"
    )
    command.add_argument(
        "-f", "--file", action="append", default=[], type=Path,
        help="a compose file, whose x-serve words come over the classes' keywords",
    )  # fmt: skip
    command.add_argument("--processes", action="store_true", help="give each service a process of its own")
    command.set_defaults(run=run)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to {LAST_PORT}, found {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> None:
    """Serve until Ctrl-C. Exits with 2 for a port that is taken."""
    logs.configure(Settings(log_encoding="text", access_log="all"))
    logging.getLogger("pierhead").setLevel(logging.WARNING)  # not that each service of each version is ready, or stops
    logging.getLogger("asyncio").addFilter(QuietPoller())
    try:
        asyncio.run(_serve(arguments))
    except _Taken as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    _leave_blocked_methods()


def _leave_blocked_methods() -> None:
    """End the process where a `def` method blocks its thread: Python itself would wait for it."""
    versions = [thread for thread in threading.enumerate() if thread.name == THREAD]
    for thread in versions:
        thread.join(LINGER_S)
    if any(thread.is_alive() for thread in versions):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


class _Taken(Exception):
    """A port that cannot be opened."""


async def _serve(arguments: argparse.Namespace) -> None:
    front, host = Front(), arguments.host
    try:
        port = await front.listen(host, arguments.port)
    except OSError as error:
        raise _taken("--port", arguments.port, host, error) from None
    try:
        grpc = "" if arguments.processes else await _grpc_address(front, host, arguments.grpc_port)
        source = VersionSource(arguments.target, FolderFiles(Path.cwd()), [file.absolute() for file in arguments.file])
        server = DevServer(source, ProcessVersion if arguments.processes else ThreadVersion, front, sys.stderr.write)
        await server.run(f"http://{_shown(host)}:{port}", grpc)
    finally:
        await front.close()


async def _grpc_address(front: Front, host: str, port: int | None) -> str:
    """Listen for gRPC; "" where no port was asked for and the usual one is taken."""
    try:
        bound = await front.listen_grpc(host, GRPC_PORT if port is None else port)
    except OSError as error:
        if port is not None:
            raise _taken("--grpc-port", port, host, error) from None
        sys.stderr.write(f"port {GRPC_PORT} is taken, so gRPC is not served; --grpc-port chooses another one\n")
        return ""
    return f"{_shown(host)}:{bound}"


def _taken(option: str, port: int, host: str, error: OSError) -> _Taken:
    if isinstance(error, socket.gaierror):
        return _Taken(f"--host {host}: {error.strerror}")
    why = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
    return _Taken(f"{option} {port} on {host} cannot be opened: {why}; choose another one")


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
