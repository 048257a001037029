"""Ports for programs that have to be told theirs before they start."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nothing listens on, each another one."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
