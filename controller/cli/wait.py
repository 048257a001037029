"""When a wait is over. Pure: documents of the API in, verdicts out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Document = Mapping[str, Any]


class TargetMovedError(Exception):
    """Somebody else set another target meanwhile."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one look brought: the message says what is waited for, or how it ended."""

    message: str
    done: bool = False
    hopeless: bool = False
    """Waiting will not help."""
    exit_code: int = 1


class ScaleWait:
    """Waits for one service to have exactly `wanted` ready replicas and nothing left over."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._agreed = False

    def judge(self, row: Document) -> Verdict:
        """Judge a row of /api/v1/services/<name>. Raises TargetMovedError."""
        name = row["name"]
        if row["wanted"] != self._wanted:
            if self._agreed:
                raise TargetMovedError(f"{name}: somebody else set the target to {row['wanted']} meanwhile")
            return Verdict(f"{name}: the controller has not taken up the new target yet")
        self._agreed = True
        return _verdict(row)


def judge_all(document: Document) -> Verdict:
    """Judge /api/v1/services: done when every service has what it wants."""
    errors = document["spec_problems"]
    if errors:
        return Verdict("the compose files cannot be used:\n" + "\n".join(errors), hopeless=True, exit_code=2)
    if not document["settled"]:
        return Verdict("the controller reads the compose files")
    open_rows = [row for row in document["services"] if not row["converged"]]
    if not open_rows:
        replicas = sum(row["ready"] for row in document["services"])
        return Verdict(f"{len(document['services'])} services, {replicas} replicas, all ready", done=True)
    # Those that are only starting may still get there: the hopeless are told when nobody else is waited for.
    verdicts = [_verdict(row) for row in open_rows]
    lines = [*(verdict.message for verdict in verdicts), *document["notices"]]
    return Verdict("; ".join(lines), hopeless=all(verdict.hopeless for verdict in verdicts))


def _verdict(row: Document) -> Verdict:
    message = f"{row['name']}: {row['ready']} of {row['wanted']} ready"
    if row["converged"]:
        return Verdict(message, done=True)
    if row["blocked"]:
        return Verdict(f"{message}; {row['message'] or row['blocked']}", hopeless=True)
    return Verdict(f"{message}; {row['message']}" if row["message"] else message)


def new_lines(shown: list[str], now: list[str]) -> list[str]:
    """Return the lines of `now` that were not in `shown`; both are the last lines of one growing log."""
    for overlap in range(min(len(shown), len(now)), 0, -1):
        if shown[-overlap] == now[0] and shown[-overlap:] == now[:overlap]:
            return now[overlap:]
    return now
