"""Reads which requests of a service are logged: `x-serve.logging`, and the stack's words for it. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast, get_args

from pierhead.serve_block import AccessLogWord, LoggingBlock

from ..model.spec import AccessLog
from .stack_options import StackOptions

WORD = "PIERHEAD_ACCESS_LOG"
SAMPLE = "PIERHEAD_ACCESS_LOG_SAMPLE"
"""Both in .env, for services that write no word, and in the environment of replicas."""


def stack_access_log(stack: StackOptions) -> AccessLog:
    """The stack's; its default for words that are wrong, each of which is a problem."""
    log = AccessLog()
    if word := stack.get(WORD):
        if word in get_args(AccessLogWord):
            log = replace(log, word=cast(AccessLogWord, word))
        else:
            stack.expected(WORD, "sampled, all or off", word)
    if share := stack.get(SAMPLE):
        try:
            sample = float(share)
        except (TypeError, ValueError):
            sample = math.nan
        if 0 <= sample <= 1:
            log = replace(log, sample=sample)
        else:
            stack.expected(SAMPLE, "a number from 0 to 1", share)
    return log


def access_log(written: LoggingBlock, of_the_stack: AccessLog) -> AccessLog:
    """The access log of one service."""
    return replace(of_the_stack, word=written.access_log or of_the_stack.word, slow_request_s=written.slow_request_s)
