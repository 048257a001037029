"""A stack on the tests' Swarm: `make up` typed on the first node, then commands on whichever manager answers.

Its loads retry nothing; swarm_losses.py judges what failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from controller.engines.docker_reader import timestamp
from controller.swarm.names import STACK_LABEL
from controller.swarm.state.lease import HOLDER
from tests.harness import swarm_rig
from tests.harness.clients import Clients
from tests.harness.load import Failure, Load
from tests.harness.place import QUIET_WITHIN_S, TAG, Place
from tests.harness.stack import Answer, request
from tests.harness.swarm_rig import Node, SwarmRig
from tests.harness.waiting import eventually

FILES = "compose/compose.yaml:tests/e2e/apps/nodes.yaml"
NAMES = ("haproxy-node", "controller", "prometheus", "registry", "echo", "echo-proto")
IMAGES = [f"pierhead/{name}:{TAG}" for name in NAMES]
PATHS = ("/echo?message=hi", "/faulty")
BUILT = ("controller", "haproxy", "registry", "prometheus", "alertmanager")
ANSWER_S = 30.0
CONNECTIONS = 20
"""Of a load, all clients together."""
MOST_LINES = 30
"""Of the log of one edge."""
LOAD_LIMIT_S = 3000.0
"""Of a load whose test was killed; longer than any test may take."""


class SwarmStack(Place):
    """See the module. A test takes the nodes that cannot be asked out of `managers`."""

    def __init__(self, rig: SwarmRig, project: str = "nodes", files: str = FILES) -> None:
        super().__init__(project, files)
        self.rig, self.managers = rig, list(rig.managers)
        self.variables |= {"PIERHEAD_ENGINE": "swarm", "PIERHEAD_REGISTRY": "here"}
        self._filters = [f"label={key}={project}" for key in (STACK_LABEL, "pierhead.project")]
        """Of the stack's own services, and of replicas."""

    @staticmethod
    def build() -> None:
        """Build what a stack on a Swarm needs besides the images of `make build`; skips the test as `build_or_skip`."""
        swarm_rig.build_or_skip()
        files = {"COMPOSE_FILE": "compose/swarm.yaml", "COMPOSE_PROFILES": "registry,alertmanager", "PIERHEAD_TAG": TAG}
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
        listed = [first.cli("service", "ls", "--quiet", "--filter", one) for one in self._filters]
        images = {first.cli("service", "inspect", "--format", _IMAGE, name) for name in " ".join(listed).split()}
        for node in self.rig.nodes:
            for image in sorted(image for image in images if image.startswith(registry)):
                node.cli("pull", "--quiet", image)
                # A service is rolled out from a manager that has its image under the name in the compose file.
                node.cli("tag", image, image.removeprefix(f"{registry}/").partition("@")[0])

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

    def roll(self, name: str, breaks: str = "", *, waits: bool = True) -> None:
        """Deploy another version of the service `faulty`, which may be a bad one: that ends with another code."""
        self.variables |= {"NODES_NAME": name, "NODES_BREAK": breaks}
        how = ("--timeout", f"{QUIET_WITHIN_S:g}") if waits else ("--no-wait",)
        done = self.run("deploy", "faulty", *how)
        assert bool(done.returncode) == bool(breaks and waits), done.stdout + done.stderr

    def drain(self, node: Node) -> None:
        """Have its replicas go elsewhere, and wait until Swarm has taken the rest from it."""
        self.make("node", "drain", node.name, "--timeout", f"{QUIET_WITHIN_S:g}")

    def activate(self, node: Node) -> None:
        """Use it again."""
        self.make("node", "activate", node.name)

    # --------------------------------------------------------------------------------------------------- what is there

    def others(self, *nodes: Node) -> list[Node]:
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
        first, filters = self.rig.nodes[0], self._filters
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

    def acting(self, timeout_s: float = 30.0) -> Node:
        """The manager whose controller has the lease. Raises LookupError where none of `managers` has it."""
        return self.acting_container(timeout_s)[0]

    def kill_controller(self) -> Node:
        """The controller that acts is killed; its node."""
        node, container = self.acting_container()
        node.cli("kill", "--signal", "KILL", container)
        return node

    def kill_replica(self, node: Node) -> str:
        """A replica there is killed; its name. Raises LookupError where there is none."""
        mine = f"label=pierhead.project={self.project}"
        told = node.cli("ps", "--filter", mine, "--format", '{{.ID}} {{.Label "pierhead.replica"}}').splitlines()
        container, name = next((line.split() for line in sorted(told) if len(line.split()) == 2), ("", ""))
        if not container:
            raise LookupError(f"no replica on {node.name}")
        node.cli("kill", "--signal", "KILL", container)
        return name

    def edge_of(self, node: Node) -> str:
        """The container of its HAProxy; "" where none runs."""
        return next(iter(node.cli("ps", "--quiet", "--filter", f"name={self.project}_haproxy.").split()), "")

    def edge_started_at(self, node: Node) -> float:
        """The unix time at which its HAProxy began; 0 where none runs."""
        container = self.edge_of(node)
        if not container:
            return 0.0
        return timestamp(node.cli("inspect", "--format", "{{.State.StartedAt}}", container)) or 0.0

    def lines_of_edges(self, failures: Iterable[Failure]) -> list[str]:
        """What the edges of failed requests said about failures within a second of them."""
        asked, lines = list(failures), []
        for node in self.rig.nodes:
            mine = [one for one in asked if f"//{node.ip}:" in one.url]
            if container := self.edge_of(node) if mine else "":
                since, until = min(one.begun_at for one in mine) - 1, max(one.at for one in mine) + 1
                times = ("--since", f"{since:.3f}", "--until", f"{until:.3f}")
                told = node.cli("logs", *times, "--timestamps", container).splitlines()
                lines += [f"{node.name} {line}" for line in told[:MOST_LINES]]
        return lines

    def edge_stays(self, node: Node) -> bool:
        """Whether its HAProxy is the one that the managers want there.

        On a node that Swarm has declared lost, the former one runs until the node has received the order to end it.
        """
        label = '{{index .Config.Labels "com.docker.swarm.task.id"}}'
        container = self.edge_of(node)
        return bool(container) and node.cli("inspect", "--format", label, container) in self.ids()

    def hang_edge(self, node: Node) -> str:
        """The processes of its HAProxy are stopped, but still exist. Returns its container."""
        container = self.edge_of(node)
        node.cli("exec", "--user", "root", container, "bash", "-c", _STOP_HAPROXY)
        return container

    def acting_container(self, timeout_s: float = 30.0) -> tuple[Node, str]:
        """The same, and the id of its container."""
        with self.managers[0].client(timeout_s) as client:
            labels = [config["Spec"]["Labels"] for config in client.configs()]  # type: ignore[no-untyped-call]
        holders = [one[HOLDER].partition("/")[0] for one in labels if HOLDER in one]
        for node in self.managers:
            running = node.cli("ps", "--format", "{{.ID}}").split()
            if holders and holders[0] in running:
                return node, holders[0]
        raise LookupError(f"the lease has {holders}, which runs on none of {[node.name for node in self.managers]}")

    def events(self, since: float) -> list[dict[str, Any]]:
        lines = self.make("events", "-n", "1000", "--output", "json").splitlines()
        return [one for one in map(json.loads, lines) if one["last_at"] >= since]

    def orphans(self) -> list[str]:
        """What runs on any node, and is no replica that the controller knows, or is one twice."""
        known = set(self.replicas())
        running = Counter((name, node.name) for node in self.rig.nodes for name in self.tasks_of(node))
        times = Counter(name for name, _ in running.elements())
        return sorted(f"{name} on {node}" for name, node in running if name not in known or times[name] > 1)

    def load(
        self,
        pause_s: float = 0.1,
        nodes: Sequence[Node] = (),
        clients: int = 2,
        connections: int = CONNECTIONS,
        limit_s: float = LOAD_LIMIT_S,
    ) -> Clients:
        """Clients in processes of their own, at every edge: a new connection for each request, and no retry.

        The pause, and how many connections all clients have together, say how many requests a second there are.
        """
        urls = [f"http://{node.ip}:8000{path}" for node in nodes or self.rig.nodes for path in PATHS]
        loads = []
        for number in range(clients):
            each = connections // clients
            first = number * each % len(urls)  # so that all edges have as many connections
            turned = [*urls[first:], *urls[:first]]
            load = Load(turned, each, limit_s, reuse=False, pause_s=pause_s, answer_s=ANSWER_S, keeps=100_000)
            loads.append(load)
        return Clients(loads)


_IMAGE = "{{.Spec.TaskTemplate.ContainerSpec.Image}}"
_STOP_HAPROXY = """
for of in /proc/[0-9]*; do
  [ "$(cat "$of/comm" 2>/dev/null)" != haproxy ] || kill -STOP "${of#/proc/}"
done"""
