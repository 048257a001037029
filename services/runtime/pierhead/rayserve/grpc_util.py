"""The gRPC call that a method works on: its status and metadata (`grpc_context`), and the client's messages."""

from __future__ import annotations

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


class RayServegRPCContext(_OfThisProcess):
    """What a method with a parameter `grpc_context` gets: the client's metadata, and what its answer is to have."""

    def __init__(self, grpc_context: Any, request_id: str) -> None:
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
        self._request_id = [("request_id", request_id)]
        self._trailing = self._request_id

    # ---- of the request

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        """The client's metadata."""
        return self._metadata

    def application(self) -> str | None:
        """The application that the client has named."""
        return self._by_key.get("application")

    def request_id(self) -> str | None:
        """The request's id that the client has set."""
        return self._by_key.get("request_id")

    def multiplexed_model_id(self) -> str | None:
        """The model that the client has named."""
        return self._by_key.get("multiplexed_model_id")

    def traceparent(self) -> str | None:
        """The client's trace."""
        return self._by_key.get("traceparent")

    def tracestate(self) -> str | None:
        """The client's trace: what its vendor adds."""
        return self._by_key.get("tracestate")

    def peer(self) -> str:
        """The client's address."""
        return self._peer

    def auth_context(self) -> dict[str, Any]:
        """What the connection has proved of the client."""
        return self._auth

    def peer_identities(self) -> Any:
        """The client's proved names; None without any."""
        return self._identities

    def peer_identity_key(self) -> str | None:
        """Which entry of `auth_context` they are."""
        return self._identity_key  # type: ignore[no-any-return]

    # ---- of the answer

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the status."""
        self._code = code

    def code(self) -> grpc.StatusCode | None:
        """The status that was set."""
        return self._code

    def set_details(self, details: str) -> None:
        """Set the status's words."""
        self._details = details

    def details(self) -> str:
        """The words that were set."""
        return self._details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Set how the answer is compressed."""
        self._compression = compression

    def set_trailing_metadata(self, trailing_metadata: Sequence[tuple[str, str]]) -> None:
        """Set the trailing metadata, to which the request's id is added."""
        self._trailing = [*self._request_id, *trailing_metadata]

    def trailing_metadata(self) -> list[tuple[str, str]]:
        """What was set, and the request's id."""
        return self._trailing

    def _set_on_grpc_context(self, context: Any) -> None:
        """Make the answer what was set."""
        if self._code is not None:
            context.set_code(self._code)
        if self._details:
            context.set_details(self._details)
        if self._compression is not None:
            context.set_compression(self._compression)
        context.set_trailing_metadata(self._trailing)
