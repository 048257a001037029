"""The exit codes of commands, and the exceptions that carry them.

An exception's message is for users: one sentence that says what, where, why, and the next step.
"""

from __future__ import annotations

from collections.abc import Mapping

from pierhead.interrupt import INTERRUPTED

DONE, FAILED, BAD_INPUT, UNREACHABLE, TIMED_OUT = 0, 1, 2, 3, 4

EXIT_CODES: Mapping[int, str] = {
    DONE: "done",
    FAILED: "failed, or rolled back; also a wait that was ended with Ctrl-C",
    BAD_INPUT: "bad input: an argument, or the compose files; nothing was changed",
    UNREACHABLE: "the controller does not answer; the message says if it may have accepted a change",
    TIMED_OUT: "not done within --timeout; the change continues",
    INTERRUPTED: "ended with Ctrl-C",
}


class CommandError(Exception):
    """A command failed."""

    exit_code = FAILED


class BadInput(CommandError):
    """An argument is wrong, or the compose files are; nothing was changed."""

    exit_code = BAD_INPUT


class Unreachable(CommandError):
    """The API does not answer: the controller is down or restarting."""

    exit_code = UNREACHABLE


class NotYet(CommandError):
    """The controller has just started: the same request works a moment later."""


class TimedOut(CommandError):
    """The wait ended at its timeout."""

    exit_code = TIMED_OUT
