"""Answers and errors by version, over the same time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.desired.answers import Answers
from controller.desired.rollout import AnswerTally
from controller.model.observed import Observed
from controller.model.world import ReplicaContainer
from tests.unit.controller.worlds import replica, routing, server, service

WEB = service()
OLD, NEW = (replica(WEB, number, version=version) for number, version in ((1, "v1"), (2, "v2")))


def told(container: ReplicaContainer, answered: int, errors: int) -> ReplicaContainer:
    return replace(container, answered=answered, errors=errors)


def test_the_former_version_counts_from_the_begin_of_the_rollout() -> None:
    book = Answers("v2", 0.0)
    book.look([told(OLD, 5000, 900), told(NEW, 7, 1)], Observed())
    book.look([told(OLD, 5100, 900), told(NEW, 60, 3)], Observed())
    assert (book.of("v1"), book.of("v2")) == (AnswerTally(100, 0), AnswerTally(60, 3))
    assert book.versions() == {"v1", "v2"}


def test_what_a_version_answered_in_an_earlier_attempt_is_not_held_against_it() -> None:
    book = Answers("v2", NEW.created_at + 10)
    left_over = told(NEW, 400, 300)
    book.look([told(OLD, 5000, 0), left_over], Observed())
    fresh = replace(told(NEW, 30, 1), id="fresh", created_at=NEW.created_at + 11)
    book.look([told(OLD, 5100, 0), told(NEW, 405, 301), fresh], Observed())
    assert book.of("v2") == AnswerTally(5 + 30, 1 + 1)


@pytest.mark.parametrize(
    ("counts", "tally"),
    [
        ([(5000, 9), (5003, 9)], AnswerTally(5003, 9)),
        ([(500, 5), (600, 6), (40, 1), (70, 1)], AnswerTally(170, 2)),
        ([(0, 0), (200, 2), None], AnswerTally(200, 2)),
    ],
    ids=["too few to compare: its whole life counts", "a count that started again is added", "a replica that has left"],
)
def test_the_former_versions_answers(counts: list[tuple[int, int] | None], tally: AnswerTally) -> None:
    book = Answers("v2", 0.0)
    for count in counts:
        book.look([told(OLD, *count)] if count else [told(NEW, 1, 0)], Observed())
    assert book.of("v1") == tally


def test_haproxy_counts_where_the_image_does_not() -> None:
    book = Answers("v2", 0.0)
    for answered in (100, 150):
        book.look([OLD], Observed(routing=routing(replace(server(OLD), answered=answered, errors=2))))
    assert book.of("v1") == AnswerTally(50, 0)


def test_a_replica_that_stops_answering_keeps_its_counts() -> None:
    book = Answers("v2", 0.0)
    for seen in (told(OLD, 100, 0), told(OLD, 150, 0), OLD):
        book.look([seen], Observed(routing=routing(server(OLD))))
    assert book.of("v1") == AnswerTally(50, 0)
