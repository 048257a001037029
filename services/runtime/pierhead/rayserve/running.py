"""An application of `serve.run`: a service for each deployment, on a Runner in this process's event loop.

HTTP server --> proxy --> queue of the ingress deployment --> one of its replicas
handle.remote() --> queue of the deployment --> one of its replicas
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final, cast

from pierhead.calls.clients import Clients
from pierhead.calls.lease import CallPlace
from pierhead.calls.pool import Pool
from pierhead.calls.turn import LineFull, lease_in_turn
from pierhead.deadlines import LONGEST_S
from pierhead.errors import PierheadError
from pierhead.policies.router import PolicyRouter
from pierhead.rayserve.context import DeploymentID, _RequestContext
from pierhead.rayserve.deployed_object import DeployedObject
from pierhead.rayserve.deployment import Application, BuiltApplication
from pierhead.rayserve.dispatch import AppGraph, forget_dispatchers, register_dispatchers, translated
from pierhead.rayserve.exceptions import BackPressureError
from pierhead.rayserve.handle import DeploymentHandle
from pierhead.rayserve.request_router import tell_routers
from pierhead.rayserve.responses import warm
from pierhead.rayserve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ReplicaState,
)
from pierhead.rayserve.services import RayDeployment, services_of
from pierhead.runner.front import FrontRequest
from pierhead.runner.in_loop import LoopReplica, LoopRunner
from pierhead.serve_block import DEFAULT_POLICY
from pierhead.settings import Settings
from pierhead.tasks import end_tasks

_TRIES: Final = 3
"""How often a constructor that raises is called."""

_VERSIONS = itertools.count(1)


class RunningApplication:
    """One application of this process."""

    def __init__(self, app: Application, name: str, route_prefix: str | None, *, is_known: bool = True) -> None:
        """`is_known`: whether handles by name find its deployments; without it only `handle` does."""
        self.built = BuiltApplication(app)
        self.name = name
        self.route_prefix = route_prefix
        self.successor: RunningApplication | None = None
        """What takes its place, and the requests that none of its replicas has had."""
        self._is_known = is_known
        self._graph = AppGraph(name, in_process=True, keeps_errors=not is_known)
        bound = services_of(self.built, self._graph, f"{name}_v{next(_VERSIONS)}")
        self._services = {each: bound.name for each, bound in self._graph.services.items()}
        deployments = {service: self.built.deployments[each] for each, service in self._services.items()}

        def adapt(service: str, settings: Settings) -> Settings:
            options = deployments[service].options
            return replace(
                settings,
                request_timeout_s=LONGEST_S,
                drain_timeout_s=options.graceful_shutdown_timeout_s,
                health_period_s=options.health_check_period_s,
                health_timeout_s=options.health_check_timeout_s,
            )

        self._runner = LoopRunner(bound, adapt=adapt, tries=_TRIES)
        self._dispatchers = self._graph.dispatchers()
        self._ingress_id = DeploymentID(self.built.ingress, name)
        self._router = PolicyRouter(DEFAULT_POLICY, random.Random(), follows=True)  # noqa: S311 - spreads load
        self._starting: asyncio.Task[Mapping[str, BaseException]] | None = None
        self._failed: dict[str, BaseException] = {}
        self._has_started = False
        self._began = time.time()

    def handle(self) -> DeploymentHandle[Any]:
        """A handle to the first deployment."""
        dispatcher = None if self._is_known else self._dispatchers[self._ingress_id]
        return DeploymentHandle(self.built.ingress, self.name, _dispatcher=dispatcher)

    def announce(self, former: RunningApplication | None = None) -> None:
        """Take calls, also those of `former` that no replica has had. They wait until the application has started."""
        self._runner.place()
        if self._is_known:
            register_dispatchers(self._dispatchers)
        if former is not None:
            former.successor = self
            former._graph.successors = self._dispatchers

    async def start(self) -> dict[str, BaseException]:
        """Start every deployment; returns why deployments did not start. `close` ends it."""
        if self.route_prefix is not None:
            warm()
        self._starting = asyncio.create_task(self._runner.start_each(), name=f"start {self.name}")
        await asyncio.wait([self._starting])
        if self._starting.cancelled():
            self._failed = dict.fromkeys(self._services, RuntimeError("it was deleted while it started"))
        else:
            failed = self._starting.result()
            self._failed = {name: failed[service] for name, service in self._services.items() if service in failed}
        self._has_started = True
        return self._failed

    async def close(self, *, in_turn: bool = False) -> None:
        """End every deployment, all at the same time as in Ray Serve: none waits for the time that another one has.

        `in_turn`: callers first, so that their requests in flight end where they are while another version comes.
        """
        if self._starting is not None:
            await end_tasks(self._starting)
        await self._runner.stop(in_turn=in_turn)
        if self._is_known:
            forget_dispatchers(self._dispatchers)

    # ---- requests

    @property
    def waiting(self) -> int:
        """HTTP requests and calls that wait for a replica of the first deployment."""
        return self._pool().waiting

    @asynccontextmanager
    async def at_a_replica(self, call: _RequestContext) -> AsyncIterator[DeployedObject]:
        """A place at a replica of the first deployment. Raises what `translated` makes of it if there is none."""
        try:
            lease, replica = await self._lease(call)
        except PierheadError as error:
            if self.successor is None:
                raise translated(error, self._ingress_id, self._ingress.options) from None
            async with self.successor.at_a_replica(call) as deployed:
                yield deployed
            return
        try:
            yield cast("RayDeployment", replica.service).deployed
        finally:
            replica.server.edge.admission.leave()
            lease.end()

    @property
    def _ingress(self) -> Any:
        return self.built.deployments[self.built.ingress]

    def _pool(self) -> Pool:
        return Clients.current().pool(self._services[self.built.ingress], "lane")

    async def _lease(self, call: _RequestContext) -> tuple[CallPlace, LoopReplica]:
        """A lease on a replica that has admitted the request."""
        replicas, pool = self._runner.services[self._services[self.built.ingress]].replicas, self._pool()
        most_waiting = self._ingress.options.max_queued_requests
        while True:
            lease = await self._turn(call, most_waiting)
            if (replica := replicas.get(lease.replica.name)) is not None:  # else it was replaced a moment ago
                admission = replica.server.edge.admission
                if admission.enter_while_draining() is None:
                    if lease.replica.full:
                        pool.report(lease, admission.ongoing - 1, time.monotonic())
                    return lease, replica
                pool.refused(lease, admission.ongoing)  # a call that was cancelled is there until its thread ends
            lease.end()
            most_waiting = -1  # its place in the queue counted already

    async def _turn(self, call: _RequestContext, most_waiting: int) -> CallPlace:
        options = self._ingress.options
        pool = self._pool()
        pool.watch(self._router)
        tell_routers(self._ingress_id, options.max_ongoing_requests, call, (), {})
        request = FrontRequest(call.route, call.session_id or None, call.multiplexed_model_id or None)
        try:
            return await lease_in_turn(pool, self._router, request, most_waiting=most_waiting, wait_s=LONGEST_S)
        except LineFull:
            answer = options.backpressure_config
            raise BackPressureError(most_waiting, most_waiting, answer.status_code, answer.retry_after_s) from None

    # ---- status

    def status(self) -> ApplicationStatusOverview:
        """For `serve.status()`."""
        deployments = {name: self._status_of(name) for name in self._services}
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
        return ApplicationStatusOverview(status, message, self._began, deployments)

    def _status_of(self, name: str) -> DeploymentStatusOverview:
        ready = self._runner.ready()[self._services[name]]
        wanted = self.built.deployments[name].options.first_replicas
        states, why = {ReplicaState.RUNNING.value: ready, ReplicaState.STARTING.value: wanted - ready}, ""
        if name in self._failed:
            status, trigger = DeploymentStatus.DEPLOY_FAILED, DeploymentStatusTrigger.REPLICA_STARTUP_FAILED
            states, why = {}, f"a replica did not start: {self._failed[name]!r}"
        elif not self._has_started:
            status, trigger = DeploymentStatus.UPDATING, DeploymentStatusTrigger.CONFIG_UPDATE_STARTED
            states = {state: count for state, count in states.items() if count}
        elif ready < wanted:
            status, trigger = DeploymentStatus.UNHEALTHY, DeploymentStatusTrigger.HEALTH_CHECK_FAILED
            why = f"{wanted - ready} of {wanted} replicas failed check_health and have no replacement yet"
        else:
            status, trigger = DeploymentStatus.HEALTHY, DeploymentStatusTrigger.CONFIG_UPDATE_COMPLETED
            states = {ReplicaState.RUNNING.value: ready}
        return DeploymentStatusOverview(status, trigger, states, why)
