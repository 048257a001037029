"""Sends calls to the replicas of deployments, which are behind the handles of services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, NamedTuple, cast

from pierhead.classes.handles import each_replica, handle_to, options
from pierhead.classes.service import Bound
from pierhead.errors import Backpressure, DeadlineExceeded, NoReplica, PierheadError
from pierhead.rayserve.context import DeploymentID, _RequestContext, current_replica
from pierhead.rayserve.exceptions import BackPressureError, DeploymentUnavailableError
from pierhead.rayserve.options import DeploymentOptions
from pierhead.rayserve.pickles import PickledError, dumps, loads, seal
from pierhead.rayserve.request_router import tell_routers
from pierhead.request import accept_opaque

CALL: Final = "call"
REPLY: Final = "reply"
"""What the bytes of a call and of its replies are sealed for."""


class HandleCall(NamedTuple):
    """A call of a deployment."""

    context: _RequestContext
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Dispatcher:
    """Sends calls of one deployment. Lives on one event loop."""

    def __init__(self, bound: Bound, deployment: DeploymentID, graph: AppGraph) -> None:
        self.loop = asyncio.get_running_loop()
        self.id = deployment
        self._bound = bound
        self._graph = graph
        self._handle: Any = handle_to(bound)
        cls: Any = bound.cls
        self._options: DeploymentOptions = cls.__built__.options
        self._seal = seal().of(deployment.name)

    async def call(self, call: HandleCall) -> Any:
        """One result. Raises what the caller is to get."""
        try:
            reply = await self._handle_for(call).call(self._request(call))
        except PierheadError as error:
            successor = self._successor_after(error)
            if successor is None:
                raise translated(error, self.id, self._options) from None
            return await successor.call(call)
        return self._result(reply)

    async def stream(self, call: HandleCall) -> AsyncIterator[Any]:
        """Many results. Raises what the caller is to get."""
        items = self._handle_for(call).stream(self._request(call))
        try:
            async for item in items:
                yield self._result(item)
        except PierheadError as error:
            successor = self._successor_after(error)
            if successor is None:
                raise translated(error, self.id, self._options) from None
            async with aclosing(successor.stream(call)) as others:  # type: ignore[type-var]
                async for item in others:
                    yield item
        finally:
            await items.aclose()

    async def broadcast(self, call: HandleCall) -> list[Any]:
        """The result of every replica; an exception in the place of one that failed. Raises what the caller is to get
        where there is none.
        """
        request = self._request(call)

        async def at(handle: Callable[[], Awaitable[Any]]) -> Any:
            try:
                return self._result(await (await handle()).call(request))
            except PierheadError as error:
                raise translated(error, self.id, self._options) from None

        try:
            handles = await each_replica(self._bound)
        except PierheadError as error:
            successor = self._successor_after(error)
            if successor is None:
                raise translated(error, self.id, self._options) from None
            return await successor.broadcast(call)
        return await asyncio.gather(*map(at, handles), return_exceptions=True)

    def _successor_after(self, error: PierheadError) -> Dispatcher | None:
        """What takes the deployment's place, where no replica has had the call."""
        return self._graph.successors.get(self.id) if isinstance(error, NoReplica) else None

    def _request(self, call: HandleCall) -> bytes:
        if self._options.request_router_config is not None:
            tell_routers(self.id, self._options.max_ongoing_requests, *call)
        return self._seal.sealed(dumps((vars(call.context), call.args, call.kwargs)), CALL)

    def _handle_for(self, call: HandleCall) -> Any:
        session, model = accept_opaque(call.context.session_id), accept_opaque(call.context.multiplexed_model_id)
        return options(self._handle, session_id=session, model_id=model) if session or model else self._handle

    def _result(self, reply: bytes) -> Any:
        is_result, value = loads(self._seal.opened(reply, REPLY))
        if is_result:
            return value
        if isinstance(value, int):
            assert self._graph.kept is not None  # noqa: S101 - it has made the number
            raise self._graph.kept.pop(value)
        raise cast("PickledError", value).error()


def translated(error: PierheadError, deployment: DeploymentID, given: DeploymentOptions) -> Exception:
    """The error of Ray Serve's name for one of the way to a replica."""
    if isinstance(error, Backpressure):
        answer = given.backpressure_config
        most = given.max_queued_requests
        full = BackPressureError(most, most, answer.status_code, answer.retry_after_s)
        full.add_note(error.message)
        return full
    if isinstance(error, DeadlineExceeded):
        return TimeoutError(error.message)
    if isinstance(error, NoReplica):
        return DeploymentUnavailableError(deployment)
    return error


class AppGraph:
    """The services of one application by the names of its deployments."""

    def __init__(self, name: str, *, in_process: bool = False, keeps_errors: bool = False) -> None:
        """`in_process`: for `serve.run`, whose replicas share its process; `keeps_errors`: callers get the exceptions
        of user code themselves, as in Ray Serve's local testing mode.
        """
        self.name = name
        self.in_process = in_process
        self.kept: dict[int, BaseException] | None = {} if keeps_errors else None
        """Exceptions on their way to callers, by their `id`."""
        self.services: dict[str, Bound] = {}
        self.successors: Mapping[DeploymentID, Dispatcher] = {}
        """What sends the calls of the version that takes this one's place."""

    def dispatchers(self) -> dict[DeploymentID, Dispatcher]:
        """What sends calls of its deployments, for one caller: the calls of each are bounded."""
        ids = {DeploymentID(name, self.name): bound for name, bound in self.services.items()}
        return {deployment: Dispatcher(bound, deployment, self) for deployment, bound in ids.items()}


_DISPATCHERS: Final[dict[DeploymentID, Dispatcher]] = {}


def register_dispatchers(dispatchers: Mapping[DeploymentID, Dispatcher]) -> None:
    """Send this process's calls of deployments by these from now on."""
    _DISPATCHERS.update(dispatchers)


def forget_dispatchers(dispatchers: Mapping[DeploymentID, Dispatcher]) -> None:
    """Undo `register_dispatchers`, unless others were registered since."""
    for deployment, dispatcher in dispatchers.items():
        if _DISPATCHERS.get(deployment) is dispatcher:
            del _DISPATCHERS[deployment]


def dispatcher_of(deployment: DeploymentID) -> Dispatcher:
    """What sends calls of a deployment. Raises DeploymentUnavailableError for an unknown one."""
    replica = current_replica()
    found: Dispatcher | None = None if replica is None else replica._dispatchers.get(deployment)
    found = found or _DISPATCHERS.get(deployment)
    if found is None:
        known = ", ".join(str(each) for each in _DISPATCHERS) or "none"
        missing = DeploymentUnavailableError(deployment)
        missing.add_note(f"It does not exist in this process; known: {known}")
        raise missing
    return found


def is_known(deployment: DeploymentID) -> bool:
    """Whether this process can call a deployment."""
    return deployment in _DISPATCHERS
