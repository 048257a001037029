"""Arrays in Triton's messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from pierhead.errors import BadRequest
from pierhead.request import current_request
from pierhead.triton.cuda import DeviceArray

Parameters = Mapping[str, bool | int | float | str]
Arrays = dict[str, Any]
"""NumPy arrays by the names of tensors."""


def infer_request(
    model: str,
    inputs: Mapping[str, Any],
    outputs: Iterable[str] = (),
    version: str = "",
    parameters: Parameters | None = None,
) -> Any:
    """The `ModelInferRequest` of arrays. Raises BadRequest that names the input or the parameter."""
    request, contents = request_and_contents(model, inputs, outputs, version, parameters)
    request.raw_input_contents.extend(array.tobytes() for array in contents)
    return request


def request_and_contents(
    model: str, inputs: Mapping[str, Any], outputs: Iterable[str], version: str, parameters: Parameters | None
) -> tuple[Any, list[Any]]:
    """The request without its inputs' contents, and those: arrays."""
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version)
    contents = []
    context = current_request()
    if context is not None:
        request.id = context.request_id
    for name, value in inputs.items():
        on_gpu = hasattr(value, "__cuda_array_interface__")
        array: Any = DeviceArray(f"input {name} of model {model}", value) if on_gpu else np.asarray(value)
        if array.dtype.kind == "U":
            array = array.astype(object)
        datatype = np_to_triton_dtype(array.dtype)
        if datatype is None:
            raise BadRequest(f"input {name} of model {model}: Triton has no dtype for {array.dtype}")
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        contents.append(np.frombuffer(_packed(array), np.uint8) if datatype == "BYTES" else array)
    for name in outputs:
        request.outputs.add(name=name)
    for name, found in (parameters or {}).items():
        _set_parameter(request.parameters[name], name, found)
    return request, contents


def _packed(array: Any) -> bytes:
    return bytes(serialize_byte_tensor(array).item()) if array.size else b""


def _set_parameter(parameter: Any, name: str, value: object) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case int() if name == "priority":
            parameter.uint64_param = value
        case int():
            parameter.int64_param = value
        case float():
            parameter.double_param = value
        case str():
            parameter.string_param = value
        case _:
            raise BadRequest(f"parameter {name}: expected a bool, int, float or str, found a {type(value).__name__}")


def arrays_of(response: Any, shared: Arrays | None = None) -> Arrays:
    """The outputs; those in shared memory are given."""
    result, given = InferResult(response), shared or {}
    return {
        output.name: given[output.name] if output.name in given else result.as_numpy(output.name)
        for output in response.outputs
    }
