"""Ray Serve's request routers: a class with `choose_replicas`, as a policy that chooses a replica for each call.

    RequestRouterConfig(request_router_class="my_package.routing:MyRouter") --> x-serve.router.policy, and `serve.run`

Each handle has a router of its own in containers; in `serve.run` a deployment has one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

from pierhead.policies.policy import Candidate
from pierhead.rayserve.context import DeploymentID, ReplicaID, _RequestContext

__all__ = [
    "FIFOMixin",
    "LocalityMixin",
    "MultiplexMixin",
    "PendingRequest",
    "ReplicaID",
    "ReplicaResult",
    "RequestRouter",
    "RunningReplica",
]

ReplicaResult: TypeAlias = Any
"""Always None: a call's result is not known when it is routed."""


@dataclass
class PendingRequest:
    """A call that is to get a replica."""

    args: Sequence[Any] = ()
    """Of an HTTP request none."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    metadata: _RequestContext = field(default_factory=_RequestContext)
    created_at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class _Routed:
    """A call on its way."""

    deployment: DeploymentID
    max_ongoing_requests: int
    pending: PendingRequest


_ROUTED: ContextVar[_Routed | None] = ContextVar("rayserve_routed", default=None)
_OF_NONE: Final = _Routed(DeploymentID(""), 1, PendingRequest())


def tell_routers(
    deployment: DeploymentID,
    max_ongoing_requests: int,
    call: _RequestContext,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Note which call the running task is to find a replica for."""
    _ROUTED.set(_Routed(deployment, max_ongoing_requests, PendingRequest(args, kwargs, call)))


class RunningReplica:
    """A replica as a router sees it."""

    def __init__(self, candidate: Candidate, deployment: DeploymentID, max_ongoing_requests: int) -> None:
        self._candidate = candidate
        self.replica_id = ReplicaID(candidate.name, deployment)
        self.max_ongoing_requests = max_ongoing_requests

    @property
    def node_id(self) -> str:
        """The machine that it runs on; "" = unknown."""
        return self._candidate.node

    @property
    def availability_zone(self) -> None:
        """Always None."""
        return

    @property
    def multiplexed_model_ids(self) -> set[str]:
        """The models that it holds."""
        return set(self._candidate.models)

    @property
    def routing_stats(self) -> dict[str, Any]:
        """What its `record_routing_stats` has returned last; in containers what it has published."""
        return dict(self._candidate.stats)


class RequestRouter:
    """Chooses replicas; a user's class is derived from it. Used as a policy (`pierhead.policies`)."""

    waits_for_named = True

    def __init__(self, rng: Random, **kwargs: Any) -> None:
        """`kwargs`: `request_router_kwargs`, for `initialize_state`."""
        self._settings: dict[str, Any] | None = kwargs
        self._replicas: dict[ReplicaID, RunningReplica] = {}
        self._routed: WeakKeyDictionary[Any, _Routed] = WeakKeyDictionary()

    def initialize_state(self, **kwargs: Any) -> None:
        """Called once, with `request_router_kwargs`, before the first call is routed."""

    @property
    def curr_replicas(self) -> dict[ReplicaID, RunningReplica]:
        """The replicas that the last call could have got."""
        return self._replicas

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, best first. The call goes to the first with room; where none has any, it waits."""
        raise NotImplementedError

    def select_available_replicas(self, candidates: list[RunningReplica] | None = None) -> list[RunningReplica]:
        """Those that have room."""
        among = self._replicas.values() if candidates is None else candidates
        return [each for each in among if each._candidate.load < each.max_ongoing_requests]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """The call goes to this replica."""

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """The replica has gone."""

    # ---- the policy

    async def choose(self, candidates: Sequence[Any], call: Any) -> list[list[Any]]:
        """See `pierhead.policies.policy`."""
        if self._settings is not None:
            settings, self._settings = self._settings, None
            self.initialize_state(**settings)
        routed = self._routed[call] = _ROUTED.get() or _OF_NONE
        replicas = [RunningReplica(each, routed.deployment, routed.max_ongoing_requests) for each in candidates]
        self._replicas = {each.replica_id: each for each in replicas}
        groups = await self.choose_replicas(replicas, routed.pending)
        return [[replica._candidate for replica in group] for group in groups]

    def on_routed(self, candidate: Candidate, call: Any) -> None:
        """See `pierhead.policies.policy`."""
        # A call that has waited gets its replica in the context of the one that has left it.
        routed = self._routed.get(call) or _ROUTED.get() or _OF_NONE
        self.on_request_routed(routed.pending, ReplicaID(candidate.name, routed.deployment), None)

    def on_replica_gone(self, name: str) -> None:
        """See `pierhead.policies.policy`."""
        for replica_id in [each for each in self._replicas if each.unique_id == name]:
            del self._replicas[replica_id]
            self.on_replica_actor_died(replica_id)


class FIFOMixin:
    """Changes nothing: queues are first in, first out."""


class LocalityMixin:
    """Ranks replicas by their machine. A second base, next to RequestRouter."""

    _replicas: dict[ReplicaID, RunningReplica]

    def apply_locality_routing(self, pending_request: PendingRequest | None = None) -> set[ReplicaID]:
        """The best of the replicas."""
        return _first(self.rank_replicas_via_locality(list(self._replicas.values())))

    def rank_replicas_via_locality(self, replicas: list[RunningReplica]) -> list[list[RunningReplica]]:
        """Those of this machine, none (there are no zones), the others."""
        here = os.environ.get("PIERHEAD_NODE", "")
        near = [each for each in replicas if each.node_id == here]
        return [near, [], [each for each in replicas if each.node_id != here]]


class MultiplexMixin:
    """Ranks replicas by their models. A second base, next to RequestRouter."""

    _replicas: dict[ReplicaID, RunningReplica]

    def apply_multiplex_routing(self, pending_request: PendingRequest | None = None) -> set[ReplicaID]:
        """The best of the replicas for the call's model."""
        model = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        return _first(self.rank_replicas_via_multiplex(list(self._replicas.values()), model))

    def rank_replicas_via_multiplex(
        self, replicas: list[RunningReplica], multiplexed_model_id: str
    ) -> list[list[RunningReplica]]:
        """Those that hold the model, those with the fewest models, the others."""
        holders = [each for each in replicas if multiplexed_model_id in each.multiplexed_model_ids]
        others = [each for each in replicas if each not in holders]
        fewest = min((len(each.multiplexed_model_ids) for each in others), default=0)
        few = [each for each in others if len(each.multiplexed_model_ids) == fewest]
        return [holders, few, [each for each in others if each not in few]]


def _first(ranks: list[list[RunningReplica]]) -> set[ReplicaID]:
    return {each.replica_id for each in next((rank for rank in ranks if rank), [])}
