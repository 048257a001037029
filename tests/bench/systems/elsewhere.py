"""Another network namespace of this host, joined to it by a virtual cable.

A request from there to one of the host's ports takes the way of a request from another machine.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from tests.bench.processes import BenchError

NAME = "pierhead-bench"
OUTER, INNER = "ph-bench-outer", "ph-bench-inner"
HOST, GUEST = "198.18.7.1", "198.18.7.2"
"""Of the network that is reserved for benchmarks (RFC 2544)."""

_ROOT = () if os.geteuid() == 0 else ("sudo", "-n")
COMMAND = (*_ROOT, "ip", "netns", "exec", NAME)
"""Runs what follows there."""

_MAKE = (
    f"netns add {NAME}",
    f"link add {OUTER} type veth peer name {INNER} netns {NAME}",
    f"address add {HOST}/30 dev {OUTER}",
    f"link set {OUTER} up",
    f"-n {NAME} address add {GUEST}/30 dev {INNER}",
    f"-n {NAME} link set {INNER} up",
)


@contextlib.contextmanager
def namespace() -> Iterator[str]:
    """Make it; how the host is addressed from there. Raises BenchError where it cannot be made (it needs root)."""
    _remove()  # of a run that was killed
    try:
        for arguments in _MAKE:
            done = _ip(arguments)
            if done.returncode:
                raise BenchError(f"no network namespace of its own: ip {arguments}: {done.stderr.strip()}")
        yield HOST
    finally:
        _remove()


def _remove() -> None:
    """Both ends of the cable go with either."""
    _ip(f"link delete {OUTER}")
    _ip(f"netns delete {NAME}")


def _ip(arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*_ROOT, "ip", *arguments.split()]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
