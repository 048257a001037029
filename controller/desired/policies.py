"""Asks a service's policy how many replicas it needs: the formula, a user's function, or a query of Prometheus.

    policy: null                        autoscale.wanted_replicas
    policy: package.module:function     imported from the project's directory, called outside the loop (functions.py)
    policy: {prometheus: {...}}         ceil(running * value / target), the value read outside it (measurements.py)

A policy without a number raises PolicyError, and the target does not change.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import PolicyError
from ..model.spec import FunctionPolicy, PrometheusPolicy
from .autoscale import PolicyAnswer, Situation, by_load, smoothed, wanted_replicas
from .functions import MOST_WANTED

LONGEST_QUERY = 80

Ask = Callable[[str, Situation], PolicyAnswer]
"""Returns the answer for a service (its name) in a situation; raises PolicyError."""
Wanted = Callable[[str, FunctionPolicy, Situation], int | None]
"""Returns the number that a service's function wants; None while it has not answered yet. Raises PolicyError."""
Value = Callable[[str, PrometheusPolicy, float], float | None]
"""Returns the value of a service's query at a time; None while there cannot be one yet. Raises PolicyError."""


class Policies:
    """Asks each service's policy."""

    def __init__(self, wanted: Wanted, value: Value) -> None:
        self._wanted = wanted
        self._value = value

    def ask(self, service: str, situation: Situation) -> PolicyAnswer:
        """How many replicas the service's policy wants. Raises PolicyError."""
        match situation.spec.policy:
            case FunctionPolicy() as policy:
                return self._asked(service, policy, situation)
            case PrometheusPolicy() as policy:
                return self._measured(service, policy, situation)
            case None:
                return by_load(situation)

    def _asked(self, service: str, policy: FunctionPolicy, situation: Situation) -> PolicyAnswer:
        wanted = self._wanted(service, policy, situation)
        if wanted is None:
            return PolicyAnswer(situation.target, f"{policy.path} has not answered yet")
        # Without a running replica there is nothing to smooth from.
        goal = smoothed(situation.spec, situation.running, wanted) if situation.running else wanted
        return PolicyAnswer(_keeps_the_last(situation, goal), f"{policy.path} asks for {wanted}")

    def _measured(self, service: str, policy: PrometheusPolicy, situation: Situation) -> PolicyAnswer:
        if situation.running == 0:
            return PolicyAnswer(wanted_replicas(situation), "no replica is ready, so the load decides")
        value = self._value(service, policy, situation.now)
        name = query_words(policy.query)
        if value is None:
            return PolicyAnswer(situation.target, f"{name} gives nothing yet")
        goal = situation.running * value / policy.target
        if not abs(goal) <= MOST_WANTED:  # also false for NaN
            raise PolicyError(f"{name} = {value:.4g} with a target of {policy.target:g} gives no number of replicas")
        wanted = smoothed(situation.spec, situation.running, goal)
        return PolicyAnswer(_keeps_the_last(situation, wanted), f"{name} = {value:.4g}, {policy.target:g} wanted")


def _keeps_the_last(situation: Situation, wanted: int) -> int:
    """The last replica stays while there are requests: the next request would start it again."""
    return max(wanted, 1) if situation.load.total > 0 else wanted


def query_words(query: str) -> str:
    """A query on one line, cut where it is long."""
    line = " ".join(query.split())
    return line if len(line) <= LONGEST_QUERY else f"{line[:LONGEST_QUERY]}..."
