"""Answers and errors by version, over the same time."""

from __future__ import annotations

from dataclasses import replace

from controller.answers import Answers, counted
from controller.model import Observed, ReplicaContainer
from controller.rollout import Tally
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


def test_a_count_that_began_anew_is_taken_as_it_is() -> None:
    book = Answers("v2", 0.0)
    book.look([told(OLD, 500, 5)], Observed())
    book.look([told(OLD, 40, 1)], Observed())
    assert book.of("v1") == Tally(40, 1)


def test_who_counts() -> None:
    bare = replica(WEB, 1)
    seen = Observed(routing=routing(replace(server(bare), answered=9, errors=2)))
    assert counted(bare, seen) == Tally(9, 2), "HAProxy, where the image does not"
    assert counted(told(bare, 4, 1), seen) == Tally(4, 1)
    assert counted(bare, Observed()) is None
