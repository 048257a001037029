"""An application as its containers have it, without Docker: each replica in a process of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

SECRET = "a secret of this test, long enough"


class ServiceProcesses:
    """A context manager: the processes, and a handle to the application's first deployment, from this process."""

    def __init__(self, module: Any, http_port: int) -> None:
        from pierhead.rayserve.services import bound_of
        from pierhead.runner.front import Front
        from pierhead.runner.processes import ProcessRunner, facts_of

        self._http_port = http_port
        self._bound: Any = bound_of(module.app)
        prefix = getattr(module, "ROUTE_PREFIX", "/")
        words = {self._bound.name: {"route": prefix, "strip_prefix": prefix != "/"}}
        services = {name: facts_of(each) for name, each in self._bound.graph().items()}
        self._front = Front()
        self._runner = ProcessRunner(f"{module.__name__}:app", services, words, self._changed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def _changed(self, offer: Any) -> None:
        self._front.switch(offer.routes, None)

    def __enter__(self) -> Any:
        os.environ.update(PIERHEAD_ALLOW_PICKLE="true", PIERHEAD_PICKLE_SECRET=SECRET)
        self._thread.start()
        try:
            return self._on_loop(self._start())
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> Any:
        from pierhead.calls.clients import Clients
        from pierhead.rayserve.dispatch import register_dispatchers
        from pierhead.rayserve.handle import DeploymentHandle
        from pierhead.settings import Settings

        self._changed(await self._runner.start())
        await self._front.listen("127.0.0.1", self._http_port)
        Clients.use(Settings(discovery=self._runner.discovery))
        graph = self._bound.cls.__application__
        dispatchers = graph.dispatchers()
        register_dispatchers(dispatchers)
        for deployment in dispatchers:
            pool = Clients.current().pool(graph.services[deployment.name].name, "lane")
            while not pool.replicas() or not all(replica.callable for replica in pool.replicas()):
                await pool.changed()
        return DeploymentHandle[Any](self._bound.cls.__built__.name)

    async def _stop(self) -> None:
        from pierhead import close_handles

        await self._front.close()
        await self._runner.stop(at_once=True)
        await close_handles()

    def __exit__(self, *_: object) -> None:
        self._on_loop(self._stop())
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


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
