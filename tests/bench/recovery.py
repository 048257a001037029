"""How long the stack takes to recover, and what it does under overload: `python -m tests.bench.recovery --rounds 3`.

Starts a stack of its own for each round, breaks one part after the other under load, and prints each figure with the
bound that the documents name. The images must have been built (`make build`). The tests of tests/e2e assert what
happens; how long it takes depends on the machine, so it is measured here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

from docker.models.containers import Container

from tests.harness.load import Load, LoadResult
from tests.harness.stack import Stack
from tests.harness.waiting import eventually, seconds_until

ECHO, RECSYS, WORK = "/echo?message=x", "/recsys/?user_id=1", "/faulty"
APPS = ("compose/apps/echo.yaml", "compose/apps/recsys.yaml", "tests/e2e/apps/overload.yaml")
REPLICAS = {"echo": 1, "echo-child": 2, "recsys": 1, "ranker": 2, "worker": 2}

BOUNDS = {
    "HAProxy killed: from its start until every server is back (s)": "2",
    "HAProxy hangs: until the controller restarts it (s)": "10 to 13",
    "HAProxy hangs: from its start until every server is back (s)": "2",
    "replica killed: until its successor is ready (s)": "-",
    "replica hangs: until the last call begins that fails (s)": "8",
    "overload: answers a second, of those at the peak": "0.85 and more",
}
"""Figure -> what the documents say of it on a quiet machine."""

FIGURES = tuple(BOUNDS)
PEAK_CONNECTIONS, OVERLOAD_CONNECTIONS, OVERLOAD_S = 12, 80, 5.0
"""tests/e2e/apps/overload.yaml has 8 places and a queue of 8; a client that is refused comes back after 20 ms."""


def haproxy_killed(stack: Stack) -> dict[str, float]:
    """Kill HAProxy's process; Docker starts it again."""
    started_at = _started_at(stack)
    with _load(stack):
        stack.kill_process(stack.container("haproxy"))
        eventually(lambda: _runs_anew(stack, started_at), "Docker starts HAProxy again", every_s=0.01)
        return {FIGURES[0]: _back_s(stack)}


def haproxy_hangs(stack: Stack) -> dict[str, float]:
    """Stop HAProxy's processes; the controller kills and starts the container."""
    started_at = _started_at(stack)
    with _load(stack):
        hung_at = stack.hang_haproxy()
        eventually(lambda: _runs_anew(stack, started_at), "the controller starts HAProxy again", every_s=0.01)
        return {FIGURES[1]: time.time() - hung_at, FIGURES[2]: _back_s(stack)}


def replica_killed(stack: Stack) -> dict[str, float]:
    """Kill one of two rankers."""
    victim = next(iter(stack.replicas("ranker").values()))
    with _load(stack):
        stack.kill_process(victim)
        return {FIGURES[3]: seconds_until(lambda: _is_replaced(stack, "ranker", victim), "it is replaced", 120)}


def replica_hangs(stack: Stack) -> dict[str, float]:
    """Stop one of two echo children."""
    victim = next(iter(stack.replicas("echo-child").values()))
    with _load(stack) as load:
        stopped_at = stack.kill_process(victim, "STOP")
        eventually(lambda: _is_replaced(stack, "echo-child", victim), "it is replaced", 120)
    return {FIGURES[4]: load.result.last_failed_begun_at - stopped_at}


def overload(stack: Stack) -> dict[str, float]:
    """Send ten times what two replicas can take."""
    peak, over = (_answered_per_s(stack, count) for count in (PEAK_CONNECTIONS, OVERLOAD_CONNECTIONS))
    return {FIGURES[5]: over / peak}


CASES: tuple[Callable[[Stack], dict[str, float]], ...] = (
    haproxy_killed,
    haproxy_hangs,
    replica_killed,
    replica_hangs,
    overload,
)


def _load(stack: Stack) -> Load:
    return Load([stack.url(ECHO), stack.url(RECSYS)], connections=20)


def _started_at(stack: Stack) -> str:
    return str(stack.container("haproxy").attrs["State"]["StartedAt"])


def _runs_anew(stack: Stack, before: str) -> bool:
    state = stack.container("haproxy").attrs["State"]
    return bool(state["Running"]) and state["StartedAt"] != before


def _back_s(stack: Stack) -> float:
    return seconds_until(lambda: all(stack.get(path).status == 200 for path in (ECHO, RECSYS)), "every server is back")


def _is_replaced(stack: Stack, service: str, victim: Container) -> bool:
    return victim.id not in stack.replica_ids(service) and stack.is_settled(service, REPLICAS[service])


def _answered_per_s(stack: Stack, connections: int) -> float:
    """Answers with status 200 per second."""
    load = Load([stack.url(WORK)], connections=connections, limit_s=OVERLOAD_S)
    with load:
        time.sleep(OVERLOAD_S)  # measures; waits for nothing
    result: LoadResult = load.result
    return (result.requests - result.failed) / result.seconds


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    figures = defaultdict[str, list[float]](list)
    for number in range(rounds):
        # A stack of its own for each round: a HAProxy that hangs again soon after a restart is restarted later.
        with Stack("pierhead-test-recovery", APPS).running() as stack:
            for service, replicas in REPLICAS.items():
                stack.scale(service, replicas)
            for case in CASES:
                stack.settle(**REPLICAS)
                for name, value in case(stack).items():
                    figures[name].append(value)
                print(f"round {number + 1} of {rounds}: {case.__name__}", flush=True)
    print("\n| | median | lowest | highest | bound |\n|---|---|---|---|---|")
    for name, values in figures.items():
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} | {BOUNDS[name]} |")


if __name__ == "__main__":
    main()
