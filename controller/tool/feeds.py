"""Selects events and log lines, finds the new ones, and formats them. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from .errors import BadInput
from .output import harmless

if TYPE_CHECKING:
    from ..status.records.answers import EventDocument, ReplicaLog

LogLine = tuple[str, str]
"""(the engine's time stamp as text, the line)."""
L = TypeVar("L")

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")
_UNITS_S = (86_400, 3_600, 60, 1)
_MARKS = {"ok": "ok     ", "failed": "FAILED ", "warning": "warning"}


def duration_s(text: str) -> int | None:
    """The seconds of "10m", "2h30m" or "90"; None for a text that is no duration."""
    match = _DURATION.fullmatch(text) if len(text) < 20 else None
    if match is None or not any(match.groups()):
        return None
    return sum(int(digits) * unit for digits, unit in zip(match.groups(), _UNITS_S, strict=True) if digits)


def since_time(text: str, now: float) -> float:
    """Return the unix time of `--since`: "10m", "2h30m", "90" (seconds ago), or a local date and time. Times before
    1970 give 0.

    Raises BadInput.
    """
    if (ago_s := duration_s(text)) is not None:
        return max(now - ago_s, 0.0)
    try:
        return max(datetime.fromisoformat(text).timestamp(), 0.0)
    except (ValueError, OverflowError, OSError):
        raise BadInput(
            f"--since: expected a time ago such as 10m or 2h30m, or a time such as 2026-01-31T18:00, found {text!r}"
        ) from None


def pattern(text: str) -> re.Pattern[str]:
    """Return the regular expression of `--grep`. Raises BadInput."""
    try:
        return re.compile(text)
    except re.error as error:
        raise BadInput(f"--grep: {text!r} is no regular expression: {error}") from None


def matching(lines: Iterable[LogLine], searched: re.Pattern[str]) -> list[LogLine]:
    """Return the lines in which the pattern is found."""
    return [line for line in lines if searched.search(line[1])]


def chosen(events: Iterable[EventDocument], after: float | None) -> list[EventDocument]:
    """Return the events that happened, or were repeated, at or after a time; None: all of them."""
    return [event for event in events if after is None or event.last_at >= after]


def event_line(event: EventDocument) -> str:
    """Return one event; further lines of its message are indented."""
    at = datetime.fromtimestamp(event.at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    mark = _MARKS.get(event.outcome, "       ")
    first, *rest = event.message.splitlines() or [""]
    again = f" ({event.times} times)" if event.times > 1 else ""
    return "\n".join([f"{at} {mark} {first}{again}", *(f"{' ' * 28}{line}" for line in rest)])


def last_failure(events: Sequence[EventDocument]) -> EventDocument | None:
    """Return the newest event of a failed replica; its further lines are the end of that replica's log."""
    return next((event for event in reversed(events) if event.kind == "replica_failed"), None)


def timed(log: ReplicaLog) -> list[LogLine]:
    """Return the log lines of one replica, with their times."""
    return list(zip(log.times, log.lines, strict=True))


def readable(line: str) -> list[str]:
    """Return a replica's log line in readable form: JSON with a level becomes text, a traceback in it becomes
    further, indented lines; any other line stays as it is.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return [line]
    if not isinstance(record, dict) or not isinstance(record.get("level"), str):
        return [line]
    known = ("time", "level", "logger", "message", "error", "request_id", "service", "replica")
    words = [_local_time(record["time"])] if "time" in record else []
    words += [f"{record['level'].upper():<7}", record.get("logger", "")]
    words += [f"[{record['request_id']}]"] if record.get("request_id") else []
    words += [record.get("message", ""), *(f"{key}={value}" for key, value in record.items() if key not in known)]
    text = " ".join(str(word) for word in words if word != "")
    first, *more = [harmless(part.expandtabs()) for part in f"{text}\n{record.get('error', '')}".splitlines()]
    return [first, *(f"  {part}" for part in more if part)]


def _local_time(written: object) -> str:
    try:
        at = datetime.fromisoformat(str(written)).astimezone()
    except (ValueError, OverflowError):
        return str(written)
    return at.strftime("%Y-%m-%d %H:%M:%S.") + f"{at.microsecond // 1000:03}"


def new_lines(shown: Sequence[L], now: Sequence[L]) -> Sequence[L]:
    """Return the lines of `now` that are not in `shown`; both are the last lines of the same growing log."""
    for overlap in range(min(len(shown), len(now)), 0, -1):
        if shown[-overlap] == now[0] and shown[-overlap:] == now[:overlap]:
            return now[overlap:]
    return now


def leaves_a_gap(shown: Sequence[LogLine], fresh: Sequence[LogLine], now: Sequence[LogLine], after: float) -> bool:
    """Whether lines between `shown` and `fresh` are missing: the answer from `after` on lacks the last line shown.

    False where lines have no times, because it cannot be decided then.
    """
    if not shown or not now or len(fresh) < len(now) or not shown[-1][0]:
        return False
    return shown[-1][0] >= datetime.fromtimestamp(after, UTC).strftime("%Y-%m-%dT%H:%M:%S")
