"""The plan as people read it: `make plan` prints this, tests compare it.

One line an action: its number, the steps it waits for, what is done to what, and why.
"""

from __future__ import annotations

from controller.model import (
    Action,
    AddServer,
    BeginRetirement,
    CreateContainer,
    DeleteServer,
    GiveUserConfig,
    Plan,
    PullImage,
    RemoveContainer,
    SetServerState,
    SetServerWeight,
    SetWaitingRoom,
    ShutdownSessions,
    SignalContainer,
    StartContainer,
    Step,
    WriteRouting,
)
from controller.placement import slot_words
from controller.user_config import digest


def render_plan(plan: Plan) -> str:
    """Return the dry run; "nothing to do" for a converged world."""
    lines = [_step_line(step) for step in plan.steps]
    lines += [f"pending {pending.service}: {pending.reason}" for pending in plan.pending]
    return "\n".join(lines) if lines else "nothing to do"


def describe(action: Action) -> str:  # noqa: C901 - one branch an action, each one line
    """Return what an action does, without its cause: "create pierhead-ranker-1a2b3c4d-2 on GPU-0001"."""
    match action:
        case PullImage():
            return f"pull {action.image} for {action.target}"
        case CreateContainer():
            slot = f"{slot_words(action.gpu_slot)} of " if action.gpu_slot else ""
            gpus = f" on {slot}{', '.join(gpu.uuid for gpu in action.gpus)}" if action.gpus else ""
            return f"create {action.target}{gpus}"
        case StartContainer():
            return f"start {action.target}"
        case BeginRetirement():
            return f"drain {action.target}"
        case SignalContainer():
            return f"send {action.signal} to {action.target}"
        case RemoveContainer():
            return f"remove {action.target}"
        case AddServer():
            return f"add server {action.backend}/{action.target} at {action.address}"
        case GiveUserConfig():
            return f"give user_config {digest(action.text)} to {action.target}"
        case SetServerState():
            return f"set server {action.backend}/{action.target} to {action.state}"
        case SetServerWeight():
            return f"set server {action.backend}/{action.target} to weight {action.weight}"
        case ShutdownSessions():
            return f"end the sessions of {action.backend}/{action.target}"
        case DeleteServer():
            return f"delete server {action.backend}/{action.target}"
        case SetWaitingRoom():
            return (
                f"let requests wait for {action.target}"
                if action.is_open
                else f"let no request wait for {action.target}"
            )
        case WriteRouting():
            names = ", ".join(service.name for service in action.services) or "no service"
            return f"write routes of {names} and reload"
        case _:
            raise TypeError(f"internal: no words for {type(action).__name__}")


def _step_line(step: Step) -> str:
    after = f" after {', '.join(f'#{number}' for number in step.after)}" if step.after else ""
    return f"#{step.number}{after} {describe(step.action)}: {step.action.cause}"
