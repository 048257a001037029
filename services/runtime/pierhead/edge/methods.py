"""The methods of a servicer, for calls with undecoded requests from gRPC or a lane."""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias, cast

import grpc

from pierhead.errors import BadRequest

if TYPE_CHECKING:
    from google.protobuf.descriptor_pool import DescriptorPool

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handlers: TypeAlias = "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"


@dataclass(frozen=True, slots=True, eq=False)
class ServedMethod:
    """One method of one servicer."""

    name: str
    """package.Service/Method, as in metrics and messages."""
    service: str
    request_streaming: bool
    response_streaming: bool
    behaviour: Callable[..., Any]
    """`behaviour(request or requests, context)`: a coroutine function, or an async generator function."""
    decode: Callable[[Any], Any]
    """bytes -> request message. Raises BadRequest."""
    encode: Callable[[Any], bytes]
    is_use: bool = True
    """False: a call of it asks about the service, such as for its description; the controller does not count it."""

    def argument(self, raw: Any) -> Any:
        """The method's first argument: the decoded request, or an async iterator of decoded requests."""
        return self._decoded(raw) if self.request_streaming else self.decode(raw)

    async def _decoded(self, messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in messages:
            yield self.decode(raw)


class OwnContract(Protocol):
    """A servicer that was not generated: a service written as a class."""

    def __served__(self) -> list[ServedMethod]:
        """Its methods."""
        ...

    def __pool__(self) -> DescriptorPool:
        """Where reflection finds its contract."""
        ...


_STATUS = {status.value[0]: status for status in grpc.StatusCode}


def status_of(code: Any) -> grpc.StatusCode:
    """A status that may be given by its number."""
    return code if isinstance(code, grpc.StatusCode) else _STATUS.get(code, grpc.StatusCode.UNKNOWN)


def is_servicer(part: object) -> bool:
    """Whether an object has methods that are served over gRPC."""
    return bool(cast("OwnContract", part).__served__() if _has_own_contract(part) else registrations_of(part))


def pools_of(servicers: Iterable[object]) -> list[DescriptorPool]:
    """The descriptor pools of servicers' contracts, without the default one."""
    return [cast("OwnContract", each).__pool__() for each in servicers if _has_own_contract(each)]


def _has_own_contract(part: object) -> bool:
    return hasattr(type(part), "__served__")


def registrations_of(servicer: object) -> dict[str, Callable[[Any, Any], None]]:
    """The generated `add_<Name>Servicer_to_server` of each generated class that `servicer` implements, by its name."""
    found: dict[str, Callable[[Any, Any], None]] = {}
    for base in type(servicer).__mro__:
        module = sys.modules.get(base.__module__)
        add = getattr(module, f"add_{base.__name__}_to_server", None)
        if callable(add):
            found[base.__name__] = add
    return found


def methods_of(servicer: object) -> list[ServedMethod]:
    """Every method of a servicer. Raises TypeError for a class that was not generated, or a plain `def` method.

    A servicer's `__no_use__` names its unary methods whose calls are no use of the service.
    """
    if _has_own_contract(servicer):
        return cast("OwnContract", servicer).__served__()
    registrations = registrations_of(servicer)
    if not registrations:
        raise TypeError(f"{type(servicer).__name__} does not inherit from a generated ...Servicer class")
    recorder = _MethodRecorder()
    for base, add in registrations.items():
        before = len(recorder.services)
        add(servicer, recorder)
        if len(recorder.services) == before:
            raise TypeError(
                f"{type(servicer).__name__}: {base} registers no methods: the grpcio-tools that generated it is too "
                "old, or its .proto has none; generate its stubs again with a newer one"
            )
    no_use = getattr(servicer, "__no_use__", ())
    return [
        _method(service, name, handler, is_use=name not in no_use)
        for service, handlers in recorder.services.items()
        for name, handler in handlers.items()
    ]


class _MethodRecorder:
    """Stands in for a server while generated code registers a servicer, and records the handlers."""

    def __init__(self) -> None:
        self.services: dict[str, Handlers] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing: the other method receives the same handlers with their names."""

    def add_registered_method_handlers(self, service: str, handlers: Handlers) -> None:
        self.services[service] = handlers


def _method(service: str, name: str, handler: grpc.RpcMethodHandler[Any, Any], *, is_use: bool) -> ServedMethod:
    label = f"{service}/{name}"
    ways = ("stream" if many else "unary" for many in (handler.request_streaming, handler.response_streaming))
    behaviour: Callable[..., Any] = getattr(handler, "_".join(ways))
    if not (inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour)):
        behaviour = _not_async(label, behaviour)
    return ServedMethod(
        name=label,
        service=service,
        request_streaming=handler.request_streaming,
        response_streaming=handler.response_streaming,
        behaviour=behaviour,
        decode=decoder(label, handler.request_deserializer),
        encode=handler.response_serializer or (lambda message: message),
        is_use=is_use,
    )


def _not_async(method: str, behaviour: Callable[..., Any]) -> Callable[..., Awaitable[NoReturn]]:
    """A method that the servicer inherits answers UNIMPLEMENTED; its own method that is not async raises TypeError."""
    if not getattr(behaviour, "__module__", "").endswith("_pb2_grpc"):
        raise TypeError(
            f"{method}: {behaviour.__qualname__} must be `async def`; a plain function would block the loop"
        )

    async def unimplemented(_: object, context: Context) -> NoReturn:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented by this service")

    return unimplemented


def decoder(method: str, deserialise: Callable[[bytes], Any] | None) -> Callable[[Any], Any]:
    """What decodes a method's requests; None = they stay bytes."""
    if deserialise is None:
        return lambda raw: raw

    def decode(raw: bytes) -> Any:
        try:
            return deserialise(raw)
        except Exception as error:
            raise BadRequest(f"{method}: {len(raw)} bytes that are not the request message it expects") from error

    return decode
