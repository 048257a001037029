"""`pierhead node init`, `join` and `token` on a machine in memory: what is written, and what is refused."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controller.errors import InvalidRequest
from controller.swarm.nodes import membership, options
from controller.swarm.nodes.engine_settings import free_pool
from controller.swarm.nodes.machine import ENGINE_PID, ENGINE_SETTINGS, READ, TOOLKIT_SETTINGS, WRITE, NodeMachine
from controller.swarm.nodes.membership import Membership
from controller.tool.project.programs import NOT_FOUND, READ_S, Done
from tests.fakes.fake_programs import FakePrograms

TOKEN = f"SWMTKN-1-{'a' * 50}-{'b' * 25}"
JOIN = f"join 10.0.0.1 {TOKEN}"
SIGNAL = """sudo sh -c kill -"$0" "$1" HUP 0"""
ROUTES = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
DOORS = frozenset(f"http://{host}:{port}" for host in ("10.0.0.1", "[fd00::1]") for port in (2377, 7946))


@dataclass
class Box(FakePrograms):
    """A machine with an engine, which is in no Swarm; its user may use sudo. Its GPUs and toolkit are `answers`."""

    listening: frozenset[str] = DOORS
    state: str = "inactive"
    is_manager: bool = False
    says: str = ""
    """What the engine says against an init or a join."""
    running: int = 0
    files: dict[str, str] = field(
        default_factory=lambda: {ENGINE_SETTINGS: '{"live-restore": true, "debug": true}', ENGINE_PID: "0\n"}
    )
    has_live_restore: bool = True
    gpus: frozenset[str] = frozenset()
    """That the engine has read."""
    interrupted_at: str = ""
    """What a command's call contains at which Ctrl-C is typed."""

    def read(
        self,
        *words: str,
        timeout_s: float | None = READ_S,
        variables: Mapping[str, str] | None = None,
        directory: Path | None = None,
        given: str = "",
        complains: bool = False,
    ) -> Done:
        known = super().read(*words, given=given)
        if self.interrupted_at and self.interrupted_at in self.calls[-1]:
            raise KeyboardInterrupt
        match words:
            case ["id", "-u"]:
                return Done(0, "1000\n")
            case ["sudo", *plain]:
                return self._root(plain, given)
            case ["docker", "info", *_]:
                return Done(0, json.dumps(self._info()))
            case ["docker", "swarm", "init" | "join" as command, *_]:
                if self.says:
                    return Done(1, errors=self.says)
                self.state, self.is_manager = "active", command == "init"
                return Done(0)
            case ["docker", "swarm", "join-token", *_]:
                return Done(0, f"{TOKEN}\n")
        return Done(NOT_FOUND) if known.errors == "no such answer" else known

    def _root(self, words: Sequence[str], given: str) -> Done:
        match words:
            case ["sh", "-c", _, place] if given:
                self.files[place] = given
            case ["sh", "-c", _, place]:
                return Done(0, self.files.get(place, ""))
            case ["sh", "-c", _, "HUP", "0"]:
                self.has_live_restore = bool(self.settings["live-restore"])
            case ["systemctl", "restart", "docker"]:
                self.has_live_restore = bool(self.settings["live-restore"])
                listed = [one.partition("=") for one in self.settings.get("node-generic-resources", ())]
                self.gpus = frozenset(uuid for kind, _, uuid in listed if kind == "NVIDIA-GPU")
        return Done(0)

    def _info(self) -> Mapping[str, object]:
        swarm = {
            "LocalNodeState": self.state,
            "ControlAvailable": self.is_manager,
            "NodeAddr": "10.0.0.1",
            "RemoteManagers": [{"Addr": "10.0.0.1:2377"}],
        }
        engine = {"Name": "box", "LiveRestoreEnabled": self.has_live_restore, "ContainersRunning": self.running}
        gpus = [{"NamedResourceSpec": {"Kind": "NVIDIA-GPU", "Value": uuid}} for uuid in sorted(self.gpus)]
        others = [{"DiscreteResourceSpec": {"Kind": "SSD", "Value": 1}}]
        return {**engine, "Swarm": swarm, "GenericResources": [*others, *gpus]}

    @property
    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.files[ENGINE_SETTINGS])
        return found

    def changes(self) -> list[str]:
        """Of the Swarm, and of what only root may change."""
        reads = ("sudo --validate", f"sudo sh -c {READ}", SIGNAL, "docker swarm join-token")
        return [
            call for call in self.calls if call.startswith(("sudo ", "docker swarm ")) and not call.startswith(reads)
        ]

    def types(self, words: str, *, has_registry: bool = False) -> str:
        """`pierhead node WORDS`; what it says."""
        told: list[str] = []
        plain, given = options.read(words.split())
        machine = NodeMachine(self, Path("/clone/engine.sh"), has_systemd=True)
        Membership(machine, given, told.append, told.append, "./pierhead", has_registry=has_registry).run(plain)
        return "\n".join(told)

    def is_refused(self, words: str) -> str:
        with pytest.raises(InvalidRequest) as refusal:
            self.types(words)
        return str(refusal.value)


def with_gpus(toolkit: str = "1.19.0") -> dict[str, Done | str]:
    answers: dict[str, Done | str] = {"nvidia-smi": "GPU-1\nGPU-2\n", "engine-only": ""}
    return answers | ({"runtime --version": f"NVIDIA Container Runtime version {toolkit}\n"} if toolkit else {})


@pytest.fixture
def box() -> Box:
    return Box({"engine-only": ""})


def test_a_machine_with_gpus_joins_and_keeps_its_other_settings() -> None:
    box = Box(with_gpus())
    box.files[TOOLKIT_SETTINGS] = (
        '#swarm-resource = "DOCKER_RESOURCE_GPU"\n\n[nvidia-container-cli]\nno-cgroups = false\n'
    )
    box.files[ENGINE_SETTINGS] = json.dumps(
        {"node-generic-resources": ["SSD=1", "NVIDIA-GPU=GPU-0"], "runtimes": {"crun": {"path": "crun"}}, "debug": 1}
    )
    join = f"{JOIN} --registry 10.0.0.1:5000"
    joined = box.types(join)
    assert joined == "This machine, box, is a worker of the Swarm at 10.0.0.1:2377."
    assert box.settings == {
        "node-generic-resources": ["SSD=1", "NVIDIA-GPU=GPU-1", "NVIDIA-GPU=GPU-2"],
        "runtimes": {"crun": {"path": "crun"}, "nvidia": {"path": "nvidia-container-runtime"}},
        "debug": 1,
        "live-restore": False,
        "default-runtime": "nvidia",
        "insecure-registries": ["10.0.0.1:5000"],
    }
    assert box.files[TOOLKIT_SETTINGS] == (
        'swarm-resource = "DOCKER_RESOURCE_NVIDIA-GPU"\n\n[nvidia-container-cli]\nno-cgroups = false\n'
    )
    assert box.steps == ["Restarting the Docker Engine"], "GPUs are read when it starts"
    assert box.changes()[-1] == f"docker swarm join --token {TOKEN} 10.0.0.1:2377"
    box.calls.clear()
    assert box.types(join) == joined
    assert box.changes() == [], "a second time changes nothing"


def test_a_machine_that_is_taken_in_without_its_gpus_registers_none_and_one_that_lists_none_keeps_them() -> None:
    box = Box(with_gpus())
    box.types(f"{JOIN}")
    box.answers = {"engine-only": ""}
    box.types(JOIN)
    assert box.settings["node-generic-resources"] == ["NVIDIA-GPU=GPU-1", "NVIDIA-GPU=GPU-2"], "no nvidia-smi says so"
    box.types(f"{JOIN} --gpus none")
    assert "node-generic-resources" not in box.settings
    assert box.steps == ["Restarting the Docker Engine"] * 2


def test_a_machine_without_gpus_joins_while_its_containers_run(box: Box) -> None:
    box.running = 1
    box.types(f"join [fd00::1]:2377 {TOKEN}")
    assert box.settings == {"live-restore": False, "debug": True}
    write = ["sudo mkdir -p /etc/docker", f"sudo sh -c {WRITE} {ENGINE_SETTINGS}"]
    assert box.changes() == [*write, f"docker swarm join --token {TOKEN} [fd00::1]:2377"]
    assert box.calls.index(SIGNAL) > box.calls.index(write[1])


@pytest.mark.parametrize("at", ["systemctl restart", "docker swarm join", " HUP "])
def test_a_join_that_was_interrupted_anywhere_is_finished_by_the_next_one(at: str) -> None:
    box = Box(with_gpus() if at != " HUP " else {"engine-only": ""}, interrupted_at=at)
    with pytest.raises(KeyboardInterrupt):
        box.types(JOIN)
    box.interrupted_at = ""
    box.types(JOIN)
    assert box.gpus == (frozenset({"GPU-1", "GPU-2"}) if at != " HUP " else frozenset())
    assert (box.has_live_restore, box.state) == (False, "active")


def test_a_join_by_a_name_is_repeated_as_one_by_an_address_is(box: Box) -> None:
    box.listening = frozenset({"http://manager.lan:2377", "http://manager.lan:7946"})
    box.addresses = {"manager.lan": ["fd00::1", "10.0.0.1"]}
    join = JOIN.replace("10.0.0.1", "manager.lan")
    assert box.types(join) == box.types(join) == "This machine, box, is a worker of the Swarm at manager.lan:2377."
    box.addresses = {"manager.lan": ["fd00::1", "10.0.0.7"]}
    assert "is in a Swarm already" in box.is_refused(join)


def test_a_file_of_settings_is_replaced_whole_with_the_owner_and_mode_that_it_had(tmp_path: Path) -> None:
    place = tmp_path / "daemon.json"
    (tmp_path / "elsewhere.json").write_text("{}")
    place.symlink_to("elsewhere.json")
    place.chmod(0o600)
    with place.open() as former:
        for content in ('{"a": 1}', '{"b": 2}'):
            subprocess.run(["sh", "-c", WRITE, place], input=content, text=True, check=True)
            assert (place.read_text(), place.stat().st_mode & 0o777) == (content, 0o600)
        assert former.read() == "{}", "at no time is the file empty"
    assert place.is_symlink()
    new = tmp_path / "new.json"
    subprocess.run(["sh", "-c", WRITE, new], input="{}", text=True, check=True)
    assert new.read_text() == "{}"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["daemon.json", "elsewhere.json", "new.json"]


@pytest.mark.parametrize(
    ("command", "case", "words"),
    [
        ("join 10.0.0.1", {}, "expected init, join ADDRESS TOKEN, or token [--manager]."),
        ("join 10.0.0.1 secret", {}, '"secret" is no token of a Swarm'),
        ("join fd00::1 SWMTKN-1-a-b", {}, "an IPv6 address is written [address]:2377."),
        (f"{JOIN} --gpus", {}, "--gpus needs a value."),
        (f"{JOIN} --gpu a", {}, "there is no option --gpu."),
        (JOIN, {"listening": frozenset()}, "the manager does not answer at 10.0.0.1, port 2377."),
        (JOIN.replace("10.0.0.1", "unknown.lan"), {"state": "active"}, "is in a Swarm already"),
        (JOIN.replace(".1 ", ".7 "), {"state": "active"}, "is in a Swarm already, whose managers are 10.0.0.1:2377."),
        (JOIN, {"state": "error"}, "is in a Swarm whose managers it does not reach: error"),
        (JOIN, {"answers": with_gpus("")}, "has GPUs, and no NVIDIA Container Toolkit"),
        (JOIN, {"answers": with_gpus("1.18.2")}, "Toolkit here, 1.18.2, does not give containers the GPUs"),
        (JOIN, {"answers": {"engine-only": "", "smi": Done(9, "no driver\n")}}, "list this machine's GPUs: no driver"),
        (JOIN, {"answers": with_gpus(), "running": 1}, "and that ends the containers that run here: 1."),
        (JOIN, {"files": {ENGINE_SETTINGS: "{"}}, "is not JSON"),
        (JOIN, {"files": {ENGINE_SETTINGS: "[]"}}, "holds no settings"),
        ("init", {"state": "active"}, "is in a Swarm already"),
        ("token", {}, "this machine is no manager of a Swarm."),
    ],
)
def test_what_keeps_a_machine_out_of_a_swarm_is_reported_before_anything_changes(
    command: str, case: dict[str, object], words: str
) -> None:
    box = Box(**{"answers": {"engine-only": ""}, **case})  # type: ignore[arg-type]
    assert words in box.is_refused(command)
    assert box.changes() == []


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("rpc error: desc = A valid join token is necessary to join this cluster", "does not take this token"),
        ("remote CA does not match fingerprint. Expected: 1", "the token is of another Swarm than the manager at"),
        ("Timeout was reached before node joined.", "its Swarm has no quorum"),
        ("could not choose an IP address to advertise", "name one with --advertise-addr ADDRESS"),
        ("x509: certificate is not yet valid", "are not valid by this machine's clock"),
        ("no space left", "the Docker Engine says: no space left"),
    ],
)
def test_what_the_engine_says_about_a_join_comes_with_what_to_do(box: Box, says: str, words: str) -> None:
    box.says = f"Error response from daemon: {says}"
    assert words in box.is_refused(JOIN)


def test_the_first_manager_prints_the_command_that_takes_in_the_next_machine(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "route").write_text(ROUTES)
    monkeypatch.setattr(membership, "ROUTES", tmp_path / "route")
    made = box.types("init", has_registry=True)
    assert f"  ./pierhead node join 10.0.0.1:2377 {TOKEN} --registry 10.0.0.1:5000" in made.splitlines()
    assert box.settings["insecure-registries"] == ["10.0.0.1:5000"]
    init = "docker swarm init --default-addr-pool 10.0.0.0/8 --default-addr-pool-mask-length 20"
    assert [call for call in box.calls if call.startswith("docker swarm init")] == [init]
    assert f"  ./pierhead node join 10.0.0.1:2377 {TOKEN}\n" in box.types("token --manager")
    box.answers = {
        **box.answers,
        "service inspect .*pierhead_registry": "node.id == n7\n",
        "node inspect": "10.0.0.7:2377",
    }
    assert " --registry 10.0.0.7:5000\n" in box.types("token", has_registry=True)


@pytest.mark.parametrize(
    ("networks", "found"),
    [
        (("0.0.0.0/0", "172.17.0.0/16"), "10.0.0.0/8"),
        (("10.0.0.0/24",), "10.128.0.0/9"),
        (("10.0.0.0/9", "10.200.0.0/16"), "10.128.0.0/10"),
        (("10.0.0.0/8",), "100.64.0.0/10"),
        (("10.0.0.0/8", "100.64.0.0/10"), "leave no range of addresses free"),
    ],
)
def test_overlay_networks_get_addresses_that_no_network_of_the_machine_has(networks: Sequence[str], found: str) -> None:
    def written(address: ipaddress.IPv4Address) -> str:
        return f"{int.from_bytes(address.packed, sys.byteorder):08X}"

    ranges = [ipaddress.IPv4Network(network) for network in networks]
    lines = [f"eth0 {written(one.network_address)} 0 1 0 0 0 {written(one.netmask)} 0 0 0\n" for one in ranges]
    routes = ROUTES + "".join(lines)
    if "free" in found:
        with pytest.raises(InvalidRequest, match=found):
            free_pool(routes)
    else:
        assert free_pool(routes) == found
