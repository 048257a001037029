"""A plan: its steps and their text, how each action ended, and which failed actions wait for their next try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .actions import Action


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one action ended. `error` is None on success."""

    action: Action
    took_s: float
    error: Exception | None = None

    @property
    def message(self) -> str:
        """The error in words; "" on success."""
        return "" if self.error is None else str(self.error) or type(self.error).__name__


@dataclass(frozen=True, slots=True)
class Refusal:
    """A failed action in its backoff, which ends at `until`."""

    action: Action
    error: Exception
    failures: int
    until: float
    since: float = 0.0
    """When the first of these consecutive failures was."""
    last_at: float = 0.0
    """When the last one was."""


@dataclass(frozen=True, slots=True)
class Step:
    """An action with its place in the plan: `after` holds the numbers of the steps that must succeed first."""

    number: int
    action: Action
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PendingReplica:
    """A replica that should exist and cannot be started yet; `reason` is one sentence with its numbers."""

    service: str
    reason: str
    blocked: bool = False
    """True when waiting alone will not help: no GPU is free, the image has to be built."""
    has_no_place: bool = False
    """True when this machine has no room for it: no GPU or no memory is free, or it may hold no more replicas of the
    service."""
    replaces: str = ""
    """The node of the replica that it replaces and that serves until then; "" = it replaces none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The ordered difference of desired and observed; `str(plan)` is the dry run and what tests compare."""

    steps: tuple[Step, ...] = ()
    pending: tuple[PendingReplica, ...] = ()
    next_look_s: float | None = None
    """Seconds until the next look is due at the latest, for example while a drain or a backoff lasts."""
    gives_way: Mapping[str, str] = field(default_factory=dict)
    """By name, services that leave their GPUs to others and are to have no replica until their next request; why."""
    awaits_gpu_memory: bool = False
    """Whether a start waits for GPU memory that is in use, or for a reading of it."""

    def __str__(self) -> str:
        """The dry run, which `make plan` prints and tests compare; "nothing to do" for a converged world."""
        lines = [f"#{step.number}{_after(step)} {step.action.words}: {step.action.cause}" for step in self.steps]
        lines += [f"pending {pending.service}: {pending.reason}" for pending in self.pending]
        return "\n".join(lines) or "nothing to do"


def _after(step: Step) -> str:
    return f" after {', '.join(f'#{number}' for number in step.after)}" if step.after else ""
