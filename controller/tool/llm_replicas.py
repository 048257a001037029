"""Sends an operation to each replica of a language model, over gRPC at the replica's own address. This works inside the
controller's container, which is on the replicas' networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc
from pierhead.llm.v1.llm_pb2 import Operation, OperationDone
from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub

_WORDS = {
    grpc.StatusCode.UNIMPLEMENTED: "it is no replica of a language model",
    grpc.StatusCode.DEADLINE_EXCEEDED: "no answer within --timeout; the replica continues the operation",
}


@dataclass(frozen=True)
class ReplicaAnswer:
    """One replica's answer; `message` is empty on success."""

    replica: str
    address: str
    done: bool
    message: str = ""
    late: bool = False
    """The replica did not answer in time."""


def operate(replicas: Sequence[tuple[str, str]], operation: Operation, timeout_s: float) -> list[ReplicaAnswer]:
    """Call all replicas, (name, address) each, at once; answers in the same order. A replica's error never raises."""
    channels = [grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) for _, address in replicas]
    try:
        calls = [LLMServerStub(channel).Operate.future(operation, timeout=timeout_s) for channel in channels]
        return list(_answers(replicas, calls))
    finally:
        for channel in channels:
            channel.close()


def _answers(
    replicas: Sequence[tuple[str, str]], calls: Sequence[grpc.Future[OperationDone]]
) -> Iterator[ReplicaAnswer]:
    for (name, address), call in zip(replicas, calls, strict=True):
        try:
            call.result()
        except grpc.RpcError as error:
            status, words = error.code(), " ".join((error.details() or "").split())
            message = _WORDS.get(status, words or status.name)
            if status is grpc.StatusCode.UNAVAILABLE:
                message = f"{message} ({address} is reached from the controller's container: run the command there)"
            yield ReplicaAnswer(
                name, address, done=False, message=message, late=status is grpc.StatusCode.DEADLINE_EXCEEDED
            )
        else:
            yield ReplicaAnswer(name, address, done=True)
