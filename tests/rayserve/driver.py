"""Runs applications of `apps/` on one system, sends each its requests, and writes what it answered.

    python driver.py ray hello_class ... --out answers.json       with Ray Serve's own Python
    python driver.py pierhead hello_class ... --out answers.json  `serve.run` of ours
    python driver.py services hello_class ... --out answers.json  as services, in processes
    python driver.py dev hello_class ... --out answers.json       `python -m pierhead dev`, HTTP alone

An application is a module with `app`, `REQUESTS`, perhaps `calls(handle)`, a generator of results, and ROUTE_PREFIX.
For all systems but the first a copy is made, of which only the import lines are others. It imports nothing of ours that
Ray Serve's environment lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

APPS = Path(__file__).resolve().parent / "apps"

KEPT = ("allow", "content-type", "location", "retry-after", "set-cookie")
"""Headers that are compared, in addition to x-...: the others are the server's own."""


def translated(source: str) -> str:
    """The application with other import lines."""
    lines = []
    for line in source.splitlines():
        if re.match(r"\s*(from|import) ray\b", line):
            line = re.sub(r"\bfrom ray import serve\b", "from pierhead import rayserve as serve", line)
            line = re.sub(r"\bfrom ray\.serve\b", "from pierhead.rayserve", line)
            line = re.sub(
                r"^(\s*)import ray(\.serve[.\w]*)?$",
                r"\1import types; from pierhead import rayserve; ray = types.SimpleNamespace(serve=rayserve)",
                line,
            )
        lines.append(line)
    return "\n".join(lines) + "\n"


# ---- what is sent


class Client:
    """Sends an application's requests."""

    def __init__(self, port: int) -> None:
        self._port = port

    def send(self, request: dict[str, Any]) -> Any:
        """The answer to one request, or the answers to concurrent ones."""
        time.sleep(request.get("wait", 0))
        if "concurrent" in request:
            with ThreadPoolExecutor(len(request["concurrent"])) as threads:
                return list(threads.map(self.send, request["concurrent"]))
        if "websocket" in request:
            return self._websocket(request)
        if "abandon" in request:
            return self._abandon(request)
        return self._http(request)

    def _http(self, request: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        headers = dict(request.get("headers", {}))
        body = request.get("body")
        if "json" in request:
            body = json.dumps(request["json"])
            headers.setdefault("content-type", "application/json")
        try:
            connection.request(request.get("method", "GET"), request["path"], body=body, headers=headers)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            return {"error": type(error).__name__}
        finally:
            connection.close()
        kept = [
            (name.lower(), value) for name, value in response.getheaders()
            if name.lower() in KEPT or name.lower().startswith("x-")
        ]  # fmt: skip
        own = {name.lower(): value for name, value in headers.items()}.get("x-request-id")
        answer_id = dict(kept).get("x-request-id")
        own_port = f":{self._port}"
        shown: dict[str, str] = {name: value.replace(own_port, "") for name, value in kept if name != "x-request-id"}
        if "allow" in shown:  # made of a set
            shown["allow"] = ", ".join(sorted(shown["allow"].split(", ")))
        shown["x-request-id"] = "ours" if own and answer_id == own else "made" if answer_id else "none"
        return {"status": response.status, "headers": dict(sorted(shown.items())), "body": raw.decode("latin-1")}

    def _abandon(self, request: dict[str, Any]) -> Any:
        """Leave before the answer."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=20) as connection:
            connection.sendall(f"GET {request['abandon']} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            time.sleep(request["after"])
        return "left"

    def _websocket(self, request: dict[str, Any]) -> Any:
        from websockets.exceptions import ConnectionClosed, InvalidStatus
        from websockets.sync.client import connect

        got: list[Any] = []
        try:
            with connect(f"ws://127.0.0.1:{self._port}{request['websocket']}", open_timeout=20) as open_socket:
                for text in request["send"]:
                    open_socket.send(text)
                try:
                    for _ in range(request["receive"]):
                        message = open_socket.recv(timeout=20)
                        got.append(message if isinstance(message, str) else message.decode("latin-1"))
                except ConnectionClosed as closed:
                    got.append({"closed": closed.rcvd.code if closed.rcvd else None})
        except InvalidStatus as refused:
            got.append({"status": refused.response.status_code})
        return got


def plain(value: Any) -> Any:
    """A result of `calls` as JSON holds it."""
    return json.loads(json.dumps(value, default=repr))


def answers_of(module: Any, handle: Any, port: int, *, calls: bool = True) -> dict[str, Any]:
    """What the application answers to its requests and calls."""
    client = Client(port)
    answers = [client.send(request) for request in getattr(module, "REQUESTS", [])]
    results: list[Any] = []
    if calls and hasattr(module, "calls"):
        try:
            results.extend(plain(result) for result in module.calls(handle))
        except Exception as error:
            results.append({"raised": type(error).__name__, "text": str(error)[-200:]})
    return {"requests": answers, "calls": results}


# ---- the systems


@contextlib.contextmanager
def on_ray(port: int) -> Iterator[Callable[[Any], dict[str, Any]]]:
    import ray
    from ray import serve

    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield lambda module: _run(serve, module, port)
    serve.shutdown()
    ray.shutdown()


@contextlib.contextmanager
def on_pierhead(port: int) -> Iterator[Callable[[Any], dict[str, Any]]]:
    from pierhead import rayserve as serve

    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield lambda module: _run(serve, module, port)
    serve.shutdown()


def _run(serve: Any, module: Any, port: int) -> dict[str, Any]:
    try:
        handle = serve.run(module.app, route_prefix=getattr(module, "ROUTE_PREFIX", "/"))
    except Exception as error:
        return {"failed": type(error).__name__}
    try:
        return answers_of(module, handle, port)
    finally:
        serve.delete("default")


@contextlib.contextmanager
def on_services(port: int) -> Iterator[Callable[[Any], dict[str, Any]]]:
    from pierhead import rayserve as serve
    from service_processes import ServiceProcesses  # type: ignore[import-not-found]

    def run(module: Any) -> dict[str, Any]:
        serve.start(proxy_location="Disabled")  # for applications that run others
        try:
            with ServiceProcesses(module, port) as handle:
                return answers_of(module, handle, port)
        finally:
            serve.shutdown()

    yield run


@contextlib.contextmanager
def on_dev(port: int) -> Iterator[Callable[[Any], dict[str, Any]]]:
    from service_processes import DevServer

    def run(module: Any) -> dict[str, Any]:
        with DevServer(module, port):
            return {**answers_of(module, None, port, calls=False), "calls": None}

    yield run


SYSTEMS = {"ray": on_ray, "pierhead": on_pierhead, "services": on_services, "dev": on_dev}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("apps", nargs="+", type=Path, help="names in apps/, or files")
    parser.add_argument("--port", type=int, default=18123)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.path[:0] = [folder, str(APPS.parent)]
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        names = []
        for app in given.apps:
            path = app if app.suffix else APPS / f"{app}.py"
            source = path.read_text(encoding="utf-8")
            text = source if given.system == "ray" else translated(source)
            Path(folder, path.name).write_text(text, encoding="utf-8")
            names.append(path.stem)
        found: dict[str, Any] = {}
        with SYSTEMS[given.system](given.port) as run:
            for name in names:
                began = time.monotonic()
                try:
                    found[name] = run(importlib.import_module(name))
                except Exception as error:
                    found[name] = {"not imported": f"{type(error).__name__}: {error}"}
                print(f"{given.system} {name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
                given.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    threads = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    if given.system == "pierhead" and any(name.startswith("pierhead") for name in threads):
        raise SystemExit(f"left: {threads}")


if __name__ == "__main__":
    main()
