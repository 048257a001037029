"""A Swarm on this machine: each node is a Docker Engine in a privileged container, on a bridge of their own.

The first nodes are managers. Every node has invented GPUs, and a socket in the rig's directory. The overlay networks of
the nodes are real (VXLAN over the bridge), so a node that is powered off is gone for the others as a real one is.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient

from tests.harness.commands import Ended, run
from tests.harness.haproxy_container import docker
from tests.harness.waiting import eventually

HERE = Path(__file__).parent / "swarm_node"
ROOT = Path(__file__).resolve().parents[2]
IMAGE = f"pierhead-test/swarm-node:{zlib.crc32((HERE / 'Dockerfile').read_bytes()):08x}"
LABEL = "pierhead.test=swarm-rig"
STARTED_WITHIN_S = 60.0
GPU_KIND = "NVIDIA-GPU"
OVERLAY, GOSSIP, CONTROL = 4789, 7946, 2377
"""The ports between nodes: packets of overlay networks, who is in which network, managers and agents."""
CHAIN = "CUT"
"""Of iptables, in a node: what it neither sends nor receives."""


def build(image: str = IMAGE, directory: Path = HERE, *options: str) -> None:
    """Build the image of a node (a cached build takes a second)."""
    docker("build", "--network", "host", "--label", LABEL, *options, "-t", image, str(directory))


def build_or_skip() -> None:
    """Build the image of a node; skips the test where there can be no Swarm."""
    build()
    probe = ["ip", "link", "add", "probe", "type", "vxlan", "id", "4000", "dstport", "4790"]
    done = run(["docker", "run", "--rm", "--privileged", "--label", LABEL, IMAGE, *probe], 60, ROOT)
    if done.returncode:
        pytest.skip(f"this kernel has no overlay networks: {done.stderr.strip()}")


def _python() -> list[str]:
    """The mounts with which the clone's Python, which its command runs in, is on a node as well."""
    base, library = sys.base_prefix, f"/usr/lib/python3.{sys.version_info.minor}"
    if base != "/usr":
        return ["--volume", f"{base}:{base}:ro"]
    program = f"{Path(sys.executable).resolve()}:/usr/bin/python3:ro"
    return ["--volume", program, "--volume", f"{library}:{library}:ro"]


class Node:
    """One node. `client` speaks to its engine, also after a return from being powered off."""

    def __init__(self, rig: SwarmRig, number: int, gpus: int) -> None:
        self.name = f"n{number}"
        self.container = f"{rig.name}-{self.name}"
        self.ip = f"{rig.subnet}.{10 + number}"
        self.gpus = tuple(f"GPU-{self.name}-{index:04}" for index in range(1, gpus + 1))
        self.directory = rig.work / self.name
        self.url = f"unix://{self.directory}/docker.sock"
        self._rig = rig

    def create(self, *, bare: bool = False) -> None:
        """Start it for the first time. Bare: without its engine."""
        self.directory.mkdir()
        init, command = (("--init",), ("sleep", "infinity")) if bare else ((), ())
        settings = {
            "hosts": ["unix:///var/run/docker.sock", "unix:///rig/docker.sock"],
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "node-generic-resources": [f"{GPU_KIND}={uuid}" for uuid in self.gpus],
            "insecure-registries": [f"{self._rig.nodes[0].ip}:5000"],
        }
        (self.directory / "daemon.json").write_text(json.dumps(settings))
        docker("volume", "create", *self._rig.labels, self.container)
        docker(
            *("run", "--detach", "--privileged", "--name", self.container, "--hostname", self.name, *self._rig.labels),
            *("--network", self._rig.name, "--ip", self.ip, "--tmpfs", "/run"),
            *("--volume", f"{self.container}:/var/lib/docker", "--volume", f"{self.directory}:/rig"),
            *("--volume", f"{ROOT}:{ROOT}:ro", *_python(), *init, self._rig.image, *command),
        )

    @contextlib.contextmanager
    def client(self, timeout_s: float = 30.0) -> Iterator[APIClient]:
        opened = APIClient(base_url=self.url, version="auto", timeout=timeout_s)  # type: ignore[arg-type]
        try:
            yield opened
        finally:
            opened.close()

    def cli(self, *arguments: str) -> str:
        """What a docker command on it says."""
        return docker("--host", self.url, *arguments)

    def run(self, *command: str, **environment: str) -> Ended:
        """Run a command on it in the clone, which every node has at its own path."""
        variables = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        return run(["docker", "exec", "--workdir", str(ROOT), *variables, self.container, *command], 600, ROOT)

    def wait_until_up(self) -> None:
        """Wait until its engine answers."""
        eventually(lambda: self.cli("version"), f"the engine of {self.name} answers", STARTED_WITHIN_S)

    def load(self, images: Collection[str]) -> None:
        """Bring images over from the machine's own engine."""
        if not images:
            return
        with subprocess.Popen(["docker", "save", *images], stdout=subprocess.PIPE) as saving:
            load = ["docker", "--host", self.url, "load", "--quiet"]
            subprocess.run(load, stdin=saving.stdout, stdout=subprocess.DEVNULL, check=True, timeout=600)
        assert saving.returncode == 0, f"docker save {' '.join(images)}"

    # ---------------------------------------------------------------------------------------------- what happens to it

    def power_off(self) -> None:
        """Its link goes down, and then all of its processes end at once, without a message to anybody."""
        docker("exec", self.container, "ip", "link", "set", "eth0", "down")
        docker("kill", "--signal", "KILL", self.container)

    def power_on(self) -> None:
        """It starts again, with its disk unchanged, and nothing cut or slowed."""
        docker("start", self.container)
        self.wait_until_up()

    def restart_engine(self) -> None:
        """Its engine stops, which ends its containers, and starts again."""
        docker("restart", "--time", "60", self.container)
        self.wait_until_up()

    def cut(self, *ports: int, peers: Iterable[Node] = ()) -> None:
        """Drop what it exchanges on these ports, and everything that it exchanges with these nodes, until `heal`."""
        self.heal()
        rules = [
            f"-A {CHAIN} -p {protocol} --{side} {port} -j DROP"
            for port in ports
            for protocol in ("tcp", "udp")
            for side in ("dport", "sport")
        ]
        rules += [f"-A {CHAIN} -{side} {peer.ip} -j DROP" for peer in peers for side in "sd"]
        self._iptables(f"-I INPUT -j {CHAIN}", f"-I OUTPUT -j {CHAIN}", *rules)

    def heal(self) -> None:
        """Undo every cut."""
        hooks = [f"-D {chain} -j {CHAIN}" for chain in ("INPUT", "OUTPUT")]
        undone = " ; ".join(f"iptables -w {words} 2>/dev/null" for words in (*hooks, f"-F {CHAIN}", f"-N {CHAIN}"))
        docker("exec", self.container, "sh", "-c", f"{undone} ; true")

    def slow_down(self, cpus: float) -> None:
        """Leave it, and all of its containers, this share of the processors until `speed_up`."""
        docker("update", "--cpus", f"{cpus:g}", self.container)

    def speed_up(self) -> None:
        """Undo `slow_down`."""
        self.slow_down(os.cpu_count() or 1)

    def _iptables(self, *rules: str) -> None:
        docker("exec", self.container, "sh", "-ec", "\n".join(f"iptables -w {rule}" for rule in rules))


class SwarmRig:
    """See the module. `nodes` are in the order of their names, managers first."""

    def __init__(self, nodes: int = 1, managers: int = 1, gpus: int = 2, image: str = IMAGE) -> None:
        self.name = f"pierhead-test-swarm-{secrets.token_hex(3)}"
        self.image = image
        self.labels = ("--label", LABEL, "--label", f"pierhead.test.rig={self.name}")
        self.work = Path(tempfile.mkdtemp(prefix="pierhead-swarm-"))
        self.subnet = f"10.{random.randrange(200, 250)}.{random.randrange(256)}"
        self.nodes = [Node(self, number, gpus) for number in range(1, nodes + 1)]
        self.managers = self.nodes[:managers]

    @contextlib.contextmanager
    def running(self, images: Iterable[str], only_first: Iterable[str] = ()) -> Iterator[SwarmRig]:
        """Start it, with these images of this machine on every node, and those on the first; remove it at the end."""
        try:
            docker("network", "create", *self.labels, "--subnet", f"{self.subnet}.0/24", self.name)
            for node in self.nodes:
                node.create()
            for node in self.nodes:
                node.wait_until_up()
                node.load([*images, *(only_first if node is self.nodes[0] else ())])
            self._join()
            yield self
        finally:
            self._remove()

    @contextlib.contextmanager
    def machines(self) -> Iterator[SwarmRig]:
        """Start bare machines, which are in no Swarm; remove them at the end."""
        try:
            docker("network", "create", *self.labels, "--subnet", f"{self.subnet}.0/24", self.name)
            for node in self.nodes:
                node.create(bare=True)
            yield self
        finally:
            self._remove()

    def states(self) -> dict[str, str]:
        """The state of every node ("ready", "down", "unknown"), as the first manager sees it."""
        with self.managers[0].client() as client:
            return {node["Description"]["Hostname"]: node["Status"]["State"] for node in client.nodes()}

    def tasks(self, **filters: Any) -> list[dict[str, Any]]:
        """The tasks, as the first manager lists them."""
        with self.managers[0].client() as client:
            return list(client.tasks(filters))  # type: ignore[no-untyped-call]

    def _join(self) -> None:
        first, *others = self.nodes
        first.cli("swarm", "init", "--advertise-addr", first.ip)
        for node in others:
            role = "manager" if node in self.managers else "worker"
            token = first.cli("swarm", "join-token", "--quiet", role)
            node.cli("swarm", "join", "--advertise-addr", node.ip, "--token", token, f"{first.ip}:2377")
        expected = dict.fromkeys((node.name for node in self.nodes), "ready")
        eventually(lambda: self.states() == expected, "all nodes are ready", STARTED_WITHIN_S)

    def _remove(self) -> None:
        mine = f"label=pierhead.test.rig={self.name}"
        for kind, remove in (
            (("ps", "--all"), ("rm", "--force", "--volumes")),
            (("volume", "ls"), ("volume", "rm", "--force")),
            (("network", "ls"), ("network", "rm")),
        ):
            found = docker(*kind, "--quiet", "--filter", mine).split()
            if found:
                docker(*remove, *found)
        shutil.rmtree(self.work)
