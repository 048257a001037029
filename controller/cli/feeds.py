"""Events and log lines: which of them are meant, which are new, how one looks. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from .errors import BadInput

Document = Mapping[str, Any]
LogLine = tuple[str, str]
"""(when the engine got it, as it writes times; the line)."""
L = TypeVar("L")

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")
_UNITS_S = (86_400, 3_600, 60, 1)
_MARKS = {"ok": "ok     ", "failed": "FAILED ", "warning": "warning"}


def since_time(text: str, now: float) -> float:
    """Return the unix time that `--since` means: "10m", "2h30m", "90" (seconds ago), or a local date and time. 0 for
    what was before that.

    Raises BadInput.
    """
    match = _DURATION.fullmatch(text) if len(text) < 20 else None
    if match and any(match.groups()):
        ago_s = sum(int(digits) * unit for digits, unit in zip(match.groups(), _UNITS_S, strict=True) if digits)
        return max(now - ago_s, 0.0)
    try:
        return max(datetime.fromisoformat(text).timestamp(), 0.0)
    except (ValueError, OverflowError, OSError):
        raise BadInput(
            f"--since: expected a time ago such as 10m or 2h30m, or a time such as 2026-01-31T18:00, found {text!r}"
        ) from None


def chosen(events: Iterable[Document], after: float | None) -> list[Document]:
    """Return the events that happened, or were repeated, after a time; None: all of them."""
    return [event for event in events if after is None or event["last_at"] >= after]


def event_line(event: Document) -> str:
    """Return one event; further lines of its message are indented."""
    at = datetime.fromtimestamp(event["at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    mark = _MARKS.get(event["outcome"], "       ")
    first, *rest = event["message"].splitlines() or [""]
    again = f" ({event['times']} times)" if event["times"] > 1 else ""
    return "\n".join([f"{at} {mark} {first}{again}", *(f"{' ' * 28}{line}" for line in rest)])


def last_failure(events: Iterable[Document]) -> Document | None:
    """Return the newest event of a replica that failed: its further lines are the end of that replica's log."""
    failures = [event for event in events if event["kind"] == "replica_failed"]
    return failures[-1] if failures else None


def timed(log: Document) -> list[LogLine]:
    """Return a replica's lines of an answer."""
    return list(zip(log["times"], log["lines"], strict=True))


def readable(line: str) -> list[str]:
    """Return a replica's log line as people read it: JSON with a level becomes text, a traceback in it becomes
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
    first, *more = [_printable(part) for part in f"{text}\n{record.get('error', '')}".splitlines()]
    return [first, *(f"  {part}" for part in more if part)]


def _local_time(written: object) -> str:
    try:
        at = datetime.fromisoformat(str(written)).astimezone()
    except (ValueError, OverflowError):
        return str(written)
    return at.strftime("%Y-%m-%d %H:%M:%S.") + f"{at.microsecond // 1000:03}"


def _printable(text: str) -> str:
    """Escape sequences that JSON kept from the terminal do not reach it either."""
    return "".join(character if character.isprintable() else "?" for character in text.expandtabs())


def new_lines(shown: Sequence[L], now: Sequence[L]) -> Sequence[L]:
    """Return the lines of `now` that were not in `shown`; both are the last lines of one growing log."""
    for overlap in range(min(len(shown), len(now)), 0, -1):
        if shown[-overlap] == now[0] and shown[-overlap:] == now[:overlap]:
            return now[overlap:]
    return now


def leaves_a_gap(shown: Sequence[LogLine], fresh: Sequence[LogLine], now: Sequence[LogLine], after: float) -> bool:
    """Whether lines between `shown` and `fresh` were not sent: asked for from `after` on, the last one shown is gone.

    Without times nobody can say.
    """
    if not shown or not now or len(fresh) < len(now) or not shown[-1][0]:
        return False
    return shown[-1][0] >= datetime.fromtimestamp(after, UTC).strftime("%Y-%m-%dT%H:%M:%S")
