"""`make up` renews the certificates of a stack on three nodes, under a load on every edge that retries nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

import pytest

from controller.swarm import certificates
from controller.swarm.certificates import DAYS
from controller.swarm.up.secrets import CERTIFICATE_LABEL, CONTROLLER, EDGE, OWN_LABEL, PROJECT_LABEL, ROLES
from tests.harness import swarm_rig
from tests.harness.load import Failure
from tests.harness.swarm_stack import SwarmStack

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(1200)]

LATE_S = 0.7 * DAYS * 86_400
"""After so much of their time certificates are due."""
PAUSE_S, CLIENTS = 0.05, 3
ROUNDS = 2
"""Every HAProxy is replaced: to trust the new authority, then to have its certificate."""
APART_S = 3.0
"""Failures at an edge that are so long apart are of two replacements."""


def test_at_any_time_all_edges_but_one_answer() -> None:
    SwarmStack.build()
    with SwarmStack.running(nodes=3, managers=3) as stack:
        before = kept(stack)
        grow_old(stack)
        with stack.load(PAUSE_S, clients=CLIENTS) as load:
            began = time.time()
            stack.make("up")
            took_s = time.time() - began
            after = kept(stack)
            stack.make("scale", "faulty", "6")
            stack.settle()

        assert after.keys() == before.keys()
        assert not {name for name, _ in after.values()} & {name for name, _ in before.values()}, "all are new"
        for node in stack.rig.nodes:
            for service, key in (("haproxy", EDGE), ("controller", CONTROLLER)):
                assert after[key][1] in own_pem(stack, node, service, key), f"{node.name} has the new {key}"

        windows = {edge: away(failures) for edge, failures in by_edge(load.result.failures).items()}
        print(f"{took_s:.0f} s; {load.result}", sorted(load.result.kinds()))
        for edge, times in windows.items():
            print(edge, [f"away from {first - began:.1f} s for {last - first:.1f} s" for first, last in times])
        assert load.result.failed == len(load.result.failures), "not all failures were kept"
        assert [len(times) for times in windows.values()] == [ROUNDS] * len(stack.rig.nodes)
        for one, other in itertools.combinations(windows.values(), 2):
            for (begin, end), (other_begin, other_end) in itertools.product(one, other):
                assert end < other_begin or other_end < begin, "two edges were away at a time"
        assert load.result.kinds() <= {"ConnectionRefusedError"}, "no request that an edge took was lost"


def grow_old(stack: SwarmStack) -> None:
    """Say of both certificates that they were made long ago: labels are what a later `up` knows of them."""
    now = time.time()
    authority = certificates.make_authority(now - LATE_S)
    with stack.rig.nodes[0].client() as client:
        for secret in client.secrets({"label": f"{PROJECT_LABEL}={stack.project}"}):
            spec = secret["Spec"]
            if (key := spec["Labels"].get(OWN_LABEL)) in ROLES:
                spec["Labels"][CERTIFICATE_LABEL] = certificates.make(ROLES[key], authority, now - LATE_S).certificate
                where = f"{client.base_url}/v{client.api_version}/secrets/{secret['ID']}/update"
                client.post(where, params={"version": secret["Version"]["Index"]}, json=spec).raise_for_status()


def kept(stack: SwarmStack) -> dict[str, tuple[str, str]]:
    """By key, the name and the certificate of each secret of the stack's own that Swarm has."""
    with stack.rig.nodes[0].client() as client:
        found = client.secrets({"label": f"{PROJECT_LABEL}={stack.project}"})
    specs = [one["Spec"] for one in found if OWN_LABEL in one["Spec"]["Labels"]]
    keys = [one["Labels"][OWN_LABEL] for one in specs]
    assert sorted(keys) == sorted({*keys}), "the former ones are removed"
    return {key: (one["Name"], one["Labels"].get(CERTIFICATE_LABEL, "")) for key, one in zip(keys, specs, strict=True)}


def own_pem(stack: SwarmStack, node: swarm_rig.Node, service: str, key: str) -> str:
    """The certificate and the key that a service's container on a node has."""
    container = node.cli("ps", "--quiet", "--filter", f"name={stack.project}_{service}.")
    return node.cli("exec", container, "cat", f"/run/secrets/{key}")


def by_edge(failures: Iterable[Failure]) -> dict[str, list[Failure]]:
    """The failures at each edge."""
    found: dict[str, list[Failure]] = {}
    for one in failures:
        found.setdefault(urlsplit(one.url).netloc, []).append(one)
    return found


def away(failures: Iterable[Failure]) -> list[tuple[float, float]]:
    """The times (unix) from a first failure to the last one of the same replacement."""
    windows: list[tuple[float, float]] = []
    for one in sorted(failures, key=lambda one: one.begun_at):
        if windows and one.begun_at - windows[-1][1] < APART_S:
            windows[-1] = windows[-1][0], max(windows[-1][1], one.at)
        else:
            windows.append((one.begun_at, one.at))
    return windows
