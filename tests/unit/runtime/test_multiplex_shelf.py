"""The decisions of `@multiplexed`, without event loop: what is loaded and unloaded, when and for whom."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from pierhead.multiplex.shelf import Entry, Shelf, State, Step


def steps(shelf: Shelf) -> list[tuple[str, State]]:
    found: list[tuple[str, State]] = []
    while (step := shelf.next_step()) is not None:
        found.append((step.entry.model_id, step.state))
    return found


def load(shelf: Shelf, model_id: str) -> Entry:
    """Ask for a model that has a place, and load it."""
    entry = shelf.ask(model_id)
    assert steps(shelf) == [(model_id, State.LOADING)]
    shelf.loaded(entry, f"the model {model_id}")
    return entry


class TestExamples:
    def test_the_one_whose_last_use_is_longest_ago_makes_room(self) -> None:
        shelf = Shelf(2)
        a, b = load(shelf, "a"), load(shelf, "b")
        shelf.leave(a)
        shelf.leave(b)
        shelf.leave(shelf.ask("a"))
        c = shelf.ask("c")
        assert steps(shelf) == [("b", State.UNLOADING)]
        shelf.gone(b)
        assert steps(shelf) == [("c", State.LOADING)]
        assert c.state is State.LOADING

    def test_one_in_use_stays_and_the_next_waits(self) -> None:
        shelf = Shelf(1)
        a = load(shelf, "a")
        shelf.ask("b")
        assert steps(shelf) == []
        shelf.leave(a)
        assert steps(shelf) == [("a", State.UNLOADING)]
        assert steps(shelf) == [], "one place is wanted, and one is on its way"
        shelf.gone(a)
        assert steps(shelf) == [("b", State.LOADING)]

    def test_one_that_is_wanted_again_while_it_is_unloaded_is_loaded_after_that(self) -> None:
        shelf = Shelf(1)
        a = load(shelf, "a")
        shelf.leave(a)
        b = shelf.ask("b")
        assert steps(shelf) == [("a", State.UNLOADING)]
        assert shelf.ask("a") is a
        shelf.gone(a)
        assert steps(shelf) == [("b", State.LOADING)], "b waits for longer"
        shelf.loaded(b, "b")
        shelf.leave(b)
        assert steps(shelf) == [("b", State.UNLOADING)]
        shelf.gone(b)
        assert steps(shelf) == [("a", State.LOADING)]

    def test_loading_for_nobody_is_cancelled(self) -> None:
        shelf = Shelf(1)
        first, second = shelf.ask("a"), shelf.ask("a")
        assert steps(shelf) == [("a", State.LOADING)]
        shelf.leave(first)
        assert steps(shelf) == []
        shelf.leave(second)
        assert steps(shelf) == [("a", State.CANCELLING)]
        shelf.gone(first)
        assert (shelf.places, len(shelf.entries)) == (0, 0)

    def test_one_that_is_wanted_again_before_its_loading_was_cancelled_goes_on_loading(self) -> None:
        shelf = Shelf(1)
        entry = shelf.ask("a")
        steps(shelf)
        shelf.leave(entry)
        assert shelf.ask("a").state is State.LOADING
        assert steps(shelf) == []

    def test_one_that_was_loaded_all_the_same_is_kept(self) -> None:
        shelf = Shelf(1)
        a = shelf.ask("a")
        steps(shelf)
        shelf.leave(a)
        assert steps(shelf) == [("a", State.CANCELLING)]
        shelf.loaded(a, "a")
        assert shelf.ask("a").state is State.LOADED

    def test_a_failure_is_not_kept(self) -> None:
        shelf = Shelf(1)
        a = shelf.ask("a")
        steps(shelf)
        shelf.gone(a, failed=True)
        again = shelf.ask("a")
        assert again is not a
        shelf.leave(a)
        assert again.users == 1
        assert steps(shelf) == [("a", State.LOADING)]

    def test_a_smaller_bound_unloads_what_is_not_in_use(self) -> None:
        shelf = Shelf(None)
        a, b, _ = load(shelf, "a"), load(shelf, "b"), load(shelf, "c")
        shelf.leave(a)
        shelf.leave(b)
        shelf.bound = 1
        assert steps(shelf) == [("a", State.UNLOADING), ("b", State.UNLOADING)]


class ShelfMachine(RuleBasedStateMachine):
    """Users and an executor that does each step at a time of its own choice."""

    uses = Bundle("uses")
    doing = Bundle("doing")

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(2)
        self.users: Counter[Entry] = Counter()
        self.busy: dict[Entry, State] = {}
        self.last_use: list[str] = []

    @rule(target=uses, model_id=st.sampled_from("abcd"))
    def ask(self, model_id: str) -> Entry:
        entry = self.shelf.ask(model_id)
        self.users[entry] += 1
        self.last_use = [*(other for other in self.last_use if other != model_id), model_id]
        return entry

    @rule(entry=consumes(uses))
    def leave(self, entry: Entry) -> None:
        self.shelf.leave(entry)
        self.users[entry] -= 1

    @rule(target=doing)
    def step(self) -> object:
        step = self.shelf.next_step()
        if step is None:
            return multiple()
        entry, state = step
        if state is State.CANCELLING:
            assert self.busy[entry] is State.LOADING, "what is cancelled is being loaded"
            assert self.users[entry] == 0, "for nobody"
            return multiple()
        assert entry not in self.busy, "one thing at a time is done with a model"
        if state is State.UNLOADING:
            assert self.users[entry] == 0, "what is in use stays"
            idle = [
                other for other in self.shelf.entries.values() if other.state is State.LOADED and not self.users[other]
            ]
            order = self.last_use.index
            assert all(order(entry.model_id) < order(other.model_id) for other in idle), "the least recently used"
        self.busy[entry] = state
        return step

    @rule(target=doing, model_id=st.sampled_from("abcd"))
    def drop(self, model_id: str) -> object:
        step = self.shelf.drop(model_id)
        if step is None:
            return multiple()
        assert step.entry not in self.busy
        assert self.users[step.entry] == 0, "what is in use stays"
        self.busy[step.entry] = step.state
        return step

    @rule(step=consumes(doing), good=st.booleans())
    def finish(self, step: Step, good: bool) -> None:
        entry, state = step
        del self.busy[entry]
        if state is State.UNLOADING:
            self.shelf.gone(entry)
        elif good:
            self.shelf.loaded(entry, "model")
        else:
            self.shelf.gone(entry, failed=entry.state is State.LOADING)

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.shelf.places <= 2
        assert len(self.busy) <= 2

    @invariant()
    def users_are_counted(self) -> None:
        for entry in self.shelf.entries.values():
            assert entry.users == self.users[entry]
            assert entry.users or entry.state not in (State.WANTED, State.LOADING)


def test_whatever_happens() -> None:
    run_state_machine_as_test(ShelfMachine, settings=settings(max_examples=200, stateful_step_count=40))


@given(st.lists(st.sampled_from("abcde"), max_size=30), st.one_of(st.none(), st.integers(1, 3)))
def test_everybody_is_served_in_the_end(model_ids: list[str], bound: int | None) -> None:
    """When every step is done and users leave once they have their model, nobody waits for ever."""
    shelf = Shelf(bound)
    waiting = [shelf.ask(model_id) for model_id in model_ids]
    for _ in range(3 * len(model_ids) + 1):
        while (step := shelf.next_step()) is not None:
            if step.state is State.LOADING:
                shelf.loaded(step.entry, "model")
            else:
                shelf.gone(step.entry)
        for entry in [entry for entry in waiting if entry.state is State.LOADED]:
            waiting.remove(entry)
            shelf.leave(entry)
    assert waiting == []
    assert all(entry.users == 0 for entry in shelf.entries.values())
