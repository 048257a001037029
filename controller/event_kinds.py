"""The kinds of events there are: what somebody who follows one of them may name. Actions are kinds, too. Pure."""

from __future__ import annotations

import re

from controller.model import Action


def action_name(action: Action | type[Action]) -> str:
    """Return an action's class in snake case: `create_container`. Event kinds and metrics use it."""
    kind = action if isinstance(action, type) else type(action)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


KINDS = frozenset(
    {
        *map(action_name, Action.__subclasses__()),
        "adopted",
        "autoscale",
        "engine_answers",
        "engine_silent",
        "gpu_marked",
        "gpu_unmarked",
        "haproxy_answers",
        "haproxy_restarted",
        "haproxy_silent",
        "out_of_memory",
        "policy_failed",
        "policy_works",
        "replica_failed",
        "replica_not_ready",
        "replica_pending",
        "replica_progress",
        "replica_ready",
        "rollback",
        "rolled_back",
        "rolled_out",
        "rollout",
        "scale",
        "spec_error",
        "spec_read",
        "spec_warning",
        "store_failing",
        "store_replaced",
        "store_works",
        "tick_failed",
        "user_config",
        "user_config_applied",
        "user_config_refused",
    }
)
