"""Reads `x-serve.shared_memory`, and gives a replica its environment and the directory of sockets. Pure.

The directory is a volume of the project that only replicas with shared memory mount. It holds Unix sockets, through
which they pass each other memory; the memory itself has no name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pierhead.serve_block import ServeBlock, SharedMemoryBlock

from ..model.spec import size_words
from .attachments import with_volume
from .problems import Problems, ServiceSource, at
from .serve_block import memory_bytes, shared_memory_size
from .stack_options import StackOptions

VOLUME = "memory-sockets"
"""Its name in the top-level volumes section (compose/compose.yaml)."""
DIRECTORY = "/run/pierhead/memory"
OPTIONS = {"type": "tmpfs", "device": "tmpfs", "o": "mode=1733,size=1m,nosuid,nodev,noexec"}
"""Of the volume, as compose/compose.yaml has them."""
DEFAULT_SIZE = "1GiB"
STACK_VARIABLE = "PIERHEAD_SHARED_MEMORY"
"""The size for managed services that write none, in the environment of the controller's service."""


@dataclass(frozen=True, slots=True)
class SharedMemoryLimits:
    """How much memory one replica may share, and from which size on a tensor travels by it. Bytes."""

    size: int = 0
    threshold: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a managed replica."""
        size = {"PIERHEAD_SHARED_MEMORY_BYTES": str(self.size)}
        if not self.size:
            return size
        return size | {
            "PIERHEAD_SHARED_MEMORY_THRESHOLD": str(self.threshold),
            "PIERHEAD_SHARED_MEMORY_DIR": DIRECTORY,
        }


def stack_size(stack: StackOptions) -> str | None:
    """The size that the stack gives to managed services that write none; None = they have no shared memory."""
    written = stack.get(STACK_VARIABLE)
    if not written:
        return None
    if (size := shared_memory_size(written)) is None:
        stack.expected(STACK_VARIABLE, 'a size from "1MiB" to "1TiB" such as "2GiB", or 0', written)
    return size


def shared_memory(path: str, block: ServeBlock, of_the_stack: str | None, problems: Problems) -> SharedMemoryLimits:
    """The shared memory of one replica. `path` is the block's path."""
    if not block.is_managed:
        if block.shared_memory is not None:
            problems.add(
                at(path, "shared_memory"),
                "needs an image that is built on Pierhead's runtime (managed: true): another program cannot receive "
                "memory from a replica; remove it, and tensors travel as bytes",
            )
        return SharedMemoryLimits()
    if block.shared_memory is None and of_the_stack is None:
        return SharedMemoryLimits()
    written = block.shared_memory or SharedMemoryBlock()
    size = memory_bytes(written.size or of_the_stack or DEFAULT_SIZE)
    return SharedMemoryLimits(size, memory_bytes(written.threshold))


def check_memory_limit(path: str, memory: SharedMemoryLimits, container: Mapping[str, Any], problems: Problems) -> None:
    """Add a problem where the container's memory limit leaves nothing but the shared memory, which counts in it."""
    limit = container.get("HostConfig", {}).get("Memory") or 0
    if memory.size and 0 < limit <= memory.size:
        problems.add(
            at(path, "shared_memory.size"),
            f"expected less than the container's memory limit ({size_words(limit)}), found {size_words(memory.size)}: "
            "the memory that a replica shares counts in its container's, and the kernel would kill it; raise mem_limit "
            "(deploy.resources.limits.memory), or write a smaller size (0 = no shared memory)",
        )


def with_memory_sockets(source: ServiceSource) -> ServiceSource:
    """The service with the directory of sockets among its volumes."""
    return with_volume(source, VOLUME, [{"target": DIRECTORY, "volume": {"nocopy": True}}], driver_opts=OPTIONS)
