"""Chooses the replica for a handle's call: prefers replicas that hold the model, then near ones, then asks the policy.

A policy is user code: an exception, or a wrong return value, becomes an error of that one call.

An asynchronous policy is asked by `rank`, apart from `choose`, because nothing may await between looking at a replica's
load and taking it. The call keeps what `rank` returned, and `choose` goes by it.
"""

from __future__ import annotations

import inspect
import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NoReturn, TypeVar

from pierhead.errors import UserCodeError
from pierhead.policies.balanced import PowerOfTwo
from pierhead.policies.hash_ring import position
from pierhead.policies.policy import Candidate, Policy, RoutedCall
from pierhead.policies.registry import make_policy
from pierhead.raised import is_answerable
from pierhead.request import new_request_id
from pierhead.serve_block import DEFAULT_POLICY

logger = logging.getLogger("pierhead")

C = TypeVar("C", bound=Candidate)

Ranks = Sequence[Sequence[C]]


class Unranked(Exception):
    """The policy is asynchronous and has not been asked for this call yet."""


def report_default(what: str, error: ValueError) -> None:
    """Log that the policy that `what` names cannot be created here, and that the default takes its place."""
    logger.error("%s: %s; %s does in its place", what, error, DEFAULT_POLICY)


class PolicyRouter:
    """A handle's policy and preferences. `choose` and `routed` raise UserCodeError; `choose` also raises Unranked."""

    def __init__(
        self,
        policy: str,
        rng: Random,
        *,
        kwargs: Mapping[str, Any] | None = None,
        follows: bool = False,
        prefer_local: bool = False,
        eject_outliers: bool = True,
    ) -> None:
        self.follows = follows
        """Whether the service sets the policy, not the handle."""
        self.eject_outliers = eject_outliers
        self.prefer_local = prefer_local
        self.node = ""
        """The machine of this process; "" = unknown, then no replica is near."""
        self._rng = rng
        self._spread = PowerOfTwo(rng).choose
        self._followed = (policy, "")
        self._use(policy, make_policy(policy, rng, kwargs))

    def follow(self, policy: str | None, kwargs: str = "") -> None:
        """Use the service's policy from now on; None = the default. `kwargs`: the policy's keyword arguments as a JSON
        object, "" = none. Does nothing unless the router `follows` the service.
        A policy that cannot be created here, for example because its module is not in this image, is logged, and the
        default takes its place.
        """
        policy = policy or DEFAULT_POLICY
        if not self.follows or (policy, kwargs) == self._followed:
            return
        self._followed = (policy, kwargs)
        try:
            made = make_policy(policy, self._rng, json.loads(kwargs) if kwargs else None)
        except ValueError as error:
            report_default("x-serve.router of the called service", error)
            policy, made = DEFAULT_POLICY, make_policy(DEFAULT_POLICY, self._rng)
        self._use(policy, made)

    def _use(self, name: str, policy: Policy) -> None:
        self._name = name
        self.policy = policy
        self.is_async = inspect.iscoroutinefunction(policy.choose)
        """Whether calls have to be ranked (`rank`) before a replica is chosen for them."""
        self.waits = self.is_async and getattr(policy, "waits_for_named", False)
        """Whether calls wait for the replicas that the policy has named, while one of them may be called."""
        self._choose = self._by_ranks if self.is_async else policy.choose
        self._on_routed = getattr(self.policy, "on_routed", None)
        self._on_replica_gone = getattr(self.policy, "on_replica_gone", None)
        self.watches_calls = self._on_routed is not None
        self.watches_replicas = self._on_replica_gone is not None

    def choose(self, candidates: Sequence[C], call: RoutedCall) -> C:
        """One of `candidates`, of which there is at least one."""
        if call.model_id is not None and not self.waits:
            candidates = for_model(candidates, call.model_id)
        if self.prefer_local and self.node:
            candidates = near(candidates, self.node)
        try:
            chosen: C = self._choose(candidates, call)
            if chosen not in candidates:
                chosen = self._best(ranks_of(chosen, candidates), candidates, call)
        except Unranked:
            raise
        except BaseException as error:
            self._failed("choose", error)
        return chosen

    async def rank(self, candidates: Sequence[C], call: RoutedCall) -> Ranks[C]:
        """Ask an asynchronous policy; `candidates`: at least one, full ones too. Raises UserCodeError."""
        if call.model_id is not None and not self.waits:
            candidates = for_model(candidates, call.model_id)
        if self.prefer_local and self.node:
            candidates = near(candidates, self.node)
        try:
            chosen = self.policy.choose(candidates, call)
            if inspect.isawaitable(chosen):  # else the service has named another policy a moment ago
                chosen = await chosen
            return ranks_of(chosen, candidates)
        except BaseException as error:
            self._failed("choose", error)

    def _by_ranks(self, candidates: Sequence[C], call: Any) -> C:
        if call.ranks is None:
            raise Unranked
        ranks: Ranks[C] = call.ranks
        return self._best(ranks, candidates, call)

    def _best(self, ranks: Ranks[C], candidates: Sequence[C], call: RoutedCall) -> C:
        """The less loaded of two of the first group that has a candidate; of all candidates if none has."""
        present = set(map(id, candidates))
        for group in ranks:
            members = [candidate for candidate in group if id(candidate) in present]
            if members:
                return self._spread(members, call)
        return self._spread(candidates, call)

    def routed(self, candidate: Candidate, call: RoutedCall) -> None:
        """Report the chosen candidate to the policy; only if `watches_calls`."""
        assert self._on_routed is not None  # noqa: S101
        try:
            self._on_routed(candidate, call)
        except BaseException as error:
            self._failed("on_routed", error)

    def replica_gone(self, name: str) -> None:
        """Report to the policy that no source lists the replica any more. No caller waits: errors are logged."""
        if self._on_replica_gone is not None:
            try:
                self._on_replica_gone(name)
            except BaseException as error:
                if not is_answerable(error):
                    raise
                logger.exception('policy "%s": on_replica_gone("%s") raised', self._name, name)

    def _failed(self, method: str, error: BaseException) -> NoReturn:
        """Raise the error for the caller; the log has the traceback under its id, as for any exception of user code.

        Raises `error` itself where it is none: the caller is cancelled.
        """
        if not is_answerable(error):
            raise error
        error_id = new_request_id()
        what = f'policy "{self._name}": {method} failed: {type(error).__name__}: {error}'
        logger.error("%s [error id %s]", what, error_id, exc_info=error)
        shown = "".join(traceback.format_exception(error))
        raise UserCodeError(f"{what} [error id {error_id}]", error_id=error_id, traceback=shown) from error


def ranks_of(chosen: Any, candidates: Sequence[C]) -> Ranks[C]:
    """What a policy returned, as groups; one candidate is a group of its own. Raises TypeError for anything else."""
    if chosen in candidates:
        return ((chosen,),)
    known = set(map(id, candidates))
    if isinstance(chosen, list | tuple) and all(
        isinstance(group, list | tuple) and known.issuperset(map(id, group)) for group in chosen
    ):
        return chosen
    names = ", ".join(candidate.name for candidate in candidates)
    raise TypeError(
        f"expected one of its candidates ({names}), or a list of lists of them, best first, "
        f"found a {type(chosen).__name__}"
    )


def near(candidates: Sequence[C], node: str) -> Sequence[C]:
    """The candidates that run on `node`; all candidates if none does, for example because the near ones are full."""
    return [candidate for candidate in candidates if candidate.node == node] or candidates


def for_model(candidates: Sequence[C], model_id: str) -> Sequence[C]:
    """The candidates that hold the model. If none does, the one to load it: of the candidates with the fewest models
    (which need to unload none, or not soon) the one that the model's name picks, so that the first calls agree on one
    while it loads. All candidates if none holds any model.

    Candidates have room: if every holder is full, a call goes to another replica, which then loads the model as well.
    """
    holders = [candidate for candidate in candidates if model_id in candidate.models]
    if holders or not any(candidate.models for candidate in candidates):
        return holders or candidates
    fewest = min(len(candidate.models) for candidate in candidates)
    # Rendezvous hashing: each pair has a rank, the highest wins. A replica that comes or goes moves only its own
    # models.
    return [
        max(
            (candidate for candidate in candidates if len(candidate.models) == fewest),
            key=lambda candidate: position(f"{model_id}@{candidate.name}"),
        )
    ]
