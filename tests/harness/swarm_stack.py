"""A stack on the tests' Swarm: `make up` typed on the first node, then commands on whichever manager answers.

`Lost` says of each request that failed whether it had begun on what a fault took away, so that a load (load.py, without
retries) can be judged afterwards.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from controller.storage.lease import HOLDER
from controller.swarm_api import STACK_LABEL
from tests.harness import swarm_rig
from tests.harness.load import Failure, Load
from tests.harness.place import QUIET_WITHIN_S, TAG, Place
from tests.harness.stack import Answer, request
from tests.harness.swarm_rig import Node, SwarmRig
from tests.harness.waiting import eventually

FILES = "compose/compose.yaml:tests/e2e/apps/nodes.yaml"
NAMES = ("haproxy-node", "controller", "prometheus", "registry", "echo", "echo-child")
IMAGES = [f"pierhead/{name}:{TAG}" for name in NAMES]
PATHS = ("/echo?message=hi", "/faulty")
BUILT = ("controller", "haproxy", "registry", "prometheus")
CONNECTIONS_OF_AN_EDGE = 4
ANSWER_S = 30.0
CLEAN_AFTER_S = 5.0
"""A node's power goes off: so long afterwards, requests at other edges may still be given to its replicas."""
BEFORE_S = 2.0
"""A request that was begun so long before a fault may still have been in progress."""
GOSSIP_S = 90.0
"""An engine that was cut off from the gossip returns: for so long, overlay networks may miss nodes that were well
(moby/moby#53141). Each engine exchanges all that it knows with another one, chosen by chance, every 30 s."""


@dataclass
class Lost:
    """A fault at a node: requests begun around its beginning, at any edge, and later at its own edge, may be lost."""

    kind: str
    edge: str
    """The address of its node."""
    begun_at: float
    over_at: float = float("inf")
    others_for_s: float = CLEAN_AFTER_S
    """For how long after its beginning other edges may lose requests."""
    gossips_at: float = float("inf")
    """When its engine returned to the gossip of the others: these then forget each other for a while (GOSSIP_S)."""

    def explains(self, failure: Failure) -> bool:
        """Whether the request had begun on what was lost."""
        late_s = failure.begun_at - self.begun_at
        if f"//{self.edge}:" in failure.url:
            return late_s >= -BEFORE_S and failure.begun_at <= self.over_at + CLEAN_AFTER_S
        return -BEFORE_S <= late_s <= self.others_for_s or 0 <= failure.begun_at - self.gossips_at <= GOSSIP_S


def unexplained(failures: Sequence[Failure], faults: Sequence[Lost]) -> list[Failure]:
    """The failures of requests that had not begun on anything that was lost."""
    return [one for one in failures if not any(fault.explains(one) for fault in faults)]


class SwarmStack(Place):
    """See the module. A test takes the nodes that cannot be asked out of `managers`."""

    def __init__(self, rig: SwarmRig, project: str = "nodes", files: str = FILES) -> None:
        super().__init__(project, files)
        self.rig, self.managers = rig, list(rig.managers)
        self.variables |= {"PIERHEAD_ENGINE": "swarm", "PIERHEAD_REGISTRY": "here"}

    @staticmethod
    def build() -> None:
        """Build what a stack on a Swarm needs beside the images of `make build`."""
        swarm_rig.build()
        files = {"COMPOSE_FILE": "compose/swarm.yaml", "COMPOSE_PROFILES": "registry", "PIERHEAD_TAG": TAG}
        build = ["docker", "compose", "build", "--quiet", *BUILT]
        subprocess.run(build, cwd=swarm_rig.ROOT, env={**os.environ, **files}, check=True, timeout=900)

    @classmethod
    @contextlib.contextmanager
    def running(cls, nodes: int = 5, managers: int = 3) -> Iterator[SwarmStack]:
        """A rig with the stack on it, and with a controller on every manager."""
        with SwarmRig(nodes=nodes, managers=managers).running([], only_first=IMAGES) as rig:
            stack = cls(rig)
            stack.make("up")
            stack.spread_images()
            for node in rig.nodes:
                for path in PATHS:
                    eventually(lambda node=node, path=path: stack.get(node, path).status == 200, f"{node.name} answers")  # type: ignore[misc]
            yield stack

    def spread_images(self) -> None:
        """Have the images on every node that may need them: their registry is on the first one, which may be lost."""
        first = self.rig.nodes[0]
        controller = first.cli("service", "inspect", "--format", _IMAGE, f"{self.project}_controller")
        registry, _, _ = controller.partition("/")
        names = first.cli("service", "ls", "--filter", f"label=pierhead.project={self.project}", "--quiet").split()
        images = {first.cli("service", "inspect", "--format", _IMAGE, name) for name in names}
        for node in self.rig.nodes:
            for image in sorted(image for image in images if image.startswith(registry)):
                node.cli("pull", "--quiet", image)

    # ------------------------------------------------------------------------------------------------- as a user does

    @property
    def edges(self) -> list[str]:
        return [f"http://{node.ip}:8000" for node in self.rig.nodes]

    def type(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """On a manager that answers."""
        return self.managers[0].run(*command, **{**self.variables, **more})

    def get(self, node: Node, path: str) -> Answer:
        """What a client gets at a node."""
        return request(f"http://{node.ip}:8000{path}")

    def roll(self, name: str, breaks: str = "") -> None:
        """Deploy another version of the service `faulty`, which may be a bad one: that ends with another code."""
        self.variables |= {"NODES_NAME": name, "NODES_BREAK": breaks}
        done = self.run("control", "deploy", "faulty")
        assert bool(done.returncode) == bool(breaks), done.stdout + done.stderr

    def drain(self, node: Node) -> None:
        """Have its replicas go elsewhere, and wait until Swarm has taken the rest from it."""
        self.make("control", "node", "drain", node.name, "--timeout", f"{QUIET_WITHIN_S:g}")

    def activate(self, node: Node) -> None:
        """Use it again."""
        self.make("control", "node", "activate", node.name)

    # --------------------------------------------------------------------------------------------------- what is there

    def others(self, *nodes: Node) -> list[Node]:
        """The nodes that are not these."""
        return [node for node in self.rig.nodes if node not in nodes]

    def tasks_of(self, node: Node) -> list[str]:
        """The replicas that run on a node, by what its own engine says."""
        label = '{{.Label "pierhead.replica"}}'
        mine = f"label=pierhead.project={self.project}"
        return [name for name in node.cli("ps", "--filter", mine, "--format", label).split() if name]

    def started(self) -> dict[str, str]:
        """The task of each replica that runs, as the managers see it: another one has another id."""
        tasks = [one for one in self._tasks() if one["Status"]["State"] == "running"]
        labels = [(one["Spec"]["ContainerSpec"]["Labels"], one) for one in tasks]
        return {mine["pierhead.replica"]: one["ID"] for mine, one in labels if "pierhead.replica" in mine}

    def ids(self) -> set[str]:
        return {one["ID"] for one in self._tasks()}

    def left(self) -> list[str]:
        first, filters = self.rig.nodes[0], [f"label={key}={self.project}" for key in (STACK_LABEL, "pierhead.project")]
        found = [first.cli(kind, "ls", "--quiet") for kind in ("service", "config", "secret")]
        for node in self.rig.nodes:
            found += [node.cli("ps", "--all", "--filter", one, "--format", "{{.Names}} {{.Status}}") for one in filters]
            mine = ("--filter", filters[0], "--format", "{{.Name}}")
            found += [node.cli(kind, "ls", *mine) for kind in ("network", "volume")]
        return [line for lines in found for line in lines.splitlines()]

    def _tasks(self) -> list[Any]:
        """The tasks that shall run, of replicas and of the stack's own services."""
        with self.managers[0].client() as client:
            tasks = client.tasks({"desired-state": "running"})  # type: ignore[no-untyped-call]
        mine = {(STACK_LABEL, self.project), ("pierhead.project", self.project)}
        labels = [((one["Spec"].get("ContainerSpec") or {}).get("Labels") or {}, one) for one in tasks]
        return [one for had, one in labels if mine & had.items()]

    def leader(self) -> Node:
        """The manager that leads. Raises RuntimeError while there is none."""
        for line in self.managers[0].cli("node", "ls", "--format", "{{.ManagerStatus}} {{.Hostname}}").splitlines():
            if line.startswith("Leader"):
                return next(node for node in self.rig.managers if node.name == line.split()[1])
        raise RuntimeError("no manager leads")

    def acting(self) -> Node:
        """The manager whose controller has the lease of the state."""
        with self.managers[0].client() as client:
            labels = [config["Spec"]["Labels"] for config in client.configs()]  # type: ignore[no-untyped-call]
        (holder,) = (one[HOLDER] for one in labels if HOLDER in one)
        container, _, _ = holder.partition("/")
        return next(node for node in self.managers if container in node.cli("ps", "--format", "{{.ID}}").split())

    def orphans(self) -> list[str]:
        """What runs on any node, and is no replica that the controller knows, or is one twice."""
        known = set(self.replicas())
        running = Counter((name, node.name) for node in self.rig.nodes for name in self.tasks_of(node))
        times = Counter(name for name, _ in running.elements())
        return sorted(f"{name} on {node}" for name, node in running if name not in known or times[name] > 1)

    def load(self, limit_s: float, pause_s: float = 0.1, nodes: Sequence[Node] = ()) -> Load:
        """A load on every edge: as many new connections a second as the pause says, and no retry."""
        urls = [f"http://{node.ip}:8000{path}" for node in nodes or self.rig.nodes for path in PATHS]
        connections = CONNECTIONS_OF_AN_EDGE * len(nodes or self.rig.nodes)
        return Load(urls, connections, limit_s, reuse=False, pause_s=pause_s, answer_s=ANSWER_S, keeps=100_000)


_IMAGE = "{{.Spec.TaskTemplate.ContainerSpec.Image}}"
