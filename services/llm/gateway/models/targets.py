"""The services behind the gateway: a stub of each, and whether anybody is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
from pierhead import handle
from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub

if TYPE_CHECKING:
    from pierhead.llm.v1.llm_pb2_grpc import LLMServerAsyncStub


class Target:
    """One LLM service."""

    stub: LLMServerAsyncStub

    def __init__(self, service: str, *, timeout_s: float | None = None, max_queued_requests: int | None = None) -> None:
        self.service = service
        self._channel: grpc.aio.Channel
        self.stub = handle(self._stub, service, timeout_s=timeout_s, max_queued_requests=max_queued_requests)

    def has_replica(self) -> bool:
        """Whether a replica may be called now, full or not."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    def _stub(self, channel: grpc.aio.Channel) -> LLMServerAsyncStub:
        self._channel = channel
        return LLMServerStub(channel)


Connect = Callable[[str], Target]
