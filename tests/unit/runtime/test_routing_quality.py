"""How well prompts are routed: whole workloads against simulated engines (tests/bench/routing_simulation.py)."""

from __future__ import annotations

import pytest

from tests.bench.routing_simulation import (
    SMALL,
    Hardware,
    Result,
    Workload,
    no_shared_prefixes,
    one_hot_prefix,
    sessions,
    shared_prefixes,
    simulate,
)

GATEWAYS = pytest.mark.parametrize("gateways", [1, 3])


def both(
    workload: Workload, gateways: int, users: int = 128, hardware: Hardware | None = None
) -> tuple[Result, Result]:
    """What power of two makes of it, and what `prefix` does."""
    by_load, by_prefix = (
        simulate(policy, workload, gateways=gateways, users=users, hardware=hardware, requests=3000, warm_up=750)
        for policy in ("power_of_two", "prefix")
    )
    return by_load, by_prefix


@pytest.mark.parametrize(("gateways", "better"), [(1, 1.7), (3, 1.4)])
def test_eight_system_prompts(gateways: int, better: float) -> None:
    by_load, by_prefix = both(shared_prefixes, gateways, hardware=SMALL)
    assert by_prefix.hit_rate > better * by_load.hit_rate
    assert by_prefix.ttft < 0.8 * by_load.ttft
    assert by_prefix.latency < by_load.latency
    assert by_prefix.imbalance < 1.25


@GATEWAYS
def test_conversations(gateways: int) -> None:
    by_load, by_prefix = both(sessions, gateways)
    assert by_prefix.hit_rate > 1.5 * by_load.hit_rate
    assert by_prefix.ttft < 0.6 * by_load.ttft
    assert by_prefix.latency < 0.85 * by_load.latency
    assert by_prefix.imbalance < 1.25


@GATEWAYS
@pytest.mark.parametrize("users", [16, 128, 256])
def test_without_anything_shared_it_is_as_good_as_power_of_two(gateways: int, users: int) -> None:
    by_load, by_prefix = both(no_shared_prefixes, gateways, users)
    assert by_prefix.latency <= 1.03 * by_load.latency
    assert by_prefix.ttft <= 1.03 * by_load.ttft


@GATEWAYS
@pytest.mark.parametrize("users", [16, 128, 256])
def test_a_hot_prefix_does_not_overload_a_replica(gateways: int, users: int) -> None:
    by_load, by_prefix = both(one_hot_prefix, gateways, users)
    assert by_prefix.imbalance <= 1.5
    assert max(by_prefix.routed) * len(by_prefix.routed) <= 1.5 * sum(by_prefix.routed)
    assert by_prefix.latency <= 1.03 * by_load.latency
