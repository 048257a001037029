"""Carries out plans: in dependency order, in parallel where the plan allows, without deciding anything.

    submit(plan)            one task for each step; a step waits for the steps that it names
        |-- gated           the same action failed a moment ago: skipped, with its dependents
        |-- skipped         a predecessor did not succeed; the next plan contains the step again
        |-- withdrawn       it waited for a place when the next plan came, which contains it again or not
        `-- performed       one call, bounded in time -> Outcome -> one report

Plans overlap: actions that have been begun, and those that follow them, are `in_progress`. The planner sees them and
plans nothing against them. Whether an action that waits for a place is done is for the newest plan to decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..engines.base import ClusterEngine, EngineAction
from ..errors import ControllerError, EngineError, NotActing
from ..model.actions import (
    Action,
    BeginRetirement,
    CreateContainer,
    DeleteServer,
    GiveUserConfig,
    PullImage,
    PutToSleep,
    RemoveContainer,
    RestartRouter,
    SignalContainer,
    StartContainer,
    WakeReplica,
    WriteKeys,
    WriteRouting,
    action_name,
)
from ..model.plan import Outcome, Plan, Refusal
from ..model.text import LONGEST_TOLD, one_line
from ..model.world import Retirement, SleepReport, UserConfigReport
from ..observe.gpu_marks import GpuMarks
from ..observe.snapshot import Observer
from ..outlive import Spawn
from ..routing.base import Router, RoutingAction
from ..status.metrics import ControllerMetrics
from ..storage.events import EventLog
from ..storage.store import StateStore

logger = logging.getLogger(__name__)

PARALLEL_ACTIONS = 8
"""Starts at a time, and stops at a time: a stop waits for no start. Other actions (HAProxy, the state file) never wait
for a slow engine."""
PARALLEL_PULLS = 2
"""Pulls at a time, in addition to the other calls: hours of download must not keep a replica from being replaced."""
PARALLEL_CONFIGS = 16
"""Replicas that are sent a user_config, or told to sleep or wake, at a time."""

TIMEOUT_S: Mapping[type[Action], float] = MappingProxyType(
    {
        PullImage: 3600.0,
        CreateContainer: 60.0,
        StartContainer: 120.0,
        SignalContainer: 30.0,
        RestartRouter: 60.0,
        RemoveContainer: 60.0,
        BeginRetirement: 10.0,
        DeleteServer: 30.0,
        WriteKeys: 60.0,
        WriteRouting: 60.0,
        GiveUserConfig: 3.0,
        PutToSleep: 3.0,
        WakeReplica: 3.0,
    }
)
DEFAULT_TIMEOUT_S = 20.0

Key = tuple[str, str]
"""Retries are counted for each target and class of action."""


class RetryGate:
    """Exponential backoff for actions that failed: 0.5 s, doubled each time, up to 30 s. Pure."""

    FIRST_S = 0.5
    MAX_S = 30.0

    def __init__(self) -> None:
        self._refusals: dict[Key, Refusal] = {}

    def note(self, outcome: Outcome, now: float) -> None:
        """Take note of an action that ended at time `now` (seconds)."""
        key = key_of(outcome.action)
        if outcome.error is None:
            self._refusals.pop(key, None)
            return
        before = self._refusals.get(key)
        failures, since = (before.failures + 1, before.since) if before else (1, now)
        wait_s = min(self.MAX_S, self.FIRST_S * 2.0 ** min(failures - 1, 16))
        self._refusals[key] = Refusal(outcome.action, outcome.error, failures, now + wait_s, since, now)

    def allows(self, action: Action, now: float) -> bool:
        """Whether the action may be tried now."""
        refusal = self._refusals.get(key_of(action))
        return refusal is None or now >= refusal.until

    def next_opening_s(self, now: float) -> float | None:
        """Seconds until the next failed action may be retried; None when none has to wait."""
        waits = [refusal.until - now for refusal in self._refusals.values() if refusal.until > now]
        return min(waits, default=None)

    def refusals(self) -> tuple[Refusal, ...]:
        """Actions whose last try failed, sorted by target."""
        return tuple(self._refusals[key] for key in sorted(self._refusals))

    def keep_only(self, planned: Iterable[Action], now: float) -> None:
        """Forget failures of actions that are no longer planned, once their wait is over."""
        keys = {key_of(action) for action in planned}
        self._refusals = {key: refusal for key, refusal in self._refusals.items() if key in keys or refusal.until > now}


def key_of(action: Action) -> Key:
    """Return what retries of the action are counted by."""
    return action.target, type(action).__name__


@dataclass(slots=True, eq=False)
class _Run:
    """An accepted step that has not ended."""

    action: Action
    after: list[_Run]
    end: asyncio.Future[bool]
    """Whether it has succeeded."""
    task: asyncio.Task[None] | None = None
    waits_for_place: bool = False

    @property
    def may_be_withdrawn(self) -> bool:
        """Whether it, or a step that it follows, waits for a place."""
        return self.waits_for_place or any(run.may_be_withdrawn for run in self.after)


@dataclass(eq=False)
class Executor:
    """Runs the graph of each plan. `perform` makes the call, `report` gets each outcome, `spawn` owns the tasks."""

    _perform: Callable[[Action], Awaitable[None]]
    _report: Callable[[Outcome], None]
    _spawn: Spawn
    _clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.gate = RetryGate()
        self._runs: dict[_Run, None] = {}
        """In the order in which they were accepted."""
        self._start_places = asyncio.Semaphore(PARALLEL_ACTIONS)
        self._stop_places = asyncio.Semaphore(PARALLEL_ACTIONS)
        self._pull_places = asyncio.Semaphore(PARALLEL_PULLS)
        self._config_places = asyncio.Semaphore(PARALLEL_CONFIGS)

    @property
    def in_progress(self) -> tuple[Action, ...]:
        """Actions that have been begun and not ended, and those that follow them; none that waits for a place."""
        return tuple(run.action for run in self._runs if not run.may_be_withdrawn)

    def submit(self, plan: Plan) -> None:
        """Begin all steps of a plan that may be tried now, and return at once. What waits for a place is withdrawn: the
        plan has it again, or it is not needed any more."""
        now = self._clock()
        self._withdraw()
        self.gate.keep_only((*self.in_progress, *(step.action for step in plan.steps)), now)
        accepted: dict[int, _Run] = {}
        for step in plan.steps:  # a step names only earlier steps, so these are decided already
            refused = not self.gate.allows(step.action, now) or any(number not in accepted for number in step.after)
            if refused:
                continue
            end = asyncio.get_running_loop().create_future()
            run = accepted[step.number] = _Run(step.action, [accepted[number] for number in step.after], end)
            self._runs[run] = None
            run.task = self._spawn(self._run(run))

    def _withdraw(self) -> None:
        for run in [run for run in self._runs if run.may_be_withdrawn]:
            del self._runs[run]
            if run.task is not None:
                run.task.cancel()

    async def _run(self, run: _Run) -> None:
        succeeded = False
        try:
            # A predecessor's future never raises: its result is a boolean.
            if all([await predecessor.end for predecessor in run.after]):
                outcome = await self._attempt(run)
                succeeded = outcome.error is None
                self.gate.note(outcome, self._clock())
                self._report_safely(outcome)
            else:
                logger.debug("skipped: a step before it failed", extra={"action": type(run.action).__name__})
        finally:
            self._runs.pop(run, None)
            if not run.end.done():
                run.end.set_result(succeeded)

    def _report_safely(self, outcome: Outcome) -> None:
        try:
            self._report(outcome)
        except Exception:
            # The action is done, and the next look sees its effect: a defect in its report must not end the controller.
            logger.exception(
                "internal: reporting %s of %s raised", type(outcome.action).__name__, outcome.action.target
            )

    def _place_of(self, action: Action) -> contextlib.AbstractAsyncContextManager[object]:
        match action:
            case PullImage():
                return self._pull_places
            case GiveUserConfig() | PutToSleep() | WakeReplica():
                return self._config_places
            case CreateContainer() | StartContainer():
                return self._start_places
            case SignalContainer() | RemoveContainer():
                return self._stop_places
            case _:
                return contextlib.nullcontext()

    async def _attempt(self, run: _Run) -> Outcome:
        action = run.action
        limit_s = TIMEOUT_S.get(type(action), DEFAULT_TIMEOUT_S)
        run.waits_for_place = True
        async with self._place_of(action):
            run.waits_for_place = False
            started = self._clock()
            try:
                async with asyncio.timeout(limit_s):
                    await self._perform(action)
            except ControllerError as error:
                return Outcome(action, self._clock() - started, error)
            except TimeoutError:
                return Outcome(action, limit_s, TimeoutError(f"no end within {limit_s:g} s"))
            except Exception as error:
                # A defect in one call must not end the controller; it becomes an event.
                logger.exception("internal: %s of %s raised", type(action).__name__, action.target)
                return Outcome(action, self._clock() - started, error)
            return Outcome(action, self._clock() - started)


# ----------------------------------------------------------------------------------------------------
# Reporting: what follows from the end of an action.


@dataclass(eq=False)
class Reporter:
    """Records each action's end as an event and a metric, and makes the observer read the world again."""

    _events: EventLog
    _metrics: ControllerMetrics
    _observer: Observer
    _gpu_marks: GpuMarks
    _wake: Callable[[], None]

    def report(self, outcome: Outcome) -> None:
        """Take note of one action's end."""
        action = outcome.action
        self._metrics.action(outcome)
        if isinstance(action, RestartRouter):
            self._observer.router.restarted()
        if isinstance(action, EngineAction):
            self._observer.engine.ended(action)
        elif isinstance(action, RoutingAction):
            self._observer.router.ended(action)
        if isinstance(action, RemoveContainer) and outcome.error is None:
            self._gpu_marks.removed(action)
        words = f"{action.words}: {action.cause}"
        self._events.record(
            action_name(action),
            f"{words}; failed: {outcome.message}" if outcome.error else words,
            service=action.service,
            target=action.target,
            outcome="failed" if outcome.error else "ok",
        )
        if not isinstance(action, EngineAction):  # after these the engine is read, which wakes the loop
            self._wake()


# ----------------------------------------------------------------------------------------------------
# Performing: an action is one call to the engine or to HAProxy, and a row in the store for what neither can keep.


LAST_LINES = 20
LONGEST_GIST = 200
LOG_LIMIT_S = 5.0
"""Longest wait for a failed replica's log: its removal, and so its replacement, waits for it."""

Give = Callable[[str, str, str], Awaitable[UserConfigReport]]
"""(address of a replica's admin port, text of a user_config, the port's token) -> the replica's report. Raises
ReplicaError."""
TellToSleep = Callable[[str, bool, str], Awaitable[SleepReport]]
"""(address of a replica's admin port, whether it is to sleep, the port's token) -> the replica's report. Raises
ReplicaError."""


@dataclass(eq=False)
class Performer:
    """Carries out each action at its boundary."""

    _engine: ClusterEngine
    _router: Router
    _store: StateStore
    _events: EventLog
    _project: str
    _give: Give
    _tell_to_sleep: TellToSleep
    _told: Callable[[str, UserConfigReport | SleepReport], None]
    """Takes what a replica reports to either, with the container's id."""
    _acts: Callable[[], bool]
    _clock: Callable[[], float] = time.time

    async def perform(self, action: Action) -> None:
        """Carry out one action; raises ControllerError and its kinds."""
        if not self._acts():  # steps of a plan may have waited for others
            raise NotActing("this controller does not hold the lease of the state at the moment; another one may act")
        match action:
            case RemoveContainer():
                await self._remove(action)
            case SignalContainer():
                await self._engine.perform(action, self._project)
                if action.signal == "SIGTERM":
                    self._store.stopping(action.container_id, self._clock())
            case CreateContainer():
                await self._engine.perform(self._with_token(action), self._project)
            case GiveUserConfig() | PutToSleep() | WakeReplica():
                self._told(action.container_id, await self._tell(action, self._store.token_of(action.target)))
            case BeginRetirement():
                self._store.retire(
                    Retirement(
                        replica=action.target,
                        container_id=action.container_id,
                        draining_since=self._clock(),
                        stopping_since=None,
                        cause=action.cause,
                        failed=action.failed,
                    )
                )
            case _ if isinstance(action, EngineAction):
                await self._engine.perform(action, self._project)
            case _ if isinstance(action, RoutingAction):
                await self._router.perform(action)

    async def _tell(
        self, action: GiveUserConfig | PutToSleep | WakeReplica, token: str
    ) -> UserConfigReport | SleepReport:
        # A row is first: a replica that wakes up without it would use GPUs that count as free.
        match action:
            case GiveUserConfig():
                return await self._give(action.address, action.text, token)
            case PutToSleep():
                self._store.sleeping(action.container_id, self._clock())
                return await self._tell_to_sleep(action.address, True, token)
            case WakeReplica():
                self._store.retirements.drop(action.container_id)
                return await self._tell_to_sleep(action.address, False, token)

    def _with_token(self, action: CreateContainer) -> CreateContainer:
        """With what the admin port of the new replica asks for. It is no part of the version."""
        if not action.spec.managed:
            return action
        token = f"PIERHEAD_ADMIN_TOKEN={self._store.token_of(action.target)}"
        container = {**action.spec.container, "Env": [*action.spec.container.get("Env", ()), token]}
        return replace(action, spec=replace(action.spec, container=container))

    async def _remove(self, action: RemoveContainer) -> None:
        # The log is read before the removal, which deletes it. The failure is counted after the removal, so only once.
        log, unread = await self._last_words(action.container_id) if action.failed else ("", "")
        await self._engine.perform(action, self._project)
        if action.failed:
            lines = [line.rstrip()[:LONGEST_TOLD] for line in log.splitlines() if line.strip()]
            no_log = f"its log cannot be read: {unread}" if unread else "its log is empty"
            last_line = f"last line of its log: {_gist(lines[-1])}" if lines else no_log
            message = f"{action.target}: {action.cause}; its last log lines:" if lines else action.cause
            key = (action.service, action.version)
            self._store.failure(key, self._clock(), f"{action.cause}; {last_line}", action.began_at)
            self._events.record(
                "replica_failed",
                "\n".join([f"{message}; {no_log}" if unread else message, *lines]),
                service=action.service,
                target=action.target,
                outcome="failed",
            )
        self._store.forget(action.container_id)

    async def _last_words(self, container_id: str) -> tuple[str, str]:
        """(the end of a container's log, why it cannot be read). Some logging drivers cannot be read."""
        try:
            async with asyncio.timeout(LOG_LIMIT_S):
                return await self._engine.logs(container_id, LAST_LINES), ""
        except EngineError as error:
            return "", one_line(str(error))
        except TimeoutError:
            return "", f"the engine gave nothing of it within {LOG_LIMIT_S:g} s"


def _gist(line: str) -> str:
    """Return the message of a log line: of a JSON line its "message", shortened, without control characters."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict) and isinstance(record.get("message"), str):
        line = record["message"]
    line = one_line(line)
    return line if len(line) <= LONGEST_GIST else f"{line[:LONGEST_GIST]}..."
