"""The gRPC call that a method works on: its status and metadata (`grpc_context`), and the client's messages."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Generic, TypeVar
from weakref import WeakValueDictionary

import grpc

T = TypeVar("T")

_LIVE: Final[WeakValueDictionary[int, Any]] = WeakValueDictionary()


def _live(number: int) -> Any:
    return _LIVE[number]


class _OfThisProcess:
    """A replica of this process gets the object itself, and no copy."""

    def __reduce__(self) -> Any:
        _LIVE[id(self)] = self
        return _live, (id(self),)


class gRPCInputStream(_OfThisProcess, Generic[T]):  # noqa: N801 - Ray Serve's name
    """The messages of a client that sends many: what a method gets in the place of one request."""

    def __init__(self, request_iterator: AsyncIterator[T]) -> None:
        self._messages = request_iterator
        self._cancelled = False
        self._exhausted = False

    def __aiter__(self) -> gRPCInputStream[T]:
        return self

    async def __anext__(self) -> T:
        """The next message."""
        if self._exhausted or self._cancelled:
            raise StopAsyncIteration
        try:
            return await anext(self._messages)
        except StopAsyncIteration:
            self._exhausted = True
            raise

    def cancel(self) -> None:
        """End the iteration."""
        self._cancelled = True

    def is_cancelled(self) -> bool:
        """Whether the client has gone, or `cancel` was called."""
        return self._cancelled

    @property
    def is_exhausted(self) -> bool:
        """Whether the client has sent its last message, and it was read."""
        return self._exhausted


def _kept(attribute: str, words: str) -> Any:
    """A method that returns an attribute."""

    def get(self: Any) -> Any:
        return getattr(self, attribute)

    get.__doc__ = words
    return get


def _entry(key: str, words: str) -> Any:
    """A method that returns an entry of the client's metadata, or None."""

    def get(self: Any) -> Any:
        return self._by_key.get(key)

    get.__doc__ = words
    return get


class RayServegRPCContext(_OfThisProcess):
    """What a method with a parameter `grpc_context` gets: the client's metadata, and what its answer is to have."""

    def __init__(self, grpc_context: Any) -> None:
        """`grpc_context`: gRPC's own."""
        self._metadata: list[tuple[str, Any]] = [tuple(pair) for pair in grpc_context.invocation_metadata() or ()]
        self._by_key = dict(self._metadata)
        self._peer: str = grpc_context.peer()
        self._auth: dict[str, Any] = dict(grpc_context.auth_context())
        self._identities = grpc_context.peer_identities()
        self._identity_key = grpc_context.peer_identity_key()
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._compression: grpc.Compression | None = None
        self._id = self._by_key.get("request_id") or str(uuid.uuid4())
        self._trailing: list[tuple[str, Any]] = [("request_id", self._id)]

    invocation_metadata = _kept("_metadata", "The client's metadata.")
    application = _entry("application", "The application that the client has named.")
    request_id = _entry("request_id", "The request's id that the client has set.")
    multiplexed_model_id = _entry("multiplexed_model_id", "The model that the client has named.")
    traceparent = _entry("traceparent", "The client's trace.")
    tracestate = _entry("tracestate", "The client's trace: what its vendor adds.")
    peer = _kept("_peer", "The client's address.")
    auth_context = _kept("_auth", "What the connection has proved of the client.")
    peer_identities = _kept("_identities", "The client's proved names; None without any.")
    peer_identity_key = _kept("_identity_key", "Which entry of `auth_context` they are.")
    code = _kept("_code", "The status that was set.")
    details = _kept("_details", "The words that were set.")
    trailing_metadata = _kept("_trailing", "What was set, and the request's id.")

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the status."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Set the status's words."""
        self._details = details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Set how the answer is compressed."""
        self._compression = compression

    def set_trailing_metadata(self, trailing_metadata: Sequence[tuple[str, str]]) -> None:
        """Set the trailing metadata, to which the request's id is added."""
        self._trailing = [("request_id", self._id), *trailing_metadata]

    def _set_on_grpc_context(self, context: Any) -> None:
        """Make the answer what was set."""
        if self._code is not None:
            context.set_code(self._code)
        if self._details:
            context.set_details(self._details)
        if self._compression is not None:
            context.set_compression(self._compression)
        context.set_trailing_metadata(self._trailing)
