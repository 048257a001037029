"""The cells and sentences of the tables, made from a service's row of the API. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..model.reports import AutoscaleStatus
    from ..status.records.services import RolloutDocument, Service


def version(row: Service) -> str:
    """Return the wanted version; "-" where there is none."""
    return str(row.version or "-")


def gpus(row: Service) -> str:
    """Return how many GPUs the replicas hold; "-" for none."""
    held = {gpu for replica in row.replicas for gpu in replica.gpus}
    return str(len(held)) if held else "-"


def in_flight(row: Service) -> str:
    """Return the requests in progress at the replicas; "-" where that is not known."""
    return "-" if row.in_flight is None else str(row.in_flight)


def waiting(row: Service) -> str:
    """Return the requests that wait for a replica; "-" where that is not known."""
    return "-" if row.waiting is None else str(row.waiting)


def who_decides(row: Service) -> str:
    """Return in one sentence where the number of replicas comes from."""
    autoscale, name = row.autoscale, row.name
    if autoscale:
        bounds = f"{autoscale.min} to {autoscale.max}"
        if autoscale.paused:
            found = _what_it_finds(autoscale)
            return f"set by scale; the autoscaler ({bounds}) pauses until `pierhead scale {name} auto`; {found}"
        return f"the autoscaler decides, {bounds}; {_what_it_finds(autoscale)}{_unless_settled(autoscale)}"
    if row.override is not None:
        written = row.spec_replicas
        files = "" if written is None else f"; the compose files say {written}"
        return f"set by scale{files} (`pierhead scale {name} auto` goes back to them)"
    return "the compose files say so"


def _what_it_finds(autoscale: AutoscaleStatus) -> str:
    """The basis of an autoscaler's number: the user's policy where there is one, else the load."""
    if autoscale.problem:
        return f"its policy gives no number: {autoscale.problem}"
    if autoscale.basis:
        return str(autoscale.basis)
    return f"the load is {autoscale.load:.1f} requests, which are for {autoscale.wanted} replicas"


def _unless_settled(autoscale: AutoscaleStatus) -> str:
    if autoscale.problem:
        return f"; {autoscale.target} are held meanwhile"
    if autoscale.wanted == autoscale.target:
        return ""
    return f"; {autoscale.wanted} replicas if that lasts" if autoscale.basis else " if they last"


def rollout_words(rollout: RolloutDocument, message: str) -> str:
    """Return a rollout's phase and numbers, before the controller's sentence about it."""
    return f"{rollout.phase}, {rollout.ready} of {rollout.wanted} ready; {message}"


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


def age(since: float, now: float) -> str:
    """Return an age: "8 s", "3 min", "2 h", "4 d"."""
    passed = max(now - since, 0.0)
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if passed < limit:
            return f"{passed // unit:.0f} {name}"
    return f"{passed // 86_400:.0f} d"
