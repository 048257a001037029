"""Whose new version comes first: a service that is called changes before those that call it. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def all_callees(service: str, direct: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Services that a call of `service` may reach, through others too; itself only where it calls itself back."""
    found: set[str] = set()
    open_ends = [service]
    while open_ends:
        for callee in direct.get(open_ends.pop(), frozenset()):
            if callee not in found:
                found.add(callee)
                open_ends.append(callee)
    return frozenset(found)


def goes_before(service: str, direct: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """Services whose changes come before those of `service`, by name.

    Of services that call each other the one whose name comes first goes first: some order there must be.
    """
    return tuple(
        callee
        for callee in sorted(all_callees(service, direct) - {service})
        if callee < service or service not in all_callees(callee, direct)
    )
