"""Applications in this process, on an event loop in a thread of their own: what `serve.run` starts.

HTTP server --> proxy --> line of the ingress deployment --> one of its replicas
handle.remote() --> line of the deployment --> one of its replicas
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from pierhead.rayserve.context import DeploymentID
from pierhead.rayserve.deployment import Application, BuiltApplication
from pierhead.rayserve.engine_deployment import EngineDeployment
from pierhead.rayserve.handle import DeploymentHandle, forget_dispatcher, register_dispatcher
from pierhead.rayserve.responses import warm
from pierhead.rayserve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatus

T = TypeVar("T")


class EngineApplication:
    """One application of this process."""

    def __init__(self, app: Application, name: str, route_prefix: str | None, *, is_known: bool = True) -> None:
        """`is_known`: whether handles by name find its deployments; without it only `handle` does."""
        self.built = BuiltApplication(app)
        self.name = name
        self.route_prefix = route_prefix
        self.deployments: dict[str, EngineDeployment] = {}
        self.started = time.time()
        self._is_known = is_known
        self._by_id: dict[DeploymentID, EngineDeployment] = {}

    def handle(self) -> DeploymentHandle[Any]:
        """A handle to the first deployment."""
        return DeploymentHandle(self.built.ingress, self.name, _dispatcher=None if self._is_known else self.ingress)

    @property
    def ingress(self) -> EngineDeployment:
        """The deployment that gets the HTTP requests."""
        return self.deployments[self.built.ingress]

    def announce(self, former: EngineApplication | None = None) -> None:
        """Take calls, also those of `former` once that is closed. They wait until the application has started."""
        for name, built in self.built.deployments.items():
            deployment = EngineDeployment(built, self.name, self._by_id, raises_as_is=not self._is_known)
            self.deployments[name] = self._by_id[deployment.id] = deployment
            if former is not None and name in former.deployments:
                former.deployments[name].successor = deployment
            if self._is_known:
                register_dispatcher(deployment.id, deployment)

    async def start(self) -> dict[str, BaseException]:
        """Start every deployment, beginning with those that are used by others. Returns why deployments did not."""
        if not self.deployments:
            self.announce()
        if self.route_prefix is not None:
            warm()
        starts = (deployment.start() for deployment in self.deployments.values())
        try:
            ends = await asyncio.gather(*starts, return_exceptions=True)
        except BaseException:
            await self.close()
            raise
        return {name: end for name, end in zip(self.deployments, ends, strict=True) if end is not None}

    async def close(self, *, in_turn: bool = False) -> None:
        """End every deployment, all at the same time as in Ray Serve: none waits for the time that another one has.

        `in_turn`: callers first, so that their requests in flight end where they are while another version comes.
        """
        if in_turn:
            for deployment in reversed(self.deployments.values()):
                await deployment.close()
        else:
            await asyncio.gather(*(deployment.close() for deployment in self.deployments.values()))
        if self._is_known:
            for deployment in self.deployments.values():
                forget_dispatcher(deployment.id, deployment)

    def status(self) -> ApplicationStatusOverview:
        """For `serve.status()`."""
        deployments = {name: deployment.status() for name, deployment in self.deployments.items()}
        by_status: dict[DeploymentStatus, list[str]] = {}
        for name, each in deployments.items():
            by_status.setdefault(each.status, []).append(name)
        status, message = ApplicationStatus.RUNNING, ""
        if failed := by_status.get(DeploymentStatus.DEPLOY_FAILED):
            status, message = ApplicationStatus.DEPLOY_FAILED, f"Failed to update the deployments {failed}."
        elif DeploymentStatus.UPDATING in by_status:
            status = ApplicationStatus.DEPLOYING
        elif DeploymentStatus.UNHEALTHY in by_status:
            status = ApplicationStatus.UNHEALTHY
        return ApplicationStatusOverview(status, message, self.started, deployments)


class EngineThread:
    """The event loop of this process's applications, in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="pierhead-rayserve", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns or raises on the loop. Not to be called on the loop itself."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("`serve.run`, `serve.shutdown` and the like cannot be called from within a deployment")
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """End the loop and its tasks."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=2))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
