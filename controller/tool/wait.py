"""Judges whether a wait is over. Pure: documents of the API in, verdicts out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import BAD_INPUT, FAILED
from .rows import version

if TYPE_CHECKING:
    from ..status.records.services import (
        DeadEnd,
        Nodes,
        Obstacle,
        RejectionDocument,
        RolloutDocument,
        Service,
        Services,
    )

VIEWS_AFTER_A_REQUEST = 3
"""The controller answers from its last published view. The first view after a request may be older than the request,
and the tick of the second one may have begun before it; the third one contains it."""
FOLLOWED_S = 60.0
"""`serving` waits for a rollout until this long after its beginning. One that takes longer has a long bake_s, a slow
start or many replicas: it is named, and continues."""


class TargetMovedError(Exception):
    """Another request has set another target."""


@dataclass(frozen=True, slots=True)
class Part:
    """The progress of one service; `wanted` None = not known yet."""

    name: str
    ready: int
    wanted: int | None
    message: str = ""
    reasons: tuple[Obstacle, ...] = ()
    """Why it is not ready."""
    key: Hashable = ""
    """Another line of progress is printed when this changes: it has states, not the times and loads in `message`."""


@dataclass(frozen=True, slots=True)
class WaitVerdict:
    """The result of one look: the message says what the command waits for, or how the wait ended."""

    message: str
    done: bool = False
    hopeless: bool = False
    """Waiting will not help; `exit_code` and `next_step` are for this case."""
    exit_code: int = FAILED
    next_step: str = ""
    ended: bool = False
    """Nothing continues after the command has ended."""
    parts: tuple[Part, ...] = ()
    notices: int = 0
    """How many of the controller's notices the message has."""


class ScaleWait:
    """Waits for one service to have exactly `wanted` ready replicas and nothing left over."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._agreed = False
        self._views: set[float] = set()

    def judge(self, row: Service) -> WaitVerdict:
        """Judge a row of /api/v1/services/<name>. Raises TargetMovedError."""
        unseen = _unseen_world(row)
        if unseen:
            return unseen
        name = row.name
        self._views.add(row.at)
        if row.wanted != self._wanted:
            # If another request came at the same time, the controller may never show the target of this one.
            if self._agreed or len(self._views) >= VIEWS_AFTER_A_REQUEST:
                raise TargetMovedError(f"{name}: another request set the target to {row.wanted}")
            not_yet = Part(name, row.ready, None, "the controller has not taken up the new target yet")
            return WaitVerdict(f"{name}: {not_yet.message}", parts=(not_yet,))
        self._agreed = True
        return _verdict(row, enough=row.converged)


def judge_all(document: Services, *, serving: bool = False) -> WaitVerdict:
    """Judge /api/v1/services: done when every service has converged; `serving`: when as many replicas as wanted are
    ready, also while other replicas drain, and no client gets answers of a version whose rollout to the files' version
    ends within FOLLOWED_S.

    A service whose files ask for a version that was rolled back is not done, although the former version serves.
    """
    reading = WaitVerdict("the controller reads the compose files")
    if not document.files_current:
        return reading
    unusable = _unusable_files(document)
    if unusable:
        return unusable
    if not document.settled:
        return reading
    unseen = _unseen_world(document)
    if unseen:
        return unseen
    verdicts = [_as_asked(row, serving=serving) for row in document.services]
    waiting = [verdict for verdict in verdicts if not verdict.done]
    parts = tuple(part for verdict in verdicts for part in verdict.parts)
    if not waiting:
        replicas = sum(row.ready for row in document.services)
        ready = f"{len(document.services)} services, {replicas} replicas, all ready"
        return WaitVerdict("\n".join([ready, *_going_on(document.services)]), done=True, parts=parts)
    # A service that is only starting may still become ready: hopeless services end the wait when they alone are left.
    lines = [*(verdict.message for verdict in waiting), *document.notices]
    steps = dict.fromkeys(verdict.next_step for verdict in waiting if verdict.next_step)
    return WaitVerdict(
        "; ".join(lines),
        hopeless=all(verdict.hopeless for verdict in waiting),
        next_step="\n".join(steps),
        ended=all(verdict.ended for verdict in waiting),
        parts=parts,
        notices=len(document.notices),
    )


class RolloutWait:
    """Waits until the rollouts of some services have ended, well or badly.

    `before` is /api/v1/services before the request: a version that it lists as rejected is no outcome of this
    request. `reverting`: the former version is wanted (rollback, abort), so a rejected version is no failure either.
    """

    def __init__(self, services: Collection[str], before: Services, *, reverting: bool = False) -> None:
        self._services = sorted(services)
        self._before = {row.name: row for row in before.services}
        self._reverting = reverting
        self._views: set[float] = set()
        self._still: set[float] = set()
        """The last views, in which all that is left waits for services whose new version was rejected."""
        self._rolling: set[str] = set()

    def judge(self, document: Services) -> WaitVerdict:
        """Judge /api/v1/services after the request."""
        unusable = _unusable_files(document)
        if unusable and not self._reverting:
            return unusable
        unseen = _unseen_world(document)
        if unseen:
            return unseen
        self._views.add(document.at)
        rows = {row.name: row for row in document.services}
        held = self._held_up(document)
        verdicts = [held.get(name) or self._judge_row(rows[name]) for name in self._services if name in rows]
        parts = tuple(part for verdict in verdicts for part in verdict.parts)
        waiting = [verdict.message for verdict in verdicts if not verdict.done and not verdict.hopeless]
        if waiting or not verdicts:
            return WaitVerdict("; ".join(waiting) or "nothing to roll out", done=not self._services, parts=parts)
        failed = [verdict for verdict in verdicts if verdict.hopeless]
        steps = dict.fromkeys(verdict.next_step for verdict in failed if verdict.next_step)
        return WaitVerdict(
            "\n".join(verdict.message for verdict in failed or verdicts),
            done=not failed,
            hopeless=bool(failed),
            next_step=" ".join(steps),
            ended=all(verdict.ended for verdict in failed),
            parts=parts,
        )

    def _judge_row(self, row: Service) -> WaitVerdict:
        name, rejected = row.name, row.rejected
        if row.rollout:
            self._rolling.add(name)
            verdict = _in_rollout(row, row.rollout)
            return _stuck(row.stuck, verdict.parts[0]) if row.blocked and row.stuck else verdict
        part = _part(row)
        if name not in self._rolling and len(self._views) < VIEWS_AFTER_A_REQUEST:
            return WaitVerdict(f"{name}: the controller has not taken it up yet", parts=(part,))
        if rejected and not self._was_rejected(name, rejected) and not self._reverting:
            return _rolled_back(row, rejected, part)
        words = f"{name}: {row.ready} of {row.wanted} ready"
        if row.converged and self._came_back(row):
            return _came_back(row, part)
        if row.state == "DEPLOY_FAILED" and not self._reverting:
            return _deploy_failed(row, part)
        if row.converged and row.state == "UPDATING":
            return WaitVerdict(f"{words}; UPDATING", parts=(part,))
        if row.converged:
            return WaitVerdict(f"{words}, version {version(row)}{_untried(row)}", done=True, parts=(part,))
        return _verdict(row, enough=row.converged)

    def _held_up(self, document: Services) -> Mapping[str, WaitVerdict]:
        """The rollouts that cannot begin, as the new version of a service before them was rejected after the request.

        Such a service's callers wait, and those that call them; in a tick or two, others that wait begin.
        """
        rows = [row for row in document.services if row.rollout]
        lost = any(row.rejected and not self._was_rejected(row.name, row.rejected) for row in document.services)
        if self._reverting or not lost or any(row.rollout and row.rollout.phase != "WAITING" for row in rows):
            self._still.clear()
        else:
            self._still.add(document.at)
        if len(self._still) < VIEWS_AFTER_A_REQUEST:
            return {}
        return {row.name: _held(row) for row in rows}

    def _was_rejected(self, name: str, rejected: RejectionDocument) -> bool:
        """Whether the version was rejected before the request."""
        before = self._before[name].rejected if name in self._before else None
        return before is not None and rejected.id == before.id

    def _came_back(self, row: Service) -> bool:
        """Whether the reverted version serves again, because the version to go back to did not work."""
        before = self._before.get(row.name)
        if before is None or before.rollout or not self._reverting or row.name not in self._rolling:
            return False
        return version(row) == version(before)


class DrainWait:
    """Waits until a node has no replica left, and the engine has drained it."""

    def __init__(self, node: str) -> None:
        self._node = node

    def judge(self, document: Nodes) -> WaitVerdict:
        """Judge /api/v1/nodes after the request, which was answered when it could be seen. Raises TargetMovedError."""
        unseen = _unseen_world(document)
        if unseen:
            return unseen
        name = self._node
        row = next((row for row in document.nodes if row.name == name), None)
        if row is None:
            raise TargetMovedError(f"{name}: it was removed")
        if row.availability == "drained":
            return WaitVerdict(
                f"{name} is drained: in half a minute its HAProxy has ended, and it may be switched off", done=True
            )
        if row.availability != "leaving":
            raise TargetMovedError(f"{name}: another request made it {row.availability}")
        message = f"{name}: {row.message or row.state}"
        if row.blocked:
            step = f"`pierhead node drain {name} --force` ends them, `pierhead node activate {name}` keeps them."
            return WaitVerdict(message, hopeless=True, next_step=step)
        return WaitVerdict(message)


def _untried(row: Service) -> str:
    """A clause for a version that became current while its service has no replicas, so it was not tried yet."""
    if not row.untried or row.wanted:
        return ""
    return ", not tried yet, as no replica is wanted now: it will be when the service wakes"


def _unseen_world(document: Service | Services | Nodes) -> WaitVerdict | None:
    """While the engine does not answer, the rows are old and end no wait."""
    if document.engine_reachable:
        return None
    return WaitVerdict("the Docker Engine does not answer, so it is not known what runs")


def _unusable_files(document: Services) -> WaitVerdict | None:
    if not document.spec_problems:
        return None
    text = "\n".join(document.spec_problems)
    return WaitVerdict(
        f"the compose files cannot be used:\n{text}",
        hopeless=True,
        exit_code=BAD_INPUT,
        next_step="Correct them (`pierhead validate` checks them without changing anything).",
    )


def _rolled_back(row: Service, rejected: RejectionDocument, part: Part) -> WaitVerdict:
    how = "refused" if rejected.is_refused else "rolled back"
    message = f"version {rejected.version} was {how}: {rejected.reason}; version {version(row)} serves"
    return _ended_badly(part, message, _see(part, f"correct the service, build it, then `pierhead deploy {row.name}`"))


def _held(row: Service) -> WaitVerdict:
    """Its rollout's message says what it waits for, and what begins it."""
    message = f"{row.name}: {row.rollout.message if row.rollout else row.message}"
    return WaitVerdict(message, hopeless=True, ended=True, parts=(_part(row),))


def _came_back(row: Service, part: Part) -> WaitVerdict:
    message = f"it is at version {version(row)} again: {row.message or 'the new one did not work'}"
    return _ended_badly(part, message, _see(part, f"`pierhead revisions {row.name}` lists the versions to go back to"))


def _deploy_failed(row: Service, part: Part) -> WaitVerdict:
    message = f"the deployment failed: {row.message or 'the controller gives no reason'}"
    return _ended_badly(part, message, _see(part, f"`pierhead rollback {row.name}` goes back to the version before"))


def _see(part: Part, way: str) -> str:
    return f"See `pierhead why {part.name}`; {way}."


def _ended_badly(part: Part, message: str, next_step: str) -> WaitVerdict:
    """The rollout has ended, and not as the user asked."""
    return WaitVerdict(f"{part.name}: {message}", hopeless=True, next_step=next_step, ended=True, parts=(part,))


def _part(row: Service, reasons: tuple[Obstacle, ...] = ()) -> Part:
    return Part(row.name, row.ready, row.wanted, row.message, reasons, _key(row))


def _key(row: Service) -> Hashable:
    states = Counter(replica.state for replica in row.replicas)
    applied = row.user_config.applied if row.user_config else 0
    return row.state, frozenset(states.items()), applied, tuple(obstacle.key for obstacle in row.obstacles)


def _verdict(row: Service, *, enough: bool) -> WaitVerdict:
    """Whether a service has the replicas that it wants; `enough`: it has."""
    message = f"{row.name}: {row.ready} of {row.wanted} ready"
    if enough:
        return WaitVerdict(message, done=True, parts=(_part(row),))
    part = _part(row, row.obstacles)
    if row.stuck:
        return _stuck(row.stuck, part)
    return WaitVerdict(f"{message}; {row.message}" if row.message else message, parts=(part,))


def _as_asked(row: Service, *, serving: bool) -> WaitVerdict:
    """Whether a service has the replicas that it wants, of the version that the files ask for."""
    enough = row.ready >= row.wanted if serving else row.converged
    if enough and row.not_as_asked:
        return _ended_badly(_part(row), row.not_as_asked.words, row.not_as_asked.next_step)
    if enough and serving and row.rollout and _is_reached_soon(row, row.rollout):
        return _in_rollout(row, row.rollout)
    return _verdict(row, enough=enough)


def _is_reached_soon(row: Service, rollout: RolloutDocument) -> bool:
    """Whether clients still get answers of another version, and soon of the files' version alone."""
    from_outside = row.route is not None or row.grpc_services
    if not from_outside or rollout.to != row.offered or row.blocked:
        return False
    return rollout.phase != "SETTLING" and row.at - rollout.begun_at < FOLLOWED_S


def _in_rollout(row: Service, rollout: RolloutDocument) -> WaitVerdict:
    part = Part(row.name, rollout.ready, rollout.wanted, rollout.phase, key=(rollout.phase, _key(row)))
    return WaitVerdict(f"{row.name}: {rollout.progress}; {rollout.message}", parts=(part,))


def _stuck(found: DeadEnd, part: Part) -> WaitVerdict:
    return WaitVerdict(f"{part.name}: {found.words}", hopeless=True, next_step=found.next_step, parts=(part,))


def _going_on(rows: Iterable[Service]) -> list[str]:
    """The rollouts in progress, in one sentence. Rollbacks are left out: `deploy` does not wait for their end."""
    names = [row.name for row in rows if row.rollout and row.rollout.to == row.offered]
    if not names:
        return []
    are = "is" if len(names) == 1 else "are"
    return [f"{', '.join(names)} {are} still rolling out; run `pierhead deploy {' '.join(names)}` to wait"]
