"""One handle's way of choosing: replicas that hold the model, of those the near ones, then its policy, safe to call.

A policy is other people's code: what it raises, or returns, becomes an error of the one call it was asked for.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NoReturn, TypeVar

from pierhead.errors import UserCodeError
from pierhead.policies.hash_ring import position
from pierhead.policies.policy import Candidate, Policy, RoutedCall
from pierhead.policies.registry import DEFAULT_POLICY, make_policy
from pierhead.request import new_request_id

logger = logging.getLogger("pierhead")

C = TypeVar("C", bound=Candidate)


class Router:
    """A handle's policy and preferences. `choose` and `routed` raise UserCodeError and nothing else."""

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
        """Whether the policy is the service's to say, not the handle's."""
        self.eject_outliers = eject_outliers
        self.prefer_local = prefer_local
        self.node = ""
        """Where this process runs; "" = not known, then nothing is near."""
        self._rng = rng
        self._told = (policy, "")
        self._use(policy, make_policy(policy, rng, kwargs))

    def follow(self, policy: str | None, kwargs: str = "") -> None:
        """Choose as the service says from now on; None = it does not say. `kwargs`: a JSON object of what the policy is
        made with, "" = nothing. Only a router that `follows` does.

        One that cannot be made here, as the module is not in this image, is logged, and the default takes its place.
        """
        policy = policy or DEFAULT_POLICY
        if not self.follows or (policy, kwargs) == self._told:
            return
        self._told = (policy, kwargs)
        try:
            made = make_policy(policy, self._rng, json.loads(kwargs) if kwargs else None)
        except ValueError as error:
            logger.error("x-serve.router of the called service: %s; %s does in its place", error, DEFAULT_POLICY)  # noqa: TRY400
            policy, made = DEFAULT_POLICY, make_policy(DEFAULT_POLICY, self._rng)
        self._use(policy, made)

    def _use(self, name: str, policy: Policy) -> None:
        self._name = name
        self.policy = policy
        self._choose = self.policy.choose
        self._on_routed = getattr(self.policy, "on_routed", None)
        self._on_replica_gone = getattr(self.policy, "on_replica_gone", None)
        self.watches_calls = self._on_routed is not None
        self.watches_replicas = self._on_replica_gone is not None

    def choose(self, candidates: Sequence[C], call: RoutedCall) -> C:
        """One of `candidates`, of which there is at least one."""
        if call.model_id is not None:
            candidates = for_model(candidates, call.model_id)
        if self.prefer_local and self.node:
            candidates = near(candidates, self.node)
        try:
            chosen = self._choose(candidates, call)
            if chosen not in candidates:
                names = ", ".join(candidate.name for candidate in candidates)
                raise TypeError(f"expected one of its candidates ({names}), found a {type(chosen).__name__}")  # noqa: TRY301
        except Exception as error:
            self._failed("choose", error)
        return chosen

    def routed(self, candidate: Candidate, call: RoutedCall) -> None:
        """Tell the policy where its call goes; only where `watches_calls`."""
        assert self._on_routed is not None  # noqa: S101
        try:
            self._on_routed(candidate, call)
        except Exception as error:
            self._failed("on_routed", error)

    def replica_gone(self, name: str) -> None:
        """Tell the policy that a replica is in no list any more. No caller waits for it: errors are logged."""
        if self._on_replica_gone is not None:
            try:
                self._on_replica_gone(name)
            except Exception:
                logger.exception('policy "%s": on_replica_gone("%s") raised', self._name, name)

    def _failed(self, method: str, error: Exception) -> NoReturn:
        """What the caller sees; the whole of it is in the log under the id, as for any other exception of a user's."""
        error_id = new_request_id()
        what = f'policy "{self._name}": {method} failed: {type(error).__name__}: {error}'
        logger.error("%s [error id %s]", what, error_id, exc_info=error)
        shown = "".join(traceback.format_exception(error))
        raise UserCodeError(f"{what} [error id {error_id}]", error_id=error_id, traceback=shown) from error


def near(candidates: Sequence[C], node: str) -> Sequence[C]:
    """The candidates that run on `node`; all of them where none does, as when the near ones are full."""
    return [candidate for candidate in candidates if candidate.node == node] or candidates


def for_model(candidates: Sequence[C], model_id: str) -> Sequence[C]:
    """Those that hold the model. When none does, the one to load it: of those with the fewest models (which need not
    unload any, or not soon) the one that the model's name picks, so that the first calls for it agree on one while it
    loads. All of them where nothing is held.

    Candidates have room, so where every holder is full a call goes to another replica, which then holds it as well.
    """
    holders = [candidate for candidate in candidates if model_id in candidate.models]
    if holders or not any(candidate.models for candidate in candidates):
        return holders or candidates
    fewest = min(len(candidate.models) for candidate in candidates)
    # Rendezvous hashing: each pair has a rank, the highest wins. A replica that comes or goes moves only its models.
    return [
        max(
            (candidate for candidate in candidates if len(candidate.models) == fewest),
            key=lambda candidate: position(f"{model_id}@{candidate.name}"),
        )
    ]
