"""The connection from `pierhead.triton` to one server: large tensors in shared memory, models loaded on demand.

LargeRequest -> a free region? -- yes -> inputs are written into it, the message carries its name and offsets
                      |
                      `- no -> the message carries the bytes, and a region of that size is made meanwhile

an input in GPU memory -> PreparedCall: its allocation is registered, then the message is sent, which carries its place

model's id -> loaded here? -- yes -> the call is sent
                   |
                   `- no -> PreparedCall: the model is loaded, and perhaps another one unloaded, then it is sent
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Generator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import triton_to_np_dtype

from pierhead.calls.clients import Clients
from pierhead.errors import BadRequest, DeadlineExceeded, NoReplica, NotFound, PierheadError, RemoteError
from pierhead.held import Held
from pierhead.lanes.connection import FOREIGN_CHANNEL_OPTIONS, GrpcConnection, Method
from pierhead.metrics import PROCESS
from pierhead.multiplex.cache import Entry, ModelCache
from pierhead.request import MODEL_KEY, TRACEPARENT_KEY
from pierhead.triton_cuda import DeviceArray
from pierhead.triton_memory import CudaRegion, TritonRegion, TritonRegions

ALIGNED = 64
"""Tensors begin at multiples of so many bytes."""

TRANSPORT = "triton"

MAX_MODELS: dict[str, int | None] = {}
"""By service: the most models that this process keeps loaded at a replica on demand; None = any number."""

LOAD_KEY = "pierhead-triton-load"
"""Metadata of a call whose model is to be loaded: "1", or "again" where the server turned out not to have it."""


class _Content:
    """What the outputs of one reply are read from; arrays have it as their base."""

    def __init__(self, region: TritonRegion) -> None:
        address = np.frombuffer(region.mapped, np.uint8).ctypes.data
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (region.size,), "data": (address, True)}
        self.region = region


class LargeRequest:
    """A request whose tensors are written, into memory or into a message, by the connection that sends it."""

    def __init__(self, message: Any, contents: Sequence[Any], most: Mapping[str, int], threshold: float) -> None:
        """`message`: without `raw_input_contents`, which are `contents`: arrays. `most`: bytes of outputs by name."""
        self._message = message
        self._contents = contents
        self._most = {name: size for name, size in most.items() if size >= threshold}
        ends = accumulate(map(_aligned, self._most.values()), initial=0)
        self._places = dict(zip(self._most, ends, strict=False))
        """Where in memory each of those outputs begins."""
        self._threshold = threshold
        self._regions: TritonRegions | None = None
        self._inputs: TritonRegion | None = None
        self._outputs: TritonRegion | None = None
        self.on_gpu: list[CudaRegion] = []

    def __getattr__(self, name: str) -> Any:
        """Policies read the message's fields."""
        return getattr(self._message, name)

    def message(self, regions: TritonRegions) -> Any:
        """The message for one server."""
        self.end(failed=True)  # where another server had it
        message = service_pb2.ModelInferRequest()
        message.CopyFrom(self._message)
        self._regions = regions
        large = [array for array in self._contents if array.nbytes >= self._threshold]
        self._inputs = self._taken([array.nbytes for array in large if not isinstance(array, DeviceArray)])
        self._outputs = self._taken(self._most.values())
        end = 0
        for tensor, array in zip(message.inputs, self._contents, strict=True):
            if isinstance(array, DeviceArray):
                self.on_gpu.append(regions.register(array))
                _refer(tensor, self.on_gpu[-1].name, array.offset, array.nbytes)
                continue
            if self._inputs is None or array.nbytes < self._threshold:
                message.raw_input_contents.append(array.tobytes())
                continue
            place = np.frombuffer(self._inputs.mapped, array.dtype, array.size, end)
            np.copyto(place.reshape(array.shape), array)
            _refer(tensor, self._inputs.name, end, array.nbytes)
            end += _aligned(array.nbytes)
        for tensor in message.outputs:
            if self._outputs is not None and tensor.name in self._most:
                _refer(tensor, self._outputs.name, self._places[tensor.name], self._most[tensor.name])
        return message

    async def registered(self) -> None:
        """Return when the server has mapped the inputs in GPU memory. Raises BadRequest where it cannot."""
        for region in self.on_gpu:
            try:
                await asyncio.shield(region.registering)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                raise region.array.refused(
                    f"Triton cannot map it, which takes the same GPU there: {error.details()}"
                ) from error

    def end(self, *, failed: bool) -> None:
        """The call is over: its memory is free, or gone."""
        for region in (self._inputs, self._outputs):
            if region is not None and self._regions is not None:
                (self._regions.remove if failed else self._regions.give_back)(region)
        self._inputs = self._outputs = None
        while self.on_gpu and self._regions is not None:
            self._regions.release(self.on_gpu.pop())

    def arrays(self, reply: Any) -> dict[str, Any]:
        """The outputs of a reply that are in memory, which is free when no array is left. Raises BadRequest."""
        region, self._outputs = self._outputs, None
        if region is None or self._regions is None:
            return {}
        content = _Content(region)
        weakref.finalize(content, _later, asyncio.get_running_loop(), self._regions.give_back, region)
        found, memory = {}, np.asarray(content)
        for output in reply.outputs:
            place = self._places.get(output.name)
            if place is None:
                continue
            if output.datatype in ("BYTES", "BF16"):
                raise BadRequest(f"output {output.name} is {output.datatype}: expected no size for it in `outputs`")
            dtype = np.dtype(triton_to_np_dtype(output.datatype))
            raw = memory[place : place + math.prod(output.shape) * dtype.itemsize]
            found[output.name] = raw.view(dtype).reshape(output.shape)
        return found

    def _taken(self, sizes: Collection[int]) -> TritonRegion | None:
        if not sizes or self._regions is None:
            return None
        region = self._regions.take(sum(map(_aligned, sizes)))
        PROCESS.shared_memory_tensors.inc((self._regions.why_none() if region is None else "shared",), len(sizes))
        return region


def _later(loop: asyncio.AbstractEventLoop, action: Callable[[TritonRegion], None], region: TritonRegion) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(action, region)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _refer(tensor: Any, region: str, offset: int, size: int) -> None:
    """Say in a message where a tensor is."""
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = size
    if offset:
        tensor.parameters["shared_memory_offset"].int64_param = offset


def load_error(words: str) -> PierheadError | None:
    """What a failed load or unload means by Triton's words; its statuses do not say it."""
    if "failed to poll from model repository" in words:
        return NotFound(words)
    failed = "load failed" in words or "explicit model load / unload is not allowed" in words
    return RemoteError(words, grpc.StatusCode.INTERNAL) if failed else None


class TritonConnection(GrpcConnection):
    """The connection to one server."""

    def __init__(self, address: str, changed: Callable[[], None], service: str = "") -> None:
        super().__init__(address, changed, options=FOREIGN_CHANNEL_OPTIONS)
        self._regions = TritonRegions(self.channel, Clients.current().settings.triton_shared_memory_dir)
        self._called = service
        self._models: _Models | None = None

    def open(
        self, method: Method, request: Any, timeout: float, metadata: Any, compression: Any, *, patient: bool = False
    ) -> Any:
        """Begin a call; see Connection."""
        pairs = dict(metadata)
        if LOAD_KEY in pairs:
            return self._open_with(pairs[MODEL_KEY], pairs[LOAD_KEY] == "again", method, request, timeout, metadata)
        return self._send(method, request, timeout, metadata, compression)

    async def close(self) -> None:
        """Unregister its memory, and close the channel. Models stay loaded: other processes use them, too."""
        if self._models is not None:
            await self._models.cache.close()
        await self._regions.close()
        await super().close()

    def _send(self, method: Method, request: Any, timeout: float, metadata: Any, compression: Any = None) -> Any:
        # Triton reads no other header of ours, and each costs more than all else that a handle adds to a call.
        traced = tuple(pair for pair in metadata if pair[0] == TRACEPARENT_KEY) or None
        if isinstance(request, LargeRequest):
            message = request.message(self._regions)
            if request.on_gpu:
                sending = self._send_registered(request, method, message, timeout, traced, compression)
                return _PreparedCall(asyncio.get_running_loop().create_task(sending))
            request = message
        return super().open(method, request, timeout, traced, compression)

    async def _send_registered(
        self, request: LargeRequest, method: Method, message: Any, timeout: float, metadata: Any, compression: Any
    ) -> Any:
        """Begin a call once the server has mapped what it is to read."""
        until = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(until):
                await request.registered()
        except TimeoutError:
            raise DeadlineExceeded("inputs in GPU memory were not registered in time") from None
        return super().open(method, message, until - asyncio.get_running_loop().time(), metadata, compression)

    def _open_with(self, model: str, again: bool, method: Method, request: Any, timeout: float, metadata: Any) -> Any:
        """Begin a call for a model, which is loaded first if necessary, and stays while the call is in flight."""
        models = self._models
        if models is None:
            models = self._models = _Models(self.channel, self._called, self)
        until = asyncio.get_running_loop().time() + timeout

        def send(entry: Entry[_Model]) -> Any:
            try:
                call = self._send(method, request, until - asyncio.get_running_loop().time(), metadata)
            except BaseException:
                models.cache.release(entry)
                raise
            call.add_done_callback(lambda _: models.cache.release(entry))
            return call

        entry = None if again else models.cache.acquire_loaded(model)
        if entry is not None:
            return send(entry)
        models.report(model)
        return _PreparedCall(asyncio.get_running_loop().create_task(models.then(send, model, again, until)))

    def _meet(self, ready: bool) -> None:
        if ready:
            return
        self._regions.lost()
        if self._models is not None:
            self._closing = asyncio.get_running_loop().create_task(self._models.cache.close())
            self._models = None


class _Models:
    """The models that this process has loaded at one server."""

    def __init__(self, channel: grpc.aio.Channel, service: str, connection: TritonConnection) -> None:
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._held = Held()
        replicas = Clients.current().pool(service, TRANSPORT).replicas()
        replica = next((each for each in replicas if each.connection is connection), None)
        if replica is None:
            raise NoReplica(f"the replica that was chosen for the call is no longer one of {service}")
        self._replica = replica
        self.cache: ModelCache[_Model] = ModelCache(
            self._load, MAX_MODELS[service], f"triton {service}", PROCESS, self._held
        )

    def report(self, *more: str) -> None:
        """Report to the router which models the replica holds, or will."""
        self._replica.models = self._held.models() | frozenset(more)

    async def then(self, send: Callable[[Entry[_Model]], Any], model: str, again: bool, until: float) -> Any:
        """Send a call once its model is loaded. `again`: although it was known as loaded."""
        try:
            async with asyncio.timeout_at(until):
                entry = await self.cache.acquire(model)
                try:
                    if again and entry.model is not None:
                        await entry.model.load_again()
                except BaseException:
                    self.cache.release(entry)
                    raise
        except TimeoutError:
            raise DeadlineExceeded(f"model {model} was not loaded in time") from None
        finally:
            self.report()
        return send(entry)

    async def _load(self, model: str) -> _Model:
        return _Model(self, model, loaded_here=await self.load(model))

    async def load(self, model: str) -> bool:
        """Whether it had to be loaded."""
        try:
            if (await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model))).ready:
                return False
            await self._stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name=model))
        except grpc.aio.AioRpcError as error:
            found = load_error(error.details() or "")
            if found is None:
                raise
            raise found from error
        return True

    async def evict(self, model: str, *, unload: bool) -> None:
        """It loses its place."""
        self.report()
        if unload and model in self.cache.entries:  # else the cache was closed, with the connection or the process
            await self._stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(model_name=model))


class _Model:
    """A loaded model, as the cache sees it."""

    def __init__(self, models: _Models, name: str, *, loaded_here: bool) -> None:
        """`loaded_here`: by this process. Other models are not its to unload."""
        self._models = models
        self._name = name
        self._loaded_here = loaded_here
        self._loading = asyncio.Lock()

    async def load_again(self) -> None:
        """Another process has unloaded it: load it, once for all calls that have met this."""
        async with self._loading:
            if await self._models.load(self._name):
                self._loaded_here = True

    async def aclose(self) -> None:
        """The cache calls it."""
        await self._models.evict(self._name, unload=self._loaded_here)


class _PreparedCall:
    """A call that is sent later: `opening` returns the transport's call. As far as handles use one."""

    def __init__(self, opening: asyncio.Task[Any]) -> None:
        self._opening = opening

    @property
    def _call(self) -> Any:
        opening = self._opening
        return None if not opening.done() or opening.cancelled() or opening.exception() else opening.result()

    @property
    def _now(self) -> Any:
        """The transport's call, or its opening while there is none."""
        return self._call or self._opening

    def __await__(self) -> Generator[Any, None, Any]:
        call = yield from self._opening.__await__()
        return (yield from call.__await__())

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in await self._opening:
            yield message

    async def write(self, request: Any) -> None:
        await (await self._opening).write(request)

    async def done_writing(self) -> None:
        await (await self._opening).done_writing()

    async def initial_metadata(self) -> Any:
        return await (await self._opening).initial_metadata()

    async def trailing_metadata(self) -> Any:
        return await (await self._opening).trailing_metadata()

    async def code(self) -> Any:
        return await (await self._opening).code()

    async def details(self) -> Any:
        return await (await self._opening).details()

    def cancel(self) -> bool:
        return bool(self._now.cancel())

    def cancelled(self) -> bool:
        return bool(self._now.cancelled())

    def done(self) -> bool:
        return bool(self._now.done())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        def opened(_: Any) -> None:
            call = self._call
            if call is None:
                callback(self)
            else:
                call.add_done_callback(callback)

        self._opening.add_done_callback(opened)
