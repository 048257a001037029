"""A Triton server in memory with the models of tests/contract/triton_models; statuses and words are Triton 2.51's."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
from pierhead.triton.messages import infer_request
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

S = grpc.StatusCode
INPUTS = {
    "add": {"a": "FP32", "b": "FP32"},
    "repeat": {"values": "INT32", "delay_ms": "INT32"},
    "same": {"text": "BYTES", "half": "FP16"},
    "slow": {"seconds": "FP32"},
}


class TextError(Exception):
    pass


class Texts:
    """In a stream, errors come as a text."""

    async def abort(self, _: grpc.StatusCode, words: str) -> None:
        raise TextError(words)


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, *, gpu: bool = False) -> None:
        self.gpu = gpu
        self.loaded = set(INPUTS)
        self.lacks: set[str] = set()
        """Models that its repository does not hold."""
        self.explicit = True
        self.refusal_s = 0.0
        """How long it takes to say that a model is unknown."""
        self.loads: list[str] = []
        self.limits: list[float] = []
        """Seconds that each inference may take."""
        self.cancelled = 0
        self.slow = asyncio.Lock()
        self.waiting = 0
        self.ids: list[str] = []
        self.regions: dict[str, mmap.mmap] = {}
        self.on_gpu: dict[str, Any] = {}
        self.may_register = asyncio.Event()
        self.may_register.set()
        self.registering = self.registered = 0
        self.reading: Counter[str] = Counter()
        """Requests that use a region, by its name."""

    async def _inputs(self, request: Any, context: Any) -> dict[str, Any]:
        model = request.model_name
        if model not in self.loaded:
            await asyncio.sleep(self.refusal_s)
            known = "has no available versions" if model in {*INPUTS, "broken"} else "is not found"
            await context.abort(S.NOT_FOUND, f"Request for unknown model: '{model}' {known}")
        if request.model_version not in ("", "1"):
            await context.abort(
                S.NOT_FOUND, f"Request for unknown model: '{model}' version {request.model_version} is not found"
            )
        self.ids.append(request.id)
        for tensor in request.inputs:
            expected = INPUTS[model].get(tensor.name)
            if expected is None:
                await context.abort(
                    S.INVALID_ARGUMENT, f"unexpected inference input '{tensor.name}' for model '{model}'"
                )
            if tensor.datatype != expected:
                words = f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model '{model}' expects"
                await context.abort(S.INVALID_ARGUMENT, f"{words} '{expected}'")
            if len(tensor.shape) != 1 and model != "slow":
                words = f"unexpected shape for input '{tensor.name}' for model '{model}'. Expected [-1]"
                await context.abort(S.INVALID_ARGUMENT, f"{words}, got {list(tensor.shape)}")
        raws = iter(request.raw_input_contents)
        contents = [self._shared(tensor) if tensor.parameters else next(raws) for tensor in request.inputs]
        read = service_pb2.ModelInferResponse(raw_output_contents=contents)
        for tensor in request.inputs:
            read.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        return {tensor.name: InferResult(read).as_numpy(tensor.name) for tensor in request.inputs}

    def _shared(self, tensor: Any) -> bytes:
        name, start, size = place_of(tensor)
        return bytes({**self.regions, **self.on_gpu}[name][start : start + size])

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        self.limits.append(context.time_remaining())
        used = Counter(place_of(each)[0] for each in (*request.inputs, *request.outputs) if each.parameters)
        self.reading.update(used)
        answer = asyncio.ensure_future(self._infer(request, context))  # continues when the caller has left
        answer.add_done_callback(lambda _: self.reading.subtract(used))
        return await asyncio.shield(answer)

    async def _infer(self, request: Any, context: Any) -> Any:
        answer = await self._outputs(request, context)
        for wanted in request.outputs:
            if wanted.parameters:
                index = [output.name for output in answer.outputs].index(wanted.name)
                raw, (name, start, size) = answer.raw_output_contents[index], place_of(wanted)
                if len(raw) > size:
                    words = f"shared memory size specified with the request for output '{wanted.name}' ({size} bytes)"
                    await context.abort(S.INTERNAL, f"{words} should be at least {len(raw)} bytes to hold the results")
                self.regions[name][start : start + len(raw)] = raw
                answer.raw_output_contents[index] = b""
        return answer

    async def _outputs(self, request: Any, context: Any) -> Any:
        arrays = await self._inputs(request, context)
        if request.model_name == "repeat":
            words = "ModelInfer RPC doesn't support models with decoupled transaction policy"
            await context.abort(S.UNIMPLEMENTED, words)
        if request.model_name == "slow":
            await self._take_turn(context)
            async with self.slow:
                await asyncio.sleep(float(arrays["seconds"][0][0]))
            return reply({"slept": arrays["seconds"]}, request.outputs)
        if request.model_name == "same":
            return reply({f"{name}_out": array for name, array in arrays.items()}, request.outputs)
        if arrays["a"][0] < 0:
            words = (
                "Failed to process the request(s) for model 'add_0_0', message: ValueError: a: expected a number >= 0"
            )
            await context.abort(S.INTERNAL, words)
        return reply({"sum": arrays["a"] + arrays["b"]}, request.outputs)

    async def _take_turn(self, context: Any) -> None:
        if self.slow.locked():
            if self.waiting:
                await context.abort(S.UNAVAILABLE, "[request id: <id_unknown>] Exceeds maximum queue size")
            self.waiting += 1
            await asyncio.sleep(0.2)
            self.waiting -= 1
            await context.abort(S.UNAVAILABLE, "Request timeout expired")

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            try:
                arrays = await self._inputs(request, Texts())
            except TextError as error:
                yield service_pb2.ModelStreamInferResponse(error_message=str(error))
                return
            try:
                for value in arrays["values"]:
                    if value == -1:
                        yield service_pb2.ModelStreamInferResponse(error_message="-1 was asked for")
                        continue
                    sent = reply({"value": np.array([value], np.int32)}, ())
                    yield service_pb2.ModelStreamInferResponse(infer_response=sent)
                    await asyncio.sleep(arrays["delay_ms"][0] / 1000)
            except (asyncio.CancelledError, GeneratorExit):
                self.cancelled += 1
                raise

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        try:
            fd = os.open(f"/dev/shm{request.key}", os.O_RDWR)
        except OSError:
            await context.abort(S.INTERNAL, f"Unable to open shared memory region: '{request.key}'")
        self.regions[request.name] = mmap.mmap(fd, request.byte_size)
        os.close(fd)
        return service_pb2.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        if self.reading[request.name]:
            words = f"Cannot unregister shared memory region '{request.name}', it is currently in use."
            await context.abort(S.INTERNAL, words)
        self.regions.pop(request.name, None)
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        answer = service_pb2.SystemSharedMemoryStatusResponse()
        for name in self.regions:
            answer.regions[name].name = name
        return answer

    async def CudaSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        """The handle is the address of what stands for GPU memory, in this process."""
        if not self.gpu:
            await context.abort(S.INVALID_ARGUMENT, "failed to register shared memory region: invalid args")
        self.registering += 1
        await asyncio.shield(asyncio.ensure_future(self._map(request)))  # continues when the caller has left
        return service_pb2.CudaSharedMemoryRegisterResponse()

    async def _map(self, request: Any) -> None:
        await self.may_register.wait()
        self.registered += 1
        self.on_gpu[request.name] = (ctypes.c_char * request.byte_size).from_address(int.from_bytes(request.raw_handle))

    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        """As later versions: agreed to at once, done when nothing reads it."""
        if not self.reading[request.name]:
            self.on_gpu.pop(request.name, None)
        return service_pb2.CudaSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        answer = service_pb2.CudaSharedMemoryStatusResponse()
        for name in self.on_gpu:
            answer.regions[name].name = name
        return answer

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name in self.loaded)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        if request.name not in self.loaded:
            await context.abort(S.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        reply = service_pb2.ModelMetadataResponse(name=request.name, versions=["1"], platform="python")
        for name, datatype in INPUTS[request.name].items():
            reply.inputs.add(name=name, datatype=datatype, shape=[-1])
        return reply

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        reply = service_pb2.ModelConfigResponse()
        reply.config.name, reply.config.backend = request.name, "python"
        return reply

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        if request.name and request.name not in self.loaded:
            await context.abort(S.INVALID_ARGUMENT, f"requested model '{request.name}' is not available")
        reply = service_pb2.ModelStatisticsResponse()
        for name in sorted(self.loaded):
            if request.name in ("", name):
                reply.model_stats.add(name=name, version="1", inference_count=len(self.ids))
        return reply

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        reply = service_pb2.RepositoryIndexResponse()
        for name in sorted({*INPUTS, "broken"}):
            if name in self.loaded:
                reply.models.add(name=name, version="1", state="READY")
            elif not request.ready:
                reply.models.add(name=name, version="1", state="UNAVAILABLE", reason="unloaded")
        return reply

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        name = request.model_name
        if not self.explicit:
            await context.abort(S.UNAVAILABLE, "explicit model load / unload is not allowed")
        if name == "broken":
            words = "version 1 is at UNAVAILABLE state: Internal: RuntimeError: no weights"
            await context.abort(S.INVALID_ARGUMENT, f"load failed for model '{name}': {words}")
        if name not in INPUTS or name in self.lacks:
            await context.abort(S.INTERNAL, f"failed to load '{name}', failed to poll from model repository")
        await asyncio.sleep(0.01)
        self.loads.append(name)
        self.loaded.add(name)
        return service_pb2.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        self.loaded.discard(request.model_name)
        return service_pb2.RepositoryModelUnloadResponse()


def place_of(tensor: Any) -> tuple[str, int, int]:
    """Where in shared memory a tensor is: region, offset, bytes."""
    found = tensor.parameters
    start = found["shared_memory_offset"].int64_param if "shared_memory_offset" in found else 0
    return found["shared_memory_region"].string_param, start, found["shared_memory_byte_size"].int64_param


def reply(arrays: dict[str, Any], wanted: Any) -> Any:
    """Packed as requests are."""
    names = [output.name for output in wanted] or list(arrays)
    packed = infer_request("", {name: arrays[name] for name in names})
    answer = service_pb2.ModelInferResponse(raw_output_contents=packed.raw_input_contents)
    for tensor in packed.inputs:
        answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return answer
