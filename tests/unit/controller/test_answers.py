"""Answers and errors by version, over the same time."""

from __future__ import annotations

from dataclasses import replace

from controller.desired.answers import Answers
from controller.desired.rollout import Tally
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
    assert (book.of("v1"), book.of("v2")) == (Tally(100, 0), Tally(60, 3))
    assert book.versions() == {"v1", "v2"}


def test_what_a_version_answered_in_an_earlier_attempt_is_not_held_against_it() -> None:
    book = Answers("v2", NEW.created_at + 10)
    left_over = told(NEW, 400, 300)
    book.look([told(OLD, 5000, 0), left_over], Observed())
    fresh = replace(told(NEW, 30, 1), id="fresh", created_at=NEW.created_at + 11)
    book.look([told(OLD, 5100, 0), told(NEW, 405, 301), fresh], Observed())
    assert book.of("v2") == Tally(5 + 30, 1 + 1)


def test_too_little_to_compare_and_its_whole_life_counts() -> None:
    book = Answers("v2", 0.0)
    book.look([told(OLD, 5000, 9)], Observed())
    book.look([told(OLD, 5003, 9)], Observed())
    assert book.of("v1") == Tally(5003, 9)


def test_replicas_that_have_left_stay_in_the_book() -> None:
    book = Answers("v2", 0.0)
    book.look([told(OLD, 0, 0)], Observed())
    book.look([told(OLD, 200, 2)], Observed())
    book.look([told(NEW, 1, 0)], Observed())
    assert book.of("v1") == Tally(200, 2)


def test_a_count_that_began_anew_is_added() -> None:
    book = Answers("v2", 0.0)
    for answered, errors in ((500, 5), (600, 6), (40, 1), (70, 1)):
        book.look([told(OLD, answered, errors)], Observed())
    assert book.of("v1") == Tally(170, 2)


def test_haproxy_counts_where_the_image_does_not() -> None:
    book = Answers("v2", 0.0)
    for answered in (100, 150):
        seen = Observed(routing=routing(replace(server(OLD), answered=answered, errors=2)))
        book.look([OLD], seen)
    assert book.of("v1") == Tally(50, 0)


def test_a_replica_that_stops_answering_keeps_what_it_said() -> None:
    book = Answers("v2", 0.0)
    edge = Observed(routing=routing(server(OLD)))
    book.look([told(OLD, 100, 0)], edge)
    book.look([told(OLD, 150, 0)], edge)
    book.look([OLD], edge)
    assert book.of("v1") == Tally(50, 0)
