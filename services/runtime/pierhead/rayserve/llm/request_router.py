"""Ray Serve LLM's request router: prefers the replica that has read the same beginning of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from pierhead.llm.gateway.body.prompt_text import prompt_text
from pierhead.llm.objects import OpenAIRequest
from pierhead.policies.prefix import MOST_CHARS, PrefixAware
from pierhead.rayserve.context import ReplicaID
from pierhead.rayserve.options import REFUSED_ROUTERS
from pierhead.rayserve.request_router import PendingRequest, ReplicaResult, RequestRouter, RunningReplica


def __getattr__(name: str) -> Any:
    if name in REFUSED_ROUTERS:
        raise ImportError(f"{__name__}.{name} is not supported: {REFUSED_ROUTERS[name]}")
    raise AttributeError(f"module {__name__} has no attribute {name}")


@dataclass(frozen=True)
class _PromptCall:
    """What the policy reads of a call."""

    routing_text: str
    model_id: str | None
    path: str = ""
    session_id: str | None = None

    @property
    def request(self) -> _PromptCall:
        return self


class PrefixCacheAffinityRouter(RequestRouter):
    """The policy `prefix`, for calls whose first argument is a request of `openai_api_models`."""

    def __init__(self, rng: Random, **kwargs: Any) -> None:
        super().__init__(rng, **kwargs)
        self._rng = rng

    def initialize_state(
        self,
        imbalanced_threshold: float = 10,
        match_rate_threshold: float = 0.1,
        do_eviction: bool = False,
        eviction_threshold_chars: int | None = None,
        **_: Any,
    ) -> None:
        """Ray Serve LLM's parameters. What is remembered is always bounded, and `eviction_threshold_chars` says how.

        Raises ValueError.
        """
        bound = {"max_chars": max(MOST_CHARS, eviction_threshold_chars)} if eviction_threshold_chars else {}
        self._policy = PrefixAware(
            self._rng, match_rate_threshold=match_rate_threshold, imbalance_threshold=imbalanced_threshold, **bound
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See RequestRouter."""
        of_candidate = {id(each._candidate): each for each in candidate_replicas}
        chosen = self._policy.choose([each._candidate for each in candidate_replicas], _call_of(pending_request))
        return [[of_candidate[id(chosen)]], candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """See RequestRouter."""
        replica = self.curr_replicas.get(replica_id)
        if replica is not None:
            self._policy.on_routed(replica._candidate, _call_of(pending_request))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See RequestRouter."""
        self._policy.on_replica_gone(replica_id.unique_id)


def _call_of(pending: PendingRequest | None) -> _PromptCall:
    request = pending.args[0] if pending is not None and pending.args else None
    model = None if pending is None else pending.metadata.multiplexed_model_id or None
    text = prompt_text(request.model_dump()).beginning if isinstance(request, OpenAIRequest) else ""
    return _PromptCall(text, model)
