from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pierhead.edge.admission import Admission
from pierhead.errors import Backpressure, Draining


def test_a_draining_replica_refuses_everything_but_what_cannot_go_elsewhere() -> None:
    admission = Admission(2)
    admission.draining = True
    assert isinstance(admission.enter(), Draining)
    assert admission.enter_while_draining() is None
    assert admission.draining


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=60))
def test_never_more_than_the_limit_and_never_less_than_none(limit: int, steps: list[bool]) -> None:
    admission = Admission(limit, "ranker-1")
    inside = 0
    for entering in steps:
        if entering:
            refusal = admission.enter()
            assert (refusal is None) == (inside < limit)
            if refusal is None:
                inside += 1
            else:
                assert isinstance(refusal, Backpressure)
                assert str(refusal) == (
                    f"ranker-1 already works on {limit} requests (max_ongoing_requests = {limit}); "
                    "call another or try later"
                )
        elif inside:
            admission.leave()
            inside -= 1
        assert admission.ongoing == inside
