"""The gRPC call that a method works on, for methods with a parameter `grpc_context`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakValueDictionary

import grpc

_LIVE: Final[WeakValueDictionary[int, Any]] = WeakValueDictionary()


def _live(number: int) -> Any:
    return _LIVE[number]


class RayServegRPCContext:
    """What a method with a parameter `grpc_context` gets: status and metadata of its answer."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        _LIVE[id(self)] = self
        self._metadata = dict(metadata)
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: list[tuple[str, str]] = []

    def __reduce__(self) -> Any:
        """A replica of this process gets the object itself: what it sets is the answer's."""
        return _live, (id(self),)

    def invocation_metadata(self) -> list[tuple[str, str]]:
        """The client's metadata."""
        return list(self._metadata.items())

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

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        """Set the trailing metadata."""
        self._trailing = list(metadata)

    def trailing_metadata(self) -> list[tuple[str, str]]:
        """What was set."""
        return self._trailing
