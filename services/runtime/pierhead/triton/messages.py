"""Arrays in Triton's messages, or in memory that this process and the server have mapped.

a free region? -- yes -> inputs are written into it, the message carries its name and offsets
       |
       `- no -> the message carries the bytes, and a region of that size is made for later calls

an input in GPU memory -> its allocation is registered, then the message is sent, which carries its place
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor, triton_to_np_dtype

from pierhead.errors import BadRequest, DeadlineExceeded
from pierhead.memory.pool import Region
from pierhead.memory.regions import Content
from pierhead.request import current_request
from pierhead.triton.cuda import DeviceArray
from pierhead.triton.regions import CudaRegion, TritonRegions

Parameters = Mapping[str, bool | int | float | str]
Arrays = dict[str, Any]
"""NumPy arrays by the names of tensors."""

PARAMETER_FIELDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
"""By type; a bool is also an int."""

ALIGNED = 64
"""In memory, tensors begin at multiples of this many bytes."""


def infer_request(
    model: str,
    inputs: Mapping[str, Any],
    outputs: Iterable[str] = (),
    version: str = "",
    parameters: Parameters | None = None,
    contents: list[Any] | None = None,
) -> Any:
    """The `ModelInferRequest` of arrays. `contents`: takes what is in the inputs, arrays, in place of the message.
    Raises BadRequest that names the input or the parameter.
    """
    context = current_request()
    request = service_pb2.ModelInferRequest(
        model_name=model, model_version=version, id="" if context is None else context.request_id
    )
    for name, value in inputs.items():
        on_gpu = hasattr(value, "__cuda_array_interface__")
        array: Any = DeviceArray(f"input {name} of model {model}", value) if on_gpu else np.asarray(value)
        if array.dtype.kind == "U":
            array = array.astype(object)
        datatype = np_to_triton_dtype(array.dtype)
        if datatype is None:
            raise BadRequest(f"input {name} of model {model}: Triton has no dtype for {array.dtype}")
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if datatype == "BYTES":
            array = np.frombuffer(serialize_byte_tensor(array).item() if array.size else b"", np.uint8)
        if contents is None:
            request.raw_input_contents.append(array.tobytes())
        else:
            contents.append(array)
    for name in outputs:
        request.outputs.add(name=name)
    for name, given in (parameters or {}).items():
        field = next((field for kind, field in PARAMETER_FIELDS.items() if isinstance(given, kind)), None)
        if field is None:
            found = type(given).__name__
            raise BadRequest(f"parameter {name}: expected a bool, int, float or str, found a {found}")
        if (name, field) == ("priority", "int64_param"):
            field = "uint64_param"
        setattr(request.parameters[name], field, given)
    return request


def arrays_of(response: Any, shared: Arrays | None = None) -> Arrays:
    """The outputs; those in shared memory are given."""
    result, given = InferResult(response), shared or {}
    return {
        output.name: given[output.name] if output.name in given else result.as_numpy(output.name)
        for output in response.outputs
    }


class LargeRequest:
    """A request whose tensors are written, into memory or into a message, by the connection that sends it."""

    _regions: TritonRegions
    """The server's, to which the message goes."""

    def __init__(self, message: Any, contents: Sequence[Any], most: Mapping[str, int], threshold: float) -> None:
        """`message`: without `raw_input_contents`, which are `contents`: arrays. `most`: bytes of outputs by name."""
        self._message = message
        self._contents = contents
        self._most = {name: size for name, size in most.items() if size >= threshold}
        ends = accumulate(map(_aligned, self._most.values()), initial=0)
        self._places = dict(zip(self._most, ends, strict=False))
        """Where in memory each of those outputs begins."""
        self._threshold = threshold
        self._inputs: Region | None = None
        self._outputs: Region | None = None
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
        self._inputs = regions.take([_aligned(each.nbytes) for each in large if not isinstance(each, DeviceArray)])
        self._outputs = regions.take([*map(_aligned, self._most.values())])
        end = 0
        for tensor, array in zip(message.inputs, self._contents, strict=True):
            if isinstance(array, DeviceArray):
                self.on_gpu.append(regions.register(array))
                _refer(tensor, self.on_gpu[-1].name, array.offset, array.nbytes)
            elif self._inputs is None or array.nbytes < self._threshold:
                message.raw_input_contents.append(array.tobytes())
            else:
                place = np.frombuffer(self._inputs.memory.view(self._inputs.size), array.dtype, array.size, end)
                np.copyto(place.reshape(array.shape), array)
                _refer(tensor, self._inputs.name.decode(), end, array.nbytes)
                end += _aligned(array.nbytes)
        for tensor in message.outputs:
            if self._outputs is not None and tensor.name in self._most:
                _refer(tensor, self._outputs.name.decode(), self._places[tensor.name], self._most[tensor.name])
        return message

    async def registered(self, until: float) -> None:
        """Return when the server has mapped the inputs in GPU memory. `until`: by the loop's clock.
        Raises BadRequest where it cannot, DeadlineExceeded.
        """
        for region in self.on_gpu:
            try:
                async with asyncio.timeout_at(until):
                    await asyncio.shield(region.registering)
            except TimeoutError:
                raise DeadlineExceeded("inputs in GPU memory were not registered in time") from None
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                raise region.array.refused(
                    f"Triton cannot map it, which takes the same GPU there: {error.details()}"
                ) from error

    def end(self, *, failed: bool) -> None:
        """The call is over: its memory is free, or gone."""
        for region in (self._inputs, self._outputs):
            if region is not None:
                self._regions.end(region, failed=failed)
        self._inputs = self._outputs = None
        while self.on_gpu:
            self._regions.unregister(self.on_gpu.pop().name)

    def arrays(self, reply: Any) -> Arrays:
        """The outputs of a reply that are in memory, which is free when no array is left. Raises BadRequest."""
        region, self._outputs = self._outputs, None
        if region is None:
            return {}
        content = Content((region.name, region.generation), region.memory, region.size)
        weakref.finalize(content, self._regions.end_soon, region)
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


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _refer(tensor: Any, region: str, offset: int, size: int) -> None:
    """Say in a message where a tensor is."""
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = size
    if offset:
        tensor.parameters["shared_memory_offset"].int64_param = offset
