"""What is going on between the versions of a service, in one sentence. Pure."""

from __future__ import annotations

from controller.model import RolloutPhase, ServiceRollout
from controller.rollout import Facts, Rules, Tally, trouble_of


def rollout_words(name: str, state: ServiceRollout, facts: Facts, rules: Rules, now: float) -> str:
    """What is going on between versions, in one sentence; "" when nothing is."""
    rollout = state.rollout
    if rollout is None:
        return _rest_words(name, state, facts, rules)
    change = f"{state.stable} -> {rollout.to}"
    trouble = trouble_of(state, facts, rules, now)
    if trouble:
        return f"{change}: {trouble}; auto_rollback is off: `pierhead abort {name}` takes it back"
    left_s = max(0.0, rollout.since + rules.spec.bake_s - now)
    match rollout.phase:
        case RolloutPhase.WAITING:
            return f"{change} waits: {facts.waits_for or 'it begins now'}"
        case RolloutPhase.STARTING:
            return f"{change}: the first of {rollout.to} is being started, {facts.ready(state.stable)} serve as before"
        case RolloutPhase.BAKING:
            return f"{change}: {facts.ready(rollout.to)} watched for {left_s:.0f} s more; {_errors(state, facts)}"
        case RolloutPhase.ROLLING:
            return f"{change}: {facts.ready(rollout.to)} of {facts.target} replaced"
        case RolloutPhase.SETTLING:
            return f"{change}: all replaced, watched for {left_s:.0f} s more; {_errors(state, facts)}"
        case RolloutPhase.ROLLING_BACK:
            return f"{rollout.source} is rolled back to {state.stable}: {rollout.cause}"


def _errors(state: ServiceRollout, facts: Facts) -> str:
    new = facts.tallies.get(state.rollout.to if state.rollout else "", Tally())
    old = facts.tallies.get(state.stable or "", Tally())
    return f"it fails {new}, the former version {old}"


def _rest_words(name: str, state: ServiceRollout, facts: Facts, rules: Rules) -> str:
    rejected = state.rejection_of(facts.offered)
    if rejected is not None:
        return (
            f"version {rejected.version} was rolled back ({rejected.reason}); {state.stable} runs; change "
            f"it, or try it again with `pierhead deploy {name}`"
        )
    if rules.is_manual and state.stable and facts.offered not in (None, state.stable):
        return f"{state.stable} -> {facts.offered} waits for `pierhead deploy {name}`"
    return ""
