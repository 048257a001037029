"""Reflection over contracts of several descriptor pools: that of generated code, and one for each service's class."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pool import DescriptorPool


class JoinedPools:
    """What reflection asks of a pool; the first pool that knows a name answers."""

    def __init__(self, pools: Sequence[DescriptorPool]) -> None:
        self._pools = (descriptor_pool.Default(), *pools)

    def _first(self, find: str, name: str) -> Any:
        for pool in self._pools:
            try:
                return getattr(pool, find)(name)
            except KeyError:
                continue
        raise KeyError(name)

    FindFileByName = partialmethod(_first, "FindFileByName")
    FindFileContainingSymbol = partialmethod(_first, "FindFileContainingSymbol")
    FindMessageTypeByName = partialmethod(_first, "FindMessageTypeByName")

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:
        """As a pool\'s."""
        return message.file.pool.FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:
        """As a pool\'s."""
        return message.file.pool.FindAllExtensions(message)
