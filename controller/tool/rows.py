"""The cells and sentences of the tables, made from a service's row of the API. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..status.records.services import Service


def version(row: Service) -> str:
    """Return the wanted version; "-" where there is none."""
    return str(row.version or "-")


def gpus(row: Service) -> str:
    """Return how many GPUs the replicas hold; "-" for none."""
    held = {gpu for replica in row.replicas if replica.state != "ASLEEP" for gpu in replica.gpus}
    return str(len(held)) if held else "-"


def in_flight(row: Service) -> str:
    """Return the requests in progress at the replicas; "-" where that is not known."""
    return "-" if row.in_flight is None else str(row.in_flight)


def waiting(row: Service) -> str:
    """Return the requests that wait for a replica; "-" where that is not known."""
    return "-" if row.waiting is None else str(row.waiting)


def seconds(value: float | None) -> str:
    """Return a duration as a table shows it: "0.84 ms", "12 ms", "1.2 s"; "-" where it is not known."""
    if value is None:
        return "-"
    if value < 0.001:
        return f"{value * 1000:.2f} ms"
    if value < 0.01:
        return f"{value * 1000:.1f} ms"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def rate(value: float | None) -> str:
    """Return requests per second as a table shows them; "-" where they are not known."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
