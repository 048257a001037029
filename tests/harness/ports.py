"""Ports and addresses for processes that need a fixed one; the others let the kernel choose (0)."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at any address of this machine, each another one.

    They are below those that the kernel gives out: no connection takes one before it is used.
    """
    lowest = int(_RANGE.read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(lowest // 2, lowest), _TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):  # somebody has it: the next one
            probe.bind(("0.0.0.0", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"{len(found)} of {_TRIES} ports from {lowest // 2} to {lowest} are free, not {count}")


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def own_address() -> str:
    """One of this machine's 16 million loopback addresses: there every port is free, and no client ever holds one.

    By chance, and not by the process's number: those of two test runs may be alike where each has a machine of its own,
    or a container, and both have one network.
    """
    while True:
        numbers = [secrets.randbelow(200) + 20, secrets.randbelow(256), secrets.randbelow(254) + 1]
        address = ".".join(map(str, [127, *numbers]))
        if address not in _GIVEN:
            _GIVEN.add(address)
            return address


_GIVEN: set[str] = set()
