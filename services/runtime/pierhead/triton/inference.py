"""The client: inference, and control of models."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from tritonclient.grpc import service_pb2, service_pb2_grpc

from pierhead.calls.binding import service_name
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.errors import BadRequest, NotFound, PierheadError, RemoteError
from pierhead.multiplex.multiplexed import places
from pierhead.request import MODEL_KEY, SESSION_KEY
from pierhead.triton.connection import LOAD_KEY, MAX_MODELS, TRANSPORT
from pierhead.triton.cuda import DeviceArray
from pierhead.triton.errors import error_of, load_error, reply_of, translate
from pierhead.triton.messages import Arrays, LargeRequest, Parameters, arrays_of, infer_request

T = TypeVar("T")

Metadata = tuple[tuple[str, str], ...]


def client(
    service: str,
    *,
    timeout_s: float | None = None,
    max_queued_requests: int | None = None,
    policy: str | None = None,
    max_num_models_per_replica: int | None = None,
) -> Client:
    """A client of a service whose replicas are Triton servers. The options are those of `pierhead.handle`, and:

    - max_num_models_per_replica: load models on demand: each at the first call for it, at the replica that the call
      goes to. If this process keeps more than this number at a replica (-1 = no bound), the least recently used one is
      unloaded. Calls go to replicas that hold their model. None = calls load nothing.
    """
    options = {"timeout_s": timeout_s, "max_queued_requests": max_queued_requests, "policy": policy}
    if max_num_models_per_replica is not None:
        MAX_MODELS[service] = places(max_num_models_per_replica)
    return Client(service, on_demand=max_num_models_per_replica is not None, **options)


class Client:
    """Inference, and control of models. May be created at import; nothing is opened before the first call.

    Errors are PierheadErrors with Triton's own words:
      BadRequest        (INVALID_ARGUMENT, 400)   a tensor's name, dtype or shape is not the model's
      NotFound          (NOT_FOUND, 404)          the model, or its version, is unknown or not loaded
      Backpressure      (RESOURCE_EXHAUSTED, 503) the model's queue is full
      DeadlineExceeded  (DEADLINE_EXCEEDED, 504)  no reply in time, here or in the model's queue
      ReplicaDied       (UNAVAILABLE, 502)        the server ended during the call; it is not repeated
      RemoteError       (as Triton set it)        the model raised an exception, or does not load (INTERNAL, 500)
    and those of every handle: NoReplica, ScaledToZero, Backpressure.
    """

    def __init__(self, service: str, *, on_demand: bool = False, **options: Any) -> None:
        self.service = service_name(service)
        self._on_demand = on_demand
        self._channel = HandleChannel(service, transport=TRANSPORT, **options)
        one = HandleChannel(service, transport=TRANSPORT, policy=f"{__name__}:OneReplica", eject_outliers=False)
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub
        self._stub, self._one = stub(self._channel), stub(one)
        """The second one for calls that name their replica."""

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | Mapping[str, int] = (),
        version: str = "",
        parameters: Parameters | None = None,
        timeout: float | None = None,
    ) -> Arrays:
        """The model's outputs for one request.

        - inputs: arrays by name, with the batch dimension where the model has one. Strings and bytes are BYTES;
          `ml_dtypes.bfloat16` is BF16. Those in GPU memory (CuPy, PyTorch) are not copied: docs/how-to/triton.md.
        - outputs: names of those wanted; none = all of them. A mapping says how many bytes each may have, so that large
          ones can travel in shared memory. BYTES are arrays of `bytes`. The arrays are read-only.
        - version: the model's version; "" = the one that its policy selects.
        - parameters: the request's own (`priority`, `timeout` in microseconds, `sequence_id`, or the model's).
        - timeout: seconds; None = the handle's.
        """
        contents: list[Any] = []
        message = infer_request(model, inputs, outputs, version, parameters, contents)
        most = outputs if isinstance(outputs, Mapping) else {}
        return await self._twice(model, timeout, partial(self._infer, message, contents, most))

    async def _twice(
        self, model: str, timeout: float | None, attempt: Callable[[float | None, Metadata], Awaitable[T]]
    ) -> T:
        """A second attempt follows where the server lacks a model that it should have loaded: another process has
        unloaded it.
        """
        if not self._on_demand:
            return await attempt(timeout, ())
        timeout = self._channel.binding().timeout_s if timeout is None else timeout
        began = time.monotonic()
        try:
            return await attempt(timeout, ((MODEL_KEY, model), (LOAD_KEY, "1")))
        except NotFound as error:
            if "unknown model" not in error.message:
                raise
        left = max(0.0, timeout - (time.monotonic() - began))
        return await attempt(left, ((MODEL_KEY, model), (LOAD_KEY, "again")))

    async def _infer(
        self, message: Any, contents: list[Any], most: Mapping[str, int], timeout: float | None, metadata: Metadata
    ) -> Arrays:
        settings = Clients.current().settings
        threshold = settings.shared_memory_threshold if settings.triton_shared_memory_dir else math.inf
        on_gpu = [array for array in contents if isinstance(array, DeviceArray)]
        for array in on_gpu:
            await asyncio.to_thread(array.locate)
        if not on_gpu and max([0, *most.values(), *[array.nbytes for array in contents]]) < threshold:
            message.raw_input_contents[:] = [array.tobytes() for array in contents]
            return arrays_of(await reply_of(self._stub.ModelInfer(message, timeout=timeout, metadata=metadata)))
        request, failed = LargeRequest(message, contents, most, threshold), True
        try:
            reply = await reply_of(self._stub.ModelInfer(request, timeout=timeout, metadata=metadata))
            failed = False
            return arrays_of(reply, request.arrays(reply))
        finally:
            request.end(failed=failed)

    async def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] = (),
        version: str = "",
        parameters: Parameters | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[Arrays, None]:
        """The responses of a decoupled model to one request, as they come. Arguments as for `infer`.

        Each call is a stream of its own. Closing the generator cancels the request at the server:
        `async with contextlib.aclosing(models.stream(...)) as parts:`.
        """
        request = infer_request(model, inputs, outputs, version, parameters)

        async def begin(*options: Any) -> tuple[AsyncGenerator[Arrays, None], Arrays | None]:
            parts = self._stream(request, *options)
            return parts, await anext(parts, None)

        parts, first = await self._twice(model, timeout, begin)
        async with aclosing(parts):
            if first is not None:
                yield first
            async for part in parts:
                yield part

    async def _stream(self, request: Any, timeout: float | None, metadata: Metadata) -> AsyncGenerator[Arrays, None]:
        call = self._stub.ModelStreamInfer(timeout=timeout, metadata=metadata)
        try:
            await call.write(request)
            await call.done_writing()
            async for response in call:
                if response.error_message:
                    raise error_of(response.error_message)
                yield arrays_of(response.infer_response)
        except PierheadError as error:
            translate(error)
        finally:
            call.cancel()

    # ---- what a replica says of itself and its models; any replica is asked

    async def ready(self, model: str = "", version: str = "", *, timeout: float | None = None) -> bool:
        """Whether the server, or one model, can infer."""
        one = service_pb2.ModelReadyRequest(name=model, version=version)
        method = self._stub.ModelReady if model else self._stub.ServerReady
        request = one if model else service_pb2.ServerReadyRequest()
        return bool((await reply_of(method(request, timeout=timeout))).ready)

    async def metadata(self, model: str, version: str = "", *, timeout: float | None = None) -> Any:
        """The model's versions, inputs and outputs: a `ModelMetadataResponse`."""
        request = service_pb2.ModelMetadataRequest(name=model, version=version)
        return await reply_of(self._stub.ModelMetadata(request, timeout=timeout))

    async def config(self, model: str, version: str = "", *, timeout: float | None = None) -> Any:
        """The model's configuration: a `ModelConfig`."""
        request = service_pb2.ModelConfigRequest(name=model, version=version)
        return (await reply_of(self._stub.ModelConfig(request, timeout=timeout))).config

    # ---- every replica

    async def index(self, *, ready: bool = False, timeout: float | None = None) -> dict[str, Any]:
        """The models of the repository by replica: lists of `RepositoryIndexResponse.ModelIndex` with name, version,
        state and reason. `ready`: only those that can infer.
        """
        request = service_pb2.RepositoryIndexRequest(ready=ready)
        replies = await self._everywhere(self._one.RepositoryIndex, request, timeout)
        return {replica: list(reply.models) for replica, reply in replies.items()}

    async def statistics(self, model: str = "", version: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """What the models have done, by replica: lists of `ModelStatistics`. Of all models, or of one."""
        request = service_pb2.ModelStatisticsRequest(name=model, version=version)
        try:
            replies = await self._everywhere(self._one.ModelStatistics, request, timeout)
        except BadRequest as error:  # Triton's status for a model that is not there
            raise NotFound(error.message) from error
        return {replica: list(reply.model_stats) for replica, reply in replies.items()}

    async def load(self, model: str, *, config: Mapping[str, Any] | None = None, timeout: float | None = None) -> None:
        """Load a model, or load it again, at every replica that can be called now. Replicas that start later load what
        their own command says. `config`: replaces the model's config.pbtxt.

        The server must run with `--model-control-mode=explicit`. Raises NotFound for a model that the repository does
        not hold, RemoteError for one that does not load.
        """
        request = service_pb2.RepositoryModelLoadRequest(model_name=model)
        if config is not None:
            request.parameters["config"].string_param = json.dumps(dict(config))
        try:
            await self._everywhere(self._one.RepositoryModelLoad, request, timeout)
        except (BadRequest, RemoteError) as error:
            found = load_error(error.message)
            if found is None:
                raise
            raise found from error

    async def unload(self, model: str, *, timeout: float | None = None) -> None:
        """Unload a model at every replica that can be called now. Requests that it has begun end first."""
        request = service_pb2.RepositoryModelUnloadRequest(model_name=model)
        await self._everywhere(self._one.RepositoryModelUnload, request, timeout)

    async def _everywhere(self, method: Any, request: Any, timeout: float | None) -> dict[str, Any]:
        """Call each replica in turn; the replies by its name. Raises, at the end, one error for all that failed: of
        the first one's class.
        """
        await self.ready(timeout=timeout)  # waits for a replica
        names = sorted(replica.name for replica in self._channel.pool().replicas() if replica.callable)
        replies, errors = {}, {}
        for name in names:
            try:
                replies[name] = await reply_of(method(request, timeout=timeout, metadata=((SESSION_KEY, name),)))
            except PierheadError as error:
                errors[name] = error
        if errors:
            first = next(iter(errors.values()))
            if len(names) > 1:
                each = "; ".join(f"{name}: {error.message}" for name, error in errors.items())
                first.message = f"{len(errors)} of {len(names)} replicas failed: {each}"
                first.args = (first.message,)
            raise first
        return replies


class OneReplica:
    """A policy: the replica that the call's session id names."""

    def __init__(self, _: Any) -> None:
        """Needs no randomness."""

    def choose(self, candidates: Sequence[Any], call: Any) -> Any:
        """Raises LookupError where the replica went away, or is full."""
        for candidate in candidates:
            if candidate.name == call.session_id:
                return candidate
        raise LookupError(f"replica {call.session_id} can take no call now")
