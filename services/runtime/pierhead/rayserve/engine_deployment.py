"""One deployment of `serve.run`: its replicas, and the line of calls that wait for one.

Replicas are objects, as many as `num_replicas` says. Arguments, results and exceptions are pickled on their way, as
between processes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Final

from pierhead.policies.router import PolicyRouter, report_default
from pierhead.raised import is_answerable
from pierhead.rayserve.context import DeploymentID, ReplicaContext, ReplicaID
from pierhead.rayserve.deployment import BuiltDeployment
from pierhead.rayserve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from pierhead.rayserve.handle import DeploymentHandle, RemoteCall, resolved
from pierhead.rayserve.options import router_of
from pierhead.rayserve.pickles import copied, failure_of
from pierhead.rayserve.request_router import tell_routers
from pierhead.rayserve.responses import prepare
from pierhead.rayserve.schema import (
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ReplicaRank,
    ReplicaState,
)
from pierhead.rayserve.servant import Servant

logger = logging.getLogger("ray.serve")

_TRIES: Final = 3
"""How often a constructor that raises is called."""

_PAUSE_S: Final = 1.0
"""After a replacement that did not start."""

_HEALTH_FAILURES: Final = 3
"""Failed checks in a row that end a replica."""


class _Replica:
    """A servant, and how many requests it has. A Candidate of policies."""

    node = ""

    def __init__(self, servant: Servant, deployment: EngineDeployment) -> None:
        self.servant = servant
        self.deployment = deployment
        self.ongoing = 0
        self.stats: Mapping[str, Any] = {}
        """What `record_routing_stats` has returned last."""
        self._idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> str:
        """See Candidate."""
        return self.servant.context.replica_tag

    @property
    def load(self) -> int:
        """See Candidate."""
        return self.ongoing

    @property
    def models(self) -> frozenset[str]:
        """See Candidate."""
        return frozenset(self.servant.held_models)

    def note_stats(self, stats: Mapping[str, Any]) -> None:
        """Let policies see these numbers."""
        self.stats = stats

    def idle(self) -> asyncio.Future[None]:
        """Done once there is no request."""
        return self._idle

    def done(self) -> None:
        """One request less."""
        self.ongoing -= 1
        if not self.ongoing:
            self._idle, idle = asyncio.get_running_loop().create_future(), self._idle
            idle.set_result(None)


class _Replaced(Exception):
    """Another deployment has taken this one's place, and takes its calls."""


class _Waiter:
    """A request that is to get a replica, in the line if none has room. A RoutedCall of policies."""

    def __init__(self, call: RemoteCall, deployment: str, request: Any) -> None:
        self.call = call
        self.request = request
        self.path = f"/{deployment}/{call.method}"
        self.session_id = call.session_id or None
        self.model_id = call.model_id or None
        self.ranks: Any = ()
        """What an asynchronous policy has said."""
        self.place: asyncio.Future[_Replica] = asyncio.get_running_loop().create_future()


class EngineDeployment:
    """The replicas of one deployment, and the line before them. A Dispatcher."""

    def __init__(
        self,
        built: BuiltDeployment,
        app_name: str,
        siblings: Mapping[DeploymentID, EngineDeployment],
        *,
        raises_as_is: bool,
    ) -> None:
        """`raises_as_is`: callers get the user's exception itself, as in Ray Serve's local testing mode."""
        self.loop = asyncio.get_running_loop()
        self.id = DeploymentID(built.name, app_name)
        self._built = built
        self._siblings = siblings
        self._raises_as_is = raises_as_is
        self._replicas: list[_Replica] = []
        self._line: deque[_Waiter] = deque()
        self._watches: set[asyncio.Task[None]] = set()
        self._missing = 0
        """Replicas that were ended and have no replacement yet."""
        self._router: PolicyRouter | None = None
        """Chooses replicas where the options name a policy."""
        self._keeps_sessions = False
        """The calls of a session go to one replica, as by Ray Serve's consistent hashing."""
        self._starting: asyncio.Task[Any] | None = None
        self.successor: EngineDeployment | None = None
        """What takes its place, and its calls once it is closed."""
        self._started = False
        self._closed = False
        self._failure = ""
        """Why it did not start."""

    # ---- life

    async def start(self) -> None:
        """Start the replicas; calls wait meanwhile. Raises what user code raises; calls fail then, and `status` says
        why. `close` cancels it.
        """
        self._starting = asyncio.current_task()
        try:
            self._router = self._named_router()
            async with asyncio.TaskGroup() as starting:
                for rank in range(self._built.options.first_replicas):
                    starting.create_task(self._add_replica(rank))
        except BaseException as errors:
            error = errors.exceptions[0] if isinstance(errors, BaseExceptionGroup) else errors
            if not is_answerable(error):
                raise
            self._failure = f"a replica did not start: {error!r}"
            await self.close()
            raise error from error.__cause__
        self._started = True

    async def _add_replica(self, rank: int) -> None:
        self._replicas.append(await self._start_replica(rank))
        self._next()

    async def _start_replica(self, rank: int) -> _Replica:
        for attempt in range(1, _TRIES + 1):
            servant = self._servant(rank)
            has_started = False
            try:
                args, kwargs = self._built.arguments(self._handle_to)
                await servant.start(args, kwargs, copied(self._built.options.user_config))
                has_started = True
                if servant.app is not None:
                    prepare(servant.app)
                await servant.check_health()
            except BaseException as error:
                if has_started:
                    await self._end(servant)
                if not is_answerable(error) or attempt == _TRIES:
                    raise
                logger.exception("%s: a replica did not start; it is tried again", self.id)
            else:
                replica = _Replica(servant, self)
                self._watch(self._keep_well(replica), f"health of {self._built.name}")
                self._watch(servant.report_stats(replica.note_stats), f"numbers of {self._built.name}")
                return replica
        raise AssertionError("every attempt returns or raises")

    def _watch(self, work: Coroutine[Any, Any, None], name: str) -> None:
        watch = asyncio.create_task(work, name=name)
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    def _named_router(self) -> PolicyRouter | None:
        """Raises RayServeException for a class that no import path names."""
        config = self._built.options.request_router_config
        if config is None:
            return None
        named = router_of(config)
        self._keeps_sessions = named["policy"] == "consistent_hash"
        if self._keeps_sessions:
            return None
        try:
            return PolicyRouter(named["policy"], random.Random(), kwargs=named.get("policy_kwargs"))  # noqa: S311
        except ValueError as error:  # as callers in containers do
            report_default(f"{self.id}: request_router_config", error)
            return None

    def _servant(self, rank: int) -> Servant:
        replica_id = ReplicaID(uuid.uuid4().hex[:8], self.id)
        context = ReplicaContext(
            replica_id,
            None,
            self._built.options,
            ReplicaRank(rank=rank, node_rank=0, local_rank=rank),
            self._built.options.first_replicas,
            _dispatchers=self._siblings,
        )
        return Servant(self._built, context, shares_process=True)

    def _handle_to(self, name: str) -> DeploymentHandle[Any]:
        return DeploymentHandle(name, self.id.app_name)

    async def _keep_well(self, replica: _Replica) -> None:
        """Replace the replica once its `check_health` has failed three times in a row."""
        options = self._built.options
        failures = 0
        while failures < _HEALTH_FAILURES:
            await asyncio.sleep(options.health_check_period_s)
            try:
                async with asyncio.timeout(options.health_check_timeout_s or None):
                    await replica.servant.check_health()
                failures = 0
            except BaseException as error:
                if not is_answerable(error):
                    raise
                failures += 1
                logger.exception("%s: check_health has failed %d times", self.id, failures)
        rank = replica.servant.context.rank.rank
        self._replicas.remove(replica)
        self._missing += 1
        if self._router is not None:
            self._router.replica_gone(replica.name)
        await self._close_replica(replica)
        self._replicas.append(await self._start_again(rank))
        self._missing -= 1
        self._next()

    async def _start_again(self, rank: int) -> _Replica:
        while True:
            try:
                return await self._start_replica(rank)
            except BaseException as error:
                if not is_answerable(error):
                    raise
                logger.exception("%s: a replacement did not start; it is tried again in %g s", self.id, _PAUSE_S)
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        """End the replicas; calls that wait go to the successor, or fail."""
        self._closed = True
        if self._starting is not None and self._starting is not asyncio.current_task():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        while self._line:
            waiter = self._line.popleft()
            if not waiter.place.done():
                waiter.place.set_exception(self._no_more())
        while self._watches:
            for watch in self._watches:
                watch.cancel()
            await asyncio.wait(self._watches)
        for replica in self._replicas:
            await self._close_replica(replica)
        self._replicas.clear()

    def _no_more(self) -> Exception:
        return DeploymentUnavailableError(self.id) if self.successor is None else _Replaced()

    async def _close_replica(self, replica: _Replica) -> None:
        try:
            if replica.ongoing:
                await asyncio.wait([replica.idle()], timeout=self._built.options.graceful_shutdown_timeout_s)
        finally:
            await self._end(replica.servant)

    async def _end(self, servant: Servant) -> None:
        try:
            await servant.close()
        except BaseException as error:
            if not is_answerable(error):
                raise
            logger.exception("%s: a replica did not end well", self.id)

    def status(self) -> DeploymentStatusOverview:
        """For `serve.status()`."""
        if self._failure:
            return DeploymentStatusOverview(
                DeploymentStatus.DEPLOY_FAILED, DeploymentStatusTrigger.REPLICA_STARTUP_FAILED, {}, self._failure
            )
        if not self._started:
            starting = self._built.options.first_replicas - len(self._replicas)
            states = {ReplicaState.RUNNING.value: len(self._replicas), ReplicaState.STARTING.value: starting}
            return DeploymentStatusOverview(
                DeploymentStatus.UPDATING,
                DeploymentStatusTrigger.CONFIG_UPDATE_STARTED,
                {state: count for state, count in states.items() if count},
                "",
            )
        if self._missing:
            return DeploymentStatusOverview(
                DeploymentStatus.UNHEALTHY,
                DeploymentStatusTrigger.HEALTH_CHECK_FAILED,
                {ReplicaState.RUNNING.value: len(self._replicas), ReplicaState.STARTING.value: self._missing},
                f"{self._missing} of {self._built.options.first_replicas} replicas failed check_health and have no "
                "replacement yet",
            )
        return DeploymentStatusOverview(
            DeploymentStatus.HEALTHY,
            DeploymentStatusTrigger.CONFIG_UPDATE_COMPLETED,
            {ReplicaState.RUNNING.value: len(self._replicas)},
            "",
        )

    # ---- the line

    async def acquire(
        self, call: RemoteCall, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _Replica:
        """A replica with room, in whose count the request is. Raises BackPressureError where the line is full."""
        try:
            return await self._acquire(call, args, kwargs)
        except _Replaced:
            assert self.successor is not None  # noqa: S101
            return await self.successor.acquire(call, args, kwargs)

    async def _acquire(self, call: RemoteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> _Replica:
        waiter = _Waiter(call, self._built.name, (args, kwargs))
        if self._router is None:
            return await self._place(waiter)
        tell_routers(self.id, self._built.options.max_ongoing_requests, call, args, kwargs)
        if self._router.is_async and self._replicas:
            waiter.ranks = await self._router.rank(tuple(self._replicas), waiter)
        replica = await self._place(waiter)
        if self._router.watches_calls:
            try:
                self._router.routed(replica, waiter)
            except BaseException:
                self.release(replica)
                raise
        return replica

    async def _place(self, waiter: _Waiter) -> _Replica:
        if self._closed:
            raise self._no_more()
        if not self._line or self._router is not None:
            replica = self._choose(waiter)
            if replica is not None:
                replica.ongoing += 1
                return replica
        most = self._built.options.max_queued_requests
        queued = sum(each.call.caller == waiter.call.caller for each in self._line)
        if 0 <= most <= queued:
            answer = self._built.options.backpressure_config
            raise BackPressureError(queued, most, answer.status_code, answer.retry_after_s)
        self._line.append(waiter)
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None:
                self.release(waiter.place.result())
            elif waiter in self._line:
                self._line.remove(waiter)
            raise

    def release(self, replica: _Replica) -> None:
        """The request is over."""
        replica.done()
        replica.deployment._next()

    def _next(self) -> None:
        """Give places to calls in the line, in turn."""
        if self._router is not None:
            self._next_by_router()
            return
        while self._line:
            waiter = self._line[0]
            if not waiter.place.done():
                replica = self._choose(waiter)
                if replica is None:
                    return
                replica.ongoing += 1
                waiter.place.set_result(replica)
            self._line.popleft()

    def _next_by_router(self) -> None:
        """A call that waits for one replica holds up none that waits for another."""
        waiting: deque[_Waiter] = deque()
        while self._line:
            waiter = self._line.popleft()
            if waiter.place.done():
                continue
            try:
                replica = self._choose(waiter)
            except Exception as error:  # the policy's
                waiter.place.set_exception(error)
                continue
            if replica is None:
                waiting.append(waiter)
            else:
                replica.ongoing += 1
                waiter.place.set_result(replica)
        self._line = waiting

    def _choose(self, waiter: _Waiter) -> _Replica | None:
        """The less loaded of two replicas with room; one that has the call's model before others."""
        call = waiter.call
        most = self._built.options.max_ongoing_requests
        free = [replica for replica in self._replicas if replica.ongoing < most]
        if not free:
            return None
        if self._router is not None:
            ranked = [replica for group in waiter.ranks for replica in group if replica in self._replicas]
            return self._router.choose(free, waiter) if not ranked or set(ranked) & set(free) else None
        if call.model_id:
            having = [replica for replica in free if call.model_id in replica.servant.held_models]
            if having:
                free = having
            else:
                fewest = min(len(replica.servant.held_models) for replica in free)
                free = [replica for replica in free if len(replica.servant.held_models) == fewest]
        if call.session_id and self._keeps_sessions:
            number = int.from_bytes(call.session_id.encode()[-8:], "big")
            return free[number % len(free)]
        two = random.sample(free, min(2, len(free)))
        return min(two, key=lambda replica: replica.ongoing)

    # ---- Dispatcher

    async def call(self, call: RemoteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See Dispatcher."""
        given = copied(await resolved(args, kwargs))
        replica = await self.acquire(call, *given)
        try:
            return await self._call_at(replica, call, given)
        finally:
            self.release(replica)

    async def _call_at(self, replica: _Replica, call: RemoteCall, given: Any) -> Any:
        args, kwargs = given
        try:
            return copied(await replica.servant.call(call, args, kwargs))
        except BaseException as error:
            failed = self._failed(error, call)
        raise failed

    async def stream(self, call: RemoteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AsyncIterator[Any]:
        """See Dispatcher."""
        args, kwargs = copied(await resolved(args, kwargs))
        replica = await self.acquire(call, args, kwargs)
        items = replica.servant.stream(call, args, kwargs)
        try:
            async for item in items:
                yield copied(item)
        except BaseException as error:
            if type(error) is GeneratorExit:  # this stream is closed
                raise
            failed = self._failed(error, call)
        else:
            return
        finally:
            await items.aclose()  # type: ignore[attr-defined]
            self.release(replica)
        raise failed

    def _failed(self, error: BaseException, call: RemoteCall) -> Exception:
        """The error for the caller of user code that has raised `error`. Raises `error` where it passes."""
        if not is_answerable(error):
            raise error
        if isinstance(error, asyncio.CancelledError):
            return RequestCancelledError(call.request_id)
        if self._raises_as_is:
            raise error
        return failure_of(error).error()

    async def broadcast(self, call: RemoteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """See Dispatcher."""

        async def at(replica: _Replica) -> Any:
            replica.ongoing += 1
            try:
                return await self._call_at(replica, call, copied((args, dict(kwargs))))
            finally:
                self.release(replica)

        return await asyncio.gather(*(at(replica) for replica in self._replicas), return_exceptions=True)
