"""Which models a replica holds, loads and unloads: the decisions of `@multiplexed` without I/O and event loop.

A model's life, and where it takes a place of the `bound`:

              ask            next_step            loaded                next_step
    (nothing) ---> WANTED ------------> LOADING ---------> LOADED --------------------> UNLOADING
        ^            |                    |                                                |
        |            | last one leaves    | last one leaves                                |
        |<-----------'                    v                                                |
        |                             CANCELLING                                           |
        |                                 |                                                |
        `------------ gone <--------------+------------------------------------------------'
                       `--> WANTED, when somebody asked meanwhile

Models that are wanted wait in line for a place, first come first served. When there is none, the model is unloaded
that nobody uses and whose last use is longest ago. One that is in use is never unloaded; one that is being loaded or
unloaded is never loaded a second time beside that.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Any, NamedTuple


class State(Enum):
    """Where a model is in its life."""

    WANTED = "waits for a place"
    LOADING = "is being loaded"
    LOADED = "is loaded"
    CANCELLING = "is being loaded for nobody"
    UNLOADING = "is being unloaded"


class Entry:
    """One model of a shelf. `users` is changed by the shelf alone."""

    __slots__ = ("model", "model_id", "state", "task", "users", "waiters")

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self.state = State.WANTED
        self.users = 0
        """Those who work with the model or wait for it."""
        self.model: Any = None
        self.task: Any = None
        """What loads or unloads it; like `waiters`, for whoever carries out the steps."""
        self.waiters: set[Any] = set()


class Step(NamedTuple):
    """Something to do: bring `entry` out of the state that it has now been put into."""

    entry: Entry
    state: State
    """LOADING: load it, then `loaded` or `gone`. UNLOADING: close it, then `gone`. CANCELLING: stop its loading."""


class Shelf:
    """The models of one replica. `bound` is how many may have a place at a time; None = any number."""

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        """By the last use, longest ago first."""
        self._line: OrderedDict[Entry, None] = OrderedDict()
        self._abandoned: dict[Entry, None] = {}
        """Being loaded for nobody, which nobody was told to stop yet."""

    @property
    def places(self) -> int:
        """How many places are taken."""
        return len(self.entries) - len(self._line)

    def ask(self, model_id: str) -> Entry:
        """Somebody wants to use a model, until `leave`."""
        entry = self.entries.get(model_id)
        if entry is None:
            entry = self.entries[model_id] = Entry(model_id)
            self._line[entry] = None
        elif entry in self._abandoned:
            del self._abandoned[entry]
            entry.state = State.LOADING
        self.entries.move_to_end(model_id)
        entry.users += 1
        return entry

    def leave(self, entry: Entry) -> None:
        """One who asked does not use it any more."""
        if not self.knows(entry):
            return
        entry.users -= 1
        if entry.users:
            return
        if entry.state is State.WANTED:
            del self.entries[entry.model_id], self._line[entry]
        elif entry.state is State.LOADING:
            entry.state = State.CANCELLING
            self._abandoned[entry] = None

    def next_step(self) -> Step | None:
        """The next thing to do now, if any."""
        if self._abandoned:
            return Step(self._abandoned.popitem()[0], State.CANCELLING)
        if self._line and (self.bound is None or self.places < self.bound):
            entry, _ = self._line.popitem(last=False)
            entry.state = State.LOADING
            return Step(entry, State.LOADING)
        if self._lacks_places():
            for entry in self.entries.values():
                if entry.state is State.LOADED and not entry.users:
                    entry.state = State.UNLOADING
                    return Step(entry, State.UNLOADING)
        return None

    def loaded(self, entry: Entry, model: Any) -> None:
        """Its loading has ended well, also when it was to be cancelled."""
        self._abandoned.pop(entry, None)
        entry.model = model
        entry.state = State.LOADED

    def gone(self, entry: Entry, *, failed: bool = False) -> None:
        """It is unloaded, or its loading was cancelled or has failed. A failure is the answer to all who asked."""
        self._abandoned.pop(entry, None)
        entry.model = None
        if not self.knows(entry):
            return
        if entry.users and not failed:
            entry.state = State.WANTED
            self._line[entry] = None
        else:
            del self.entries[entry.model_id]

    def drop(self, model_id: str) -> Step | None:
        """Unload a model, if it is loaded and nobody uses it."""
        entry = self.entries.get(model_id)
        if entry is None or entry.state is not State.LOADED or entry.users:
            return None
        entry.state = State.UNLOADING
        return Step(entry, State.UNLOADING)

    def clear(self) -> list[Entry]:
        """Forget everything, also what is in use or under way; returns it."""
        forgotten = list(self.entries.values())
        self.entries.clear()
        self._line.clear()
        self._abandoned.clear()
        return forgotten

    def knows(self, entry: Entry) -> bool:
        """Whether it has a life here: its loading has not failed, and it was not forgotten."""
        return self.entries.get(entry.model_id) is entry

    def _lacks_places(self) -> bool:
        """Whether more places are wanted than there are and will be when all that end have ended."""
        if self.bound is None:
            return False
        ending = sum(entry.state in (State.UNLOADING, State.CANCELLING) for entry in self.entries.values())
        return len(self.entries) - ending > self.bound
