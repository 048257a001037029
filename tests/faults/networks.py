"""A network namespace of one's own, joined to this machine by a cable that can be pulled."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Island:
    """Processes run there with `inside` before their command, and are reached at `host`."""

    name: str
    host: str

    @property
    def inside(self) -> Sequence[str]:
        return ("ip", "netns", "exec", self.name)

    def pull_the_cable(self) -> None:
        """From now on nothing gets there, nothing comes back, without an error: no reset, no unreachable."""
        _ip("-n", self.name, "link", "set", "cable", "down")

    def plug_it_in(self) -> None:
        _ip("-n", self.name, "link", "set", "cable", "up")


@contextmanager
def island() -> Iterator[Island]:
    """Make one. Skips the test where this may not be done."""
    if os.geteuid() != 0:
        pytest.skip("a network of its own needs root (ip netns)")
    number = next(_NUMBERS)
    name, device = f"pierhead-{os.getpid()}-{number}", f"ph{os.getpid()}-{number}"
    net = f"198.18.{os.getpid() % 256}"  # RFC 2544: for tests, routed nowhere
    near, far = f"{net}.{number * 4 % 256 + 1}", f"{net}.{number * 4 % 256 + 2}"
    try:
        _ip("netns", "add", name)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {getattr(error, 'stderr', None) or error}")
    try:
        _ip("link", "add", device, "type", "veth", "peer", "name", "cable", "netns", name)
        _ip("address", "add", f"{near}/30", "dev", device)
        _ip("link", "set", device, "up")
        _ip("-n", name, "address", "add", f"{far}/30", "dev", "cable")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "cable", "up")
        yield Island(name, far)
        _ip("link", "delete", device)
    finally:
        _ip("netns", "delete", name)  # with it, once its last process has ended, goes the cable


_NUMBERS = itertools.count()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=60)
