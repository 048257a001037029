"""What keys are charged: what they have used, each token once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.llm.gateway.body.body import read_body
from pierhead.llm.gateway.charges import MAX_KEYS, Charges
from pierhead.llm.gateway.meter import Meter, Used
from pierhead.llm.v1.llm_pb2 import LLMReply, Usage

KEYS = ("a", "b", "c")
USES = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 10**9), st.booleans()), max_size=40)
"""A key, what it has used, and whether an answer tells it."""


@given(USES)
def test_each_token_is_told_once(uses: list[tuple[str, int, bool]]) -> None:
    charges, told, used = Charges(), Counter[str](), Counter[str]()
    for key, tokens, is_told in uses:
        charges.add(key, tokens)
        used[key] += tokens
        if is_told:
            told[key] += charges.take(key)
            assert told[key] == used[key]
    told.update({key: charges.take(key) for key in KEYS})
    assert told == used


def test_what_is_kept_is_bounded() -> None:
    charges = Charges()
    for number in range(MAX_KEYS):
        charges.add(str(number), 1)
    charges.add("0", 1)
    charges.add("new", 1)
    assert [charges.take(key) for key in ("0", "1", "2", "new")] == [2, 0, 1, 1]


@pytest.mark.parametrize(
    ("usage", "tokens", "used"),
    [
        (Usage(prompt_tokens=7, completion_tokens=3), 2, Used(7, 3)),
        (Usage(finish_reason="stop"), 2, Used(5, 2)),
        (Usage(completion_tokens=3), 2, Used(5, 3)),
        (Usage(), 0, Used(5, 0)),
    ],
)
def test_a_prompt_that_the_engine_does_not_count_is_estimated(usage: Usage, tokens: int, used: Used) -> None:
    meter = Meter(0.0)
    meter.begun = True
    meter.note(LLMReply(status=200, tokens=tokens, usage=usage), 1.0)
    asked = read_body(b'{"model": "m", "prompt": "Once upon a time"}', "application/json")
    assert meter.used(asked)._replace(cached=0) == used
