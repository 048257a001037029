"""How a command ends: one exit code for each kind of end, and the exceptions that carry them.

An exception's message is for people: one sentence that says what, where, why, and the next step.
"""

from __future__ import annotations

from collections.abc import Mapping

DONE, FAILED, BAD_INPUT, UNREACHABLE, TIMED_OUT, INTERRUPTED = 0, 1, 2, 3, 4, 130

EXIT_CODES: Mapping[int, str] = {
    DONE: "done",
    FAILED: "failed, or rolled back; also a wait that was given up with Ctrl-C",
    BAD_INPUT: "bad input: an argument, or the compose files; nothing was changed",
    UNREACHABLE: "the controller does not answer; the message says where a change may have been taken",
    TIMED_OUT: "not there within --timeout; what was asked for goes on",
    INTERRUPTED: "ended with Ctrl-C",
}


class CommandError(Exception):
    """A command that did not do what was asked for."""

    exit_code = FAILED


class BadInput(CommandError):
    """An argument is wrong, or the compose files are; nothing was changed."""

    exit_code = BAD_INPUT


class Unreachable(CommandError):
    """The API does not answer: the controller is down or being restarted."""

    exit_code = UNREACHABLE


class NotYet(CommandError):
    """The controller was just started: the same request works in a moment."""


class TimedOut(CommandError):
    """The world did not get there in time."""

    exit_code = TIMED_OUT
