"""An application as its containers have it, without Docker: `python -m pierhead serve` for each of its services."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

SECRET = "a secret of this test, long enough"


class ServiceProcesses:
    """A context manager: the processes, and a handle to the application's first deployment, from this process."""

    def __init__(self, module: Any, http_port: int) -> None:
        from pierhead.rayserve.services import bound_of

        self._module = module
        self._http_port = http_port
        self._bound: Any = bound_of(module.app)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Any:
        graph = self._bound.graph()
        ports = {name: _free_port() for name in graph}
        os.environ.update(PIERHEAD_ALLOW_PICKLE="true", PIERHEAD_PICKLE_SECRET=SECRET)
        for name, port in ports.items():
            os.environ[f"PIERHEAD_STATIC_{name.upper().replace('-', '_')}"] = f"127.0.0.1:{port}"
        admin = {name: self._start(name, bound, ports[name]) for name, bound in graph.items()}
        try:
            for port in admin.values():
                self._wait(port)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._handle(), self._loop).result()

    async def _handle(self) -> Any:
        from pierhead.rayserve.context import DeploymentID
        from pierhead.rayserve.handle import DeploymentHandle, register_dispatcher
        from pierhead.rayserve.pickles import seal
        from pierhead.rayserve.services import RemoteDeployment

        name = self._bound.cls.__built__.name
        register_dispatcher(DeploymentID(name), RemoteDeployment(self._bound, DeploymentID(name), seal()))
        return DeploymentHandle[Any](name)

    def _start(self, name: str, bound: Any, port: int) -> int:
        admin = _free_port()
        words = bound.cls.__x_serve__
        environment = {
            **os.environ,
            "PIERHEAD_SERVICE": name,
            "PIERHEAD_HOST": "127.0.0.1",
            "PIERHEAD_ADMIN_PORT": str(admin),
            "PIERHEAD_MAX_ONGOING_REQUESTS": str(words.get("max_ongoing_requests", 100)),
            "PIERHEAD_LOG_LEVEL": "warning",
        }
        if "route" in words:
            environment |= {"PIERHEAD_PORT": str(self._http_port), "PIERHEAD_GRPC_PORT": str(port)}
        else:
            environment["PIERHEAD_PORT"] = str(port)
        command = [sys.executable, "-P", "-m", "pierhead", "serve", f"{self._module.__name__}:app"]
        self._processes.append(subprocess.Popen(command, env=environment))
        return admin

    def _wait(self, port: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                ended = [each for each in self._processes if each.poll() is not None]
                if ended or time.monotonic() > deadline:
                    raise RuntimeError(f"a service did not become ready: {[each.poll() for each in ended]}") from None
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_closed(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
        self._loop.close()


class DevServer:
    """A context manager: `python -m pierhead dev` of an application."""

    def __init__(self, module: Any, http_port: int) -> None:
        command = [sys.executable, "-P", "-m", "pierhead", "dev", f"{module.__name__}:app", "--port", str(http_port)]
        self._process = subprocess.Popen([*command, "--grpc-port", str(_free_port())])
        self._port = http_port

    def __enter__(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=5).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the dev server did not listen") from None
                time.sleep(0.05)
            else:
                return  # it answers requests once the application serves

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


async def _closed() -> None:
    from pierhead import close_handles

    await close_handles()


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
