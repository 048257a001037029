"""Chooses the replica for a handle's call: prefers replicas that hold the model, then near ones, then asks the policy.

A policy is user code: an exception, or a wrong return value, becomes an error of that one call.
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
        """Whether the service sets the policy, not the handle."""
        self.eject_outliers = eject_outliers
        self.prefer_local = prefer_local
        self.node = ""
        """The machine of this process; "" = unknown, then no replica is near."""
        self._rng = rng
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
        """Report the chosen candidate to the policy; only if `watches_calls`."""
        assert self._on_routed is not None  # noqa: S101
        try:
            self._on_routed(candidate, call)
        except Exception as error:
            self._failed("on_routed", error)

    def replica_gone(self, name: str) -> None:
        """Report to the policy that no source lists the replica any more. No caller waits: errors are logged."""
        if self._on_replica_gone is not None:
            try:
                self._on_replica_gone(name)
            except Exception:
                logger.exception('policy "%s": on_replica_gone("%s") raised', self._name, name)

    def _failed(self, method: str, error: Exception) -> NoReturn:
        """Raise the error for the caller; the log has the traceback under its id, as for any exception of user code."""
        error_id = new_request_id()
        what = f'policy "{self._name}": {method} failed: {type(error).__name__}: {error}'
        logger.error("%s [error id %s]", what, error_id, exc_info=error)
        shown = "".join(traceback.format_exception(error))
        raise UserCodeError(f"{what} [error id {error_id}]", error_id=error_id, traceback=shown) from error


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
