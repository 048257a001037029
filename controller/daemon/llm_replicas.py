"""Has a replica of a language model sleep, wake up or drop its cache of prompts, by gRPC at the address of requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from ..model.text import told
from ..status.records import changes

OF_NO_REPLICA = "Deadline Exceeded"
"""The details with which gRPC itself ends a call at its deadline; a replica's own deadline has others."""


@dataclass(frozen=True, slots=True)
class LLMReplica:
    """One ready replica."""

    name: str
    address: str
    """host:port, or unix:<path>"""
    token: str = field(repr=False)
    """What it asks for."""


OperateReplica = Callable[[LLMReplica, changes.Operate], Awaitable[changes.ReplicaOperated]]
"""Returns a replica's answer, also where it fails or is late. Does not raise."""


async def operate(replica: LLMReplica, wanted: changes.Operate) -> changes.ReplicaOperated:
    """See `OperateReplica`."""
    # Imported when needed: few controllers serve language models.
    from pierhead.llm.v1.llm_pb2 import Operation
    from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub

    operation = {
        "sleep": Operation(sleep=Operation.Sleep(level=wanted.level)),
        "wake": Operation(wake=Operation.Wake()),
        "reset_prefix_cache": Operation(reset_prefix_cache=Operation.ResetPrefixCache()),
    }[wanted.operation]
    shown = (("authorization", f"Bearer {replica.token}"),)
    options = (("grpc.enable_http_proxy", 0),)
    async with grpc.aio.insecure_channel(replica.address, options=options) as channel:
        try:
            await LLMServerStub(channel).Operate(operation, timeout=wanted.timeout_s, metadata=shown)
        except grpc.aio.AioRpcError as error:
            return _failed(replica, error, wanted.timeout_s)
    return changes.ReplicaOperated(replica.name, done=True, message="", late=False)


def _failed(replica: LLMReplica, error: grpc.aio.AioRpcError, timeout_s: float) -> changes.ReplicaOperated:
    status, message = error.code(), told(error.details() or "") or error.code().name
    is_late = status is grpc.StatusCode.DEADLINE_EXCEEDED
    if is_late and message == OF_NO_REPLICA:
        message = f"no answer within {timeout_s:g} s; the replica may still carry it out"
    elif status is grpc.StatusCode.UNIMPLEMENTED:
        message = "it is no replica of a language model"
    return changes.ReplicaOperated(replica.name, done=False, message=message, late=is_late)
