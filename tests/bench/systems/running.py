"""What the bench needs of something that runs: where to send requests, and which processes it consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.bench.processes import Kept, Member, members_of


@dataclass(frozen=True, slots=True)
class Workplace:
    """What all subjects of a run share."""

    directory: Path
    """For configuration, logs and sockets; a short path."""
    python: Path
    """Runs our services and the limits."""
    peer_python: Path | None
    haproxy: Path | None
    """The same program for every subject of MODE=processes."""
    device: str
    """cpu or cuda, of the ranker on both sides."""
    seen_from_elsewhere: str
    """How another network namespace addresses this host; empty where there is none."""
    torch_threads: int
    """Of the ranker on both sides. By default half of the cores: with all of them, PyTorch's threads wait for each
    other while HAProxy, the ingresses and the load run; on two cores that cost both sides more than half of their rate.
    """


def own_role(role: str, process: psutil.Process) -> str:
    """Every process of a tree has its root's role."""
    return role


@dataclass(frozen=True)
class Running:
    """One subject that answers requests."""

    url: str
    """http://host:port of the edge, or of the ingress where there is no edge."""
    kept: Sequence[Kept]
    classify: Callable[[str, psutil.Process], str] = own_role
    ways: Mapping[str, str] = field(default_factory=dict)
    """Other addresses than `url`, by the key of cases.WAYS."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """What its clients send."""
    way_in: str = ""
    """How requests reach HAProxy, where it is not simply a process of this host."""
    extra: Callable[[], Sequence[Member]] = field(default=tuple)
    """Processes that are no descendants of `kept`: those of containers and of the engine."""

    def members(self) -> list[Member]:
        """Its processes at this moment, each with its role."""
        roots = [(kept.name, kept.process) for kept in self.kept if not kept.ended()]
        return [*members_of(roots, self.classify), *self.extra()]
