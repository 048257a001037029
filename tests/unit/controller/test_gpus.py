from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docker.errors
import pytest
import requests
import yaml
from hypothesis import given
from hypothesis import strategies as st

from controller.engines.gpu_discovery import GpuDiscovery, GpuSources, read_cdi_files
from controller.engines.gpus import (
    CdiFileError,
    GpuInventory,
    described,
    discovered_devices,
    foreign_holders,
    inventory_of_names,
    inventory_of_report,
    merge_cdi,
    parse_cdi_spec,
    requested_gpus,
)
from controller.engines.smi import SmiDevice, parse_report
from controller.model.world import Gpu

KIND = "nvidia.com/gpu"
NOW = 1_700_000_000.0
A, B = "GPU-aaaaaaaa-0000-1111-2222-333333333333", "GPU-bbbbbbbb-0000-1111-2222-333333333333"


def cdi(devices: Mapping[str, str], kind: str = KIND) -> str:
    """A CDI file in YAML: device name -> the node it brings."""
    entries = [
        {"name": name, "containerEdits": {"deviceNodes": [{"path": node, "hostPath": "/dev/null"}] if node else []}}
        for name, node in devices.items()
    ]
    return yaml.safe_dump({"cdiVersion": "0.5.0", "kind": kind, "devices": entries})


def uuids(inventory: GpuInventory) -> list[str]:
    return [gpu.uuid for gpu in inventory.gpus]


def test_the_engine_lists_devices_of_the_kind() -> None:
    info = {
        "DiscoveredDevices": [
            {"Source": "cdi", "ID": f"{KIND}={A}"},
            {"Source": "cdi", "ID": f"{KIND}=0"},
            {"Source": "cdi", "ID": "vendor.com/nic=eth0"},
            {"Source": "other", "ID": f"{KIND}={B}"},
        ]
    }
    assert discovered_devices(info, KIND) == (A, "0")
    assert discovered_devices({}, KIND) == discovered_devices({"DiscoveredDevices": None}, KIND) == (), "older engines"


class TestCdiFiles:
    def test_yaml_and_json_read_alike(self) -> None:
        nodes = {"0": "/dev/nvidia0", A: "/dev/nvidia0", "all": "/dev/nvidia0"}
        assert parse_cdi_spec(cdi(nodes), KIND, is_json=False) == nodes
        assert parse_cdi_spec(json.dumps(yaml.safe_load(cdi(nodes))), KIND, is_json=True) == nodes
        assert parse_cdi_spec(cdi({"x": "/dev/x"}, kind="vendor.com/nic"), KIND, is_json=False) == {}, "another kind"

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("[1, 2]", "expected a mapping, found list"),
            (f"kind: {KIND}\ndevices: many", 'expected a list under "devices"'),
            (f"kind: {KIND}\ndevices: [{{name: a}}, 7]", 'devices[1]: expected a text under "name"'),
            ("kind: [unclosed", "expected ',' or ']'"),
        ],
    )
    def test_malformed_files_say_where(self, text: str, said: str) -> None:
        with pytest.raises(CdiFileError) as raised:
            parse_cdi_spec(text, KIND, is_json=False)
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)

    @given(st.text(max_size=200), st.booleans())
    def test_any_text_is_read_or_refused(self, text: str, is_json: bool) -> None:
        try:
            devices = parse_cdi_spec(text, KIND, is_json=is_json)
        except CdiFileError:
            return
        assert all(isinstance(name, str) for name in devices)

    def test_a_later_directory_overrides_and_files_of_one_directory_cancel_each_other(self) -> None:
        later = merge_cdi([{"/etc/cdi/a.yaml": {A: "old"}}, {"/var/run/cdi/a.yaml": {A: "new"}}])
        assert later == ({A: "new"}, ())
        devices, (warning,) = merge_cdi([{"/etc/cdi/a.yaml": {A: "x"}, "/etc/cdi/b.json": {A: "x", B: "y"}}])
        assert devices == {B: "y"}
        assert "/etc/cdi/a.yaml and /etc/cdi/b.json" in warning


MIG_0, MIG_1 = "MIG-cccccccc-0000-1111-2222-333333333333", "MIG-dddddddd-0000-1111-2222-333333333333"
BOTH = {"0": "n0", "1": "n1", "all": "n0\nn1", B: "n0", A: "n1"}
OF_MIG = {"0:0": "n0", "0:1": "n1", MIG_0: "n0", MIG_1: "n1"}


class TestNames:
    @pytest.mark.parametrize(
        ("names", "nodes", "found", "aliases"),
        [
            (["0", "1", "all", B, A], BOTH, [B, A], {"0": B, "1": A}),  # in the order of their indices
            (["10", "2", "all", "0"], {}, ["0", "2", "10"], {}),
            (list(OF_MIG), OF_MIG, [MIG_0, MIG_1], {"0:0": MIG_0, "0:1": MIG_1}),
            (["0", "1", "0:0", "0:1"], {}, ["0:0", "0:1", "1"], {}),  # GPU 0 is divided
            ([A, B, "0", "1"], {}, [A, B], {}),  # no alias is guessed
            ([A], {A: "n0", "0": "n0"}, [A], {"0": A}),  # the alias of a file
        ],
    )
    def test_other_names(
        self, names: list[str], nodes: dict[str, str], found: list[str], aliases: dict[str, str]
    ) -> None:
        inventory = inventory_of_names(names, nodes)
        assert (uuids(inventory), inventory.aliases) == (found, aliases)


MIB = 1024 * 1024


def printed(
    *gpus: tuple[str, str, str, str], parts: Mapping[str, Mapping[str, tuple[str, str, str]]] | None = None
) -> str:
    """What nvidia-smi prints of GPUs (uuid, name, total, used) and their MIG devices (uuid -> profile, total, used)."""
    listing, xml = [], []
    for index, (uuid, name, total, used) in enumerate(gpus):
        mine = (parts or {}).get(uuid, {})
        listing.append(f"GPU {index}: {name} (UUID: {uuid})")
        listing += [
            f"  MIG {entry[0]}      Device  {n}: (UUID: {part})" for n, (part, entry) in enumerate(mine.items())
        ]
        devices = "".join(
            f"<mig_device><index>{n}</index><gpu_instance_id>{n + 3}</gpu_instance_id><fb_memory_usage><total>{size}"
            f"</total><reserved>0 MiB</reserved><used>{part_used}</used></fb_memory_usage></mig_device>"
            for n, (_, size, part_used) in enumerate(mine.values())
        )
        mode = "Enabled" if mine else "N/A"
        xml.append(
            f"<gpu><product_name>{name}</product_name><mig_mode><current_mig>{mode}</current_mig></mig_mode>"
            f"<mig_devices>{devices or 'None'}</mig_devices><uuid>{uuid}</uuid><fb_memory_usage><total>{total}</total>"
            f"<reserved>540 MiB</reserved><used>{used}</used></fb_memory_usage></gpu>"
        )
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">'
    return "\n".join([*listing, head, "<nvidia_smi_log>", *xml, "</nvidia_smi_log>"])


class TestNvidiaSmi:
    def test_gpus(self) -> None:
        report = parse_report(printed((A, "NVIDIA H200", "143771 MiB", "4 MiB"), (B, "NVIDIA GB10", "[N/A]", "N/A")))
        assert report == (
            SmiDevice(A, "0", "NVIDIA H200", 143771 * MIB, 4 * MIB),
            SmiDevice(B, "1", "NVIDIA GB10", None, None),
        )
        inventory = inventory_of_report(report)
        assert inventory.gpus == (
            Gpu(uuid=A, driver="nvidia", name="NVIDIA H200", memory_bytes=143771 * MIB),
            Gpu(uuid=B, driver="nvidia", name="NVIDIA GB10", memory_bytes=None),
        )
        assert inventory.aliases == {"0": A, "1": B}

    def test_mig_devices_have_the_uuid_of_the_list_and_the_memory_of_the_xml(self) -> None:
        parts = {A: {MIG_0: ("3g.20gb", "20096 MiB", "37 MiB"), MIG_1: ("1g.5gb", "4864 MiB", "12 MiB")}}
        report = parse_report(printed((A, "NVIDIA A100", "40960 MiB", "N/A"), (B, "X", "9 MiB", "1 MiB"), parts=parts))
        assert report[:3] == (
            SmiDevice(A, "0", "NVIDIA A100", 40960 * MIB, None, divided=True),
            SmiDevice(MIG_0, "0:0", "NVIDIA A100 MIG 3g.20gb", 20096 * MIB, 37 * MIB, parent=A),
            SmiDevice(MIG_1, "0:1", "NVIDIA A100 MIG 1g.5gb", 4864 * MIB, 12 * MIB, parent=A),
        )
        assert uuids(inventory_of_report(report)) == [MIG_0, MIG_1, B], "the divided GPU is not one to hand out"

    @pytest.mark.parametrize("said", ["", "No devices were found\n", "sh: 1: nvidia-smi: not found", "GPU 0: <?xml <a"])
    def test_what_reads_otherwise_is_named(self, said: str) -> None:
        with pytest.raises(ValueError, match="nvidia-smi: "):
            parse_report(said)

    @given(st.text(max_size=200))
    def test_any_text_is_read_or_refused(self, text: str) -> None:
        with contextlib.suppress(ValueError):
            parse_report(text)


class TestMig:
    def test_a_gpu_that_is_divided_is_not_among_the_gpus(self) -> None:
        nodes = {
            A: "/dev/nvidia0\n/dev/dri/card1",
            MIG_0: "/dev/nvidia0\n/dev/caps1",
            MIG_1: "/dev/nvidia0\n/dev/caps2",
        }
        nodes |= {B: "/dev/nvidia1", "0": nodes[A], "1": "/dev/nvidia1", "0:0": nodes[MIG_0], "all": "x"}
        inventory = inventory_of_names(nodes, nodes)
        assert {gpu.uuid: gpu.parent for gpu in inventory.gpus} == {MIG_0: A, MIG_1: A, B: ""}
        assert inventory.divided == {A}

    def test_nvidia_smi_says_which_gpu_is_divided_where_names_do_not(self) -> None:
        report = parse_report(printed((A, "G", "100 MiB", "N/A"), parts={A: {MIG_0: ("1g", "20 MiB", "1 MiB")}}))
        inventory = described(inventory_of_names([A, B, MIG_0]), report)
        assert [(gpu.uuid, gpu.memory_bytes, gpu.driver) for gpu in inventory.gpus] == [
            (B, None, "cdi"),
            (MIG_0, 20 * MIB, "cdi"),
        ]

    def test_a_container_with_a_divided_gpu_holds_all_its_parts(self) -> None:
        nodes = {A: "n0", "0": "n0", MIG_0: "n0\nc0", MIG_1: "n0\nc1", B: "n1"}
        inventory = inventory_of_names(nodes, nodes)
        for name in (A, "0"):
            holders, warnings = foreign_holders({"train": frozenset({name})}, inventory)
            assert (holders, warnings) == ({MIG_0: "train", MIG_1: "train"}, ())


def container(*requests_: dict[str, Any], runtime: str = "runc", env: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"HostConfig": {"DeviceRequests": list(requests_) or None, "Runtime": runtime}, "Config": {"Env": list(env)}}


class TestHolders:
    @pytest.mark.parametrize(
        ("inspected", "names"),
        [
            (container(), set()),
            (container({"Driver": "cdi", "DeviceIDs": [f"{KIND}={A}", "vendor.com/nic=eth0"]}), {A}),
            (container({"Driver": "nvidia", "DeviceIDs": [A, "1"]}), {A, "1"}),
            (container({"Driver": "", "Count": 2, "Capabilities": [["gpu"]]}), {"0", "1"}),
            (container({"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}), {"all"}),
            (container({"Driver": "", "Count": 1, "Capabilities": [["tpu"]]}), set()),
            (container(runtime="nvidia", env=(f"NVIDIA_VISIBLE_DEVICES={A}, 1",)), {A, "1"}),
            (container(runtime="nvidia", env=(f"NVIDIA_VISIBLE_DEVICES={KIND}=all",)), {"all"}),
            (container(runtime="runc", env=("NVIDIA_VISIBLE_DEVICES=all",)), set()),
        ],
    )
    def test_what_a_container_was_given(self, inspected: dict[str, Any], names: set[str]) -> None:
        assert requested_gpus(inspected, KIND) == names

    def test_uuids_indices_and_all(self) -> None:
        inventory = GpuInventory((Gpu(A), Gpu(B)), {"0": A, "1": B})
        holders, warnings = foreign_holders({"web": frozenset(), "train": frozenset({"1"})}, inventory)
        assert (holders, warnings) == ({B: "train"}, ())
        holders, _ = foreign_holders({"train": frozenset({A}), "other": frozenset({"all"})}, inventory)
        assert holders == {A: "other", B: "other"}

    def test_an_index_of_an_unknown_gpu_is_reported_unless_the_machine_has_none(self) -> None:
        holders, (warning,) = foreign_holders({"train": frozenset({"7"})}, GpuInventory((Gpu(A),)))
        assert holders == {}
        assert 'container train holds GPU "7"' in warning
        assert foreign_holders({"train": frozenset({"7"})}, GpuInventory()) == ({}, ())


class TestReadingDirectories:
    def test_yaml_and_json_files_are_read_again_when_they_change(self, tmp_path: Path) -> None:
        sources, path = GpuSources(KIND, (tmp_path, tmp_path / "missing")), tmp_path / "a.yaml"
        path.write_text(cdi({A: "n0"}))
        (tmp_path / "b.json").write_text(json.dumps(yaml.safe_load(cdi({B: "n1"}))))
        (tmp_path / "c.yml").write_text(cdi({"GPU-c": "n2"}))
        (tmp_path / "d.yaml.bak").write_text("{{{")
        assert read_cdi_files(sources, pytest.fail) == {A: "n0", B: "n1"}
        path.write_text(cdi({A: "n0", "GPU-d": "n3"}))
        assert set(read_cdi_files(sources, pytest.fail)) == {A, B, "GPU-d"}
        path.unlink()
        assert set(read_cdi_files(sources, pytest.fail)) == {B}

    @pytest.mark.parametrize("content", [b"kind: [", b"\xff\xfe", b"kind: 3"])
    def test_a_malformed_file_is_named_and_the_others_count(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "bad.yaml").write_bytes(content)
        (tmp_path / "good.yaml").write_text(cdi({A: ""}))
        warnings: list[str] = []
        assert read_cdi_files(GpuSources(KIND, (tmp_path,)), warnings.append) == {A: ""}
        assert [line.partition(" is ignored: ")[0] for line in warnings] == [f"CDI file {tmp_path / 'bad.yaml'}"]


class StubClient:
    """The five calls of docker-py that discovery makes, on canned answers."""

    def __init__(self, info: dict[str, Any], smi: str | Exception = "") -> None:
        self.answers = info
        self.smi = smi
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []

    def info(self) -> dict[str, Any]:
        self.calls.append("info")
        return self.answers

    def containers(self, filters: dict[str, Any], **_: object) -> list[dict[str, Any]]:
        return [{"Id": "left-behind", "Created": NOW - 600}, {"Id": "another-stacks", "Created": NOW - 1}]

    def create_container_from_config(self, body: dict[str, Any]) -> dict[str, str]:
        self.bodies.append(body)
        self.calls.append(f"create {body['Image']} {body['HostConfig'].get('Runtime', 'cdi')}")
        return {"Id": "probe"}

    def start(self, container_id: str) -> None:
        self.calls.append(f"start {container_id}")
        if isinstance(self.smi, Exception):
            raise self.smi

    def wait(self, _: str, timeout: int) -> dict[str, int]:
        assert timeout > 0
        return {"StatusCode": 0 if self.smi else 9}

    def logs(self, _: str, tail: int) -> bytes:
        return str(self.smi or "no driver").encode()

    def remove_container(self, container_id: str, force: bool, v: bool) -> None:
        assert force
        assert v
        self.calls.append(f"remove {container_id}")


class HangingClient(StubClient):
    """An engine on which `nvidia-smi` never ends, nor by SIGKILL: what it does to a GPU that has fallen off its bus."""

    def __init__(self, info: dict[str, Any], smi: str) -> None:
        super().__init__(info, smi)
        self.hangs = True
        self.running: dict[str, float] = {}

    def containers(self, filters: dict[str, Any], **_: object) -> list[dict[str, Any]]:
        if "running" not in filters.get("status", ["running"]):
            return []
        return [{"Id": container_id, "Created": created} for container_id, created in self.running.items()]

    def create_container_from_config(self, body: dict[str, Any]) -> dict[str, str]:
        super().create_container_from_config(body)
        self.running[f"probe-{len(self.bodies)}"] = NOW
        return {"Id": f"probe-{len(self.bodies)}"}

    def wait(self, container_id: str, timeout: int) -> dict[str, int]:
        if self.hangs:
            raise requests.ReadTimeout("slow")
        return super().wait(container_id, timeout)

    def remove_container(self, container_id: str, force: bool, v: bool) -> None:
        super().remove_container(container_id, force, v)
        if self.hangs:
            raise docker.errors.APIError("did not receive an exit event")
        self.running.pop(container_id)


class TestDiscovery:
    def discover(self, client: StubClient, *directories: Path, probe: str | None = "own") -> GpuDiscovery:
        self.now = 1000.0
        sources = GpuSources(KIND, directories, probe_image=probe)
        return GpuDiscovery(client, sources, monotonic=lambda: self.now, clock=lambda: NOW)  # type: ignore[arg-type]

    def test_the_engines_list_comes_first_then_cdi_files(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(cdi({A: "n0", "0": "n0", B: "n1"}))
        client = StubClient({"DiscoveredDevices": [{"Source": "cdi", "ID": f"{KIND}={A}"}], "Runtimes": {"nvidia": {}}})
        inventory = self.discover(client, tmp_path).inventory()
        assert (uuids(inventory), inventory.aliases) == ([A], {"0": A})
        assert client.calls == ["info"]
        older = StubClient({"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"nvidia": {}}})
        assert uuids(self.discover(older, tmp_path).inventory()) == [A, B]

    def test_then_the_probe_and_cdi_off_is_said_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "a.yaml").write_text(cdi({A: "n0"}))
        text = printed((B, "NVIDIA L4", "23034 MiB", "1 MiB"))
        client = StubClient({"CDISpecDirs": [], "Runtimes": {"nvidia": {}}}, smi=text)
        discovery = self.discover(client, tmp_path)
        with caplog.at_level(logging.WARNING):
            assert discovery.inventory().gpus[0].name == "NVIDIA L4"
            self.now += 31
            assert uuids(discovery.inventory()) == [B]
        probe = ["remove left-behind", "create own nvidia", "start probe", "remove probe"]
        assert client.calls == ["info", *probe, "info"]
        (record,) = caplog.records
        assert record.message == (
            "CDI files describe 1 devices of kind nvidia.com/gpu, but CDI is off in the Docker Engine: put "
            '{"features": {"cdi": true}} into /etc/docker/daemon.json and restart it'
        )

    @pytest.mark.parametrize("smi", ["", requests.ReadTimeout("slow"), "garbage"])
    def test_a_failing_probe_is_reported_and_repeated(
        self, smi: str | Exception, caplog: pytest.LogCaptureFixture
    ) -> None:
        client = StubClient({"Runtimes": {"nvidia": {}}}, smi=smi)
        discovery = self.discover(client)
        assert discovery.inventory().gpus == ()
        assert client.calls[-1] == "remove probe"
        (record,) = caplog.records
        assert record.message.startswith("GPUs cannot be listed with nvidia-smi in image own: ")
        client.smi = printed((A, "NVIDIA L4", "23034 MiB", "1 MiB"))
        self.now += 61
        assert uuids(discovery.inventory()) == [A]

    def test_a_probe_that_cannot_be_ended_is_the_only_one(self) -> None:
        """Each would else leave another container that nothing ends, for as long as the GPU is ill."""
        text = printed((A, "NVIDIA L4", "23034 MiB", "7 MiB"))
        client = HangingClient({"DiscoveredDevices": [{"Source": "cdi", "ID": f"{KIND}={A}"}]}, smi=text)
        discovery = self.discover(client)
        discovery.inventory()
        for _ in range(3):
            with pytest.raises(docker.errors.APIError, match="exit event"):
                discovery.used_memory()
        assert list(client.running) == ["probe-1"]
        client.running["probe-1"] = NOW - 600
        after_a_restart = self.discover(client)
        after_a_restart.inventory()
        with pytest.raises(docker.errors.APIError, match="exit event"):
            after_a_restart.used_memory()
        assert list(client.running) == ["probe-1"]
        client.hangs = False
        assert discovery.used_memory() == {A: 7 * MIB}
        assert client.running == {}

    def test_memory_in_use_is_asked_in_a_container_that_cdi_gives_the_gpus_to(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(cdi({A: "n0", B: "n1", "0": "n0", "all": "n0"}))
        text = printed((A, "NVIDIA L4", "23034 MiB", "1500 MiB"), (B, "NVIDIA GB10", "[N/A]", "N/A"))
        client = StubClient({"CDISpecDirs": ["/etc/cdi"]}, smi=text)
        discovery = self.discover(client, tmp_path)
        assert [gpu.memory_bytes for gpu in discovery.inventory().gpus] == [None, None]
        assert discovery.used_memory() == {A: 1500 * MIB}
        assert client.bodies[0]["HostConfig"] == {
            "NetworkMode": "none",
            "DeviceRequests": [{"Driver": "cdi", "DeviceIDs": [f"{KIND}={A}", f"{KIND}={B}"]}],
        }
        assert client.calls[1:] == ["remove left-behind", "create own cdi", "start probe", "remove probe"]
        assert discovery.inventory().gpus == (
            Gpu(A, "cdi", "NVIDIA L4", 23034 * MIB),
            Gpu(B, "cdi", "NVIDIA GB10", None),
        ), "what nvidia-smi says of the GPUs stays known"

    @pytest.mark.parametrize(("smi_text", "said"), [("", "exit code 9: no driver"), ("what", "expected its list")])
    def test_memory_that_cannot_be_read_says_why(self, smi_text: str, said: str) -> None:
        client = StubClient({"Runtimes": {"nvidia": {}}}, smi=smi_text)
        with pytest.raises(ValueError, match=said):
            self.discover(client).used_memory()
        assert client.calls[-1] == "remove probe"
        with pytest.raises(ValueError, match="no image"):
            self.discover(client, probe=None).used_memory()
