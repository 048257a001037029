"""Computes the plan: plan(desired, observed, now) -> the actions that are needed, each with its cause.

Pure: no I/O, no clock, no randomness, no logging.

First come those that take turns on GPUs (turns.py). Then per service, in this order, each in a module of this room:

    1. leave        replicas on their way out: drained -> asleep (sleep.py), or SIGTERM; past the grace period ->
                    SIGKILL; exited -> removed
    2. retire       failed replicas at once; outdated ones when enough others are ready; then surplus ones
    3. start        the replicas that a service lacks, with their GPUs, within the limits of a rolling update
                    (shares.py); one that sleeps is woken; a replacement comes before an additional replica
    4. route        servers in HAProxy for replicas that are ready, and only for those
    5. user_config  replicas that run with another user_config than they should

Nothing waits inside a plan: what cannot be done yet is planned again at a later tick (`next_look_s`). Nothing is
planned for targets of actions in progress, but their numbers, GPUs and places count as taken.
"""

from __future__ import annotations

from ..model.desired import Desired
from ..model.observed import Observed
from ..model.plan import Plan
from .draft import Draft
from .drain import drain_left_nodes
from .leave import finish
from .machine import MachineBudget
from .outlook import ServiceOutlook, bounds_of
from .placement import GpuBudget
from .retire import retire
from .route import (
    delete_ghost_servers,
    register,
    remove_strays,
    restart_router,
    set_waiting_rooms,
    write_keys,
    write_routing,
)
from .sleep import wake_again
from .start import mends, start_created, start_missing, start_rest, start_successors
from .swaps import hold_for_next_try
from .turns import take_turns
from .user_config import configure


def plan(desired: Desired, observed: Observed, now: float) -> Plan:
    """Return the ordered difference of desired and observed at time `now` (seconds, same clock as the snapshot).

    A converged world gives an empty plan. Deterministic: the same arguments give the same text.
    """
    gpus, machine = GpuBudget.of(observed, now), MachineBudget.of(observed, now)
    draft = Draft(desired=desired, observed=observed, now=now, gpus=gpus, machine=machine)
    restart_router(draft)
    write_keys(draft)
    write_routing(draft)
    set_waiting_rooms(draft)
    remove_strays(draft)
    names = sorted({*desired.services, *observed.services})
    outlooks = [ServiceOutlook.of(draft, name) for name in names]
    for outlook in outlooks:
        finish(draft, outlook)
    for outlook in outlooks:
        hold_for_next_try(draft, outlook)
    take_turns(draft, outlooks)
    for outlook in outlooks:
        outlook.bounds = bounds_of(draft, outlook)
    # GPUs are assigned in this order: to successors of replicas that leave, to services whose version changes or whose
    # replicas failed, to other services that lack replicas, and last to the surge of a rolling update.
    for outlook in outlooks:
        start_successors(draft, outlook)
    for outlook in outlooks:
        retire(draft, outlook)
        start_created(draft, outlook)
        start_successors(draft, outlook)
    for outlook in sorted(outlooks, key=lambda outlook: not mends(draft, outlook)):
        start_missing(draft, outlook, outlook.target - outlook.total())
    for outlook in outlooks:
        start_rest(draft, outlook)
        register(draft, outlook)
        configure(draft, outlook)
        wake_again(draft, outlook)
    delete_ghost_servers(draft)
    drain_left_nodes(draft)
    return Plan(
        steps=tuple(draft.steps),
        pending=tuple(draft.pending),
        next_look_s=draft.next_look_s,
        gives_way=draft.gives_way,
        awaits_gpu_memory=draft.gpus.awaits_memory,
    )
