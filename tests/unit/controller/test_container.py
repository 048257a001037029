"""A Compose service -> the engine's create call: what is translated, refused, added for one replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from controller.engines.labels import create_body
from controller.files.parse import parse
from controller.files.shared_memory import OPTIONS
from controller.files.translate import IGNORED
from controller.model.actions import replica_name
from controller.model.spec import AccessLog, GpuSlot, ServiceSpec
from controller.model.world import Gpu
from tests.unit.controller.compose_configs import PROJECT, config, problems, problems_of, ranker, service

FOREIGN = {"protocol": "http", "health": {"probe": {"path": "/"}}}


def container(**definition: Any) -> Any:
    """What is created for a service whose image is not ours (so nothing of ours is in the environment)."""
    return ranker(FOREIGN, **definition).container


# Lines of a compose file, what the engine's create call has for them.
OF_THE_CONTAINER: dict[str, dict[str, Any]] = {
    "command: [a, b c]": {"Cmd": ["a", "b c"]},
    "entrypoint: [/e]": {"Entrypoint": ["/e"]},
    "entrypoint: []": {"Entrypoint": []},
    "working_dir: /w": {"WorkingDir": "/w"},
    "user: '1000:1000'": {"User": "1000:1000"},
    "{tty: true, stdin_open: true}": {"Tty": True, "OpenStdin": True},
    "stop_signal: SIGINT": {"StopSignal": "SIGINT"},
    "labels: {a: '1', b: true}": {"Labels": {"a": "1", "b": "true"}},
    "environment: {B: '2', A: x=y, C: null, D: 5}": {"Env": ["A=x=y", "B=2", "C", "D=5"]},
    "healthcheck: {test: [CMD, x], interval: 1m30s, retries: 3}": {
        "Healthcheck": {"Test": ["CMD", "x"], "Interval": 90_000_000_000, "Retries": 3}
    },
    "healthcheck: {disable: true}": {"Healthcheck": {"Test": ["NONE"]}},
}
OF_THE_HOST: dict[str, dict[str, Any]] = {
    "shm_size: '1073741824'": {"ShmSize": 1073741824},
    "{init: true, read_only: true, privileged: true}": {"Init": True, "ReadonlyRootfs": True, "Privileged": True},
    "{cap_add: [NET_ADMIN], cap_drop: [ALL]}": {"CapAdd": ["NET_ADMIN"], "CapDrop": ["ALL"]},
    "group_add: [mail, '5']": {"GroupAdd": ["mail", "5"]},
    "security_opt: ['no-new-privileges:true', label=disable]": {
        "SecurityOpt": ["no-new-privileges=true", "label=disable"]
    },
    "security_opt: [systempaths=unconfined, 'apparmor:unconfined']": {
        "SecurityOpt": ["apparmor=unconfined"],
        "MaskedPaths": [],
        "ReadonlyPaths": [],
    },
    "sysctls: {net.core.somaxconn: '1024'}": {"Sysctls": {"net.core.somaxconn": "1024"}},
    "extra_hosts: [h=1.2.3.4, g=host-gateway]": {"ExtraHosts": ["g:host-gateway", "h:1.2.3.4"]},
    "extra_hosts: ['v6=::1']": {"ExtraHosts": ["v6:::1"]},
    "{dns: [1.1.1.1], dns_search: [a.b]}": {"Dns": ["1.1.1.1"], "DnsSearch": ["a.b"]},
    "{ipc: host, pid: host}": {"IpcMode": "host", "PidMode": "host"},
    "runtime: nvidia": {"Runtime": "nvidia"},
    "logging: {driver: json-file, options: {max-size: 10m}}": {
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "10m"}}
    },
    "ulimits: {nproc: 100, nofile: {soft: 10, hard: 20}}": {
        "Ulimits": [{"Hard": 20, "Name": "nofile", "Soft": 10}, {"Hard": 100, "Name": "nproc", "Soft": 100}]
    },
    "devices: [{source: /dev/fuse, target: /dev/f, permissions: r}]": {
        "Devices": [{"CgroupPermissions": "r", "PathInContainer": "/dev/f", "PathOnHost": "/dev/fuse"}]
    },
    "devices: [/dev/kvm]": {
        "Devices": [{"CgroupPermissions": "rwm", "PathInContainer": "/dev/kvm", "PathOnHost": "/dev/kvm"}]
    },
    "tmpfs: [/run, '/tmp:size=64m']": {"Tmpfs": {"/run": "", "/tmp": "size=64m"}},
    "deploy: {resources: {limits: {cpus: 1.5, memory: '536870912', pids: 100}}}": {
        "NanoCpus": 1_500_000_000,
        "Memory": 536870912,
        "PidsLimit": 100,
    },
    "deploy: {resources: {reservations: {memory: '1024', cpus: 1}}}": {"MemoryReservation": 1024},
    "{mem_limit: 1g, cpus: 2, pids_limit: 5}": {"Memory": 1073741824, "NanoCpus": 2 * 10**9, "PidsLimit": 5},
    "{mem_limit: 1g, memswap_limit: '-1'}": {"Memory": 1073741824, "MemorySwap": -1},
    "volumes: [{type: bind, source: /a, target: /b, read_only: true, bind: {selinux: z}}]": {"Binds": ["/a:/b:ro,z"]},
}


@pytest.mark.parametrize("lines", [*OF_THE_CONTAINER, *OF_THE_HOST])
def test_what_is_translated(lines: str) -> None:
    created = container(**yaml.safe_load(lines))
    for expected, made in ((OF_THE_CONTAINER, created), (OF_THE_HOST, created["HostConfig"])):
        assert {key: made[key] for key in expected.get(lines, ())} == expected.get(lines, {})


# ------------------------------------------------------------------------------------------------------------- mounts


def mounts(mounted: list[Any], **sections: Any) -> Any:
    whole = config(ranker=service(FOREIGN, volumes=mounted)) | sections
    return parse(PROJECT, whole).services["ranker"].container["HostConfig"]["Mounts"]


def test_binds() -> None:
    short = {"type": "bind", "source": "/a", "target": "/b", "read_only": True, "bind": {"create_host_path": True}}
    long = {"type": "bind", "source": "/a", "target": "/c", "bind": {"propagation": "rslave"}}
    assert mounts([short, long]) == [
        {"BindOptions": {"CreateMountpoint": True}, "ReadOnly": True, "Source": "/a", "Target": "/b", "Type": "bind"},
        {"BindOptions": {"Propagation": "rslave"}, "Source": "/a", "Target": "/c", "Type": "bind"},
    ]


def test_volumes_have_the_engines_names_and_composes_labels() -> None:
    volumes = [
        {"type": "volume", "source": "cache", "target": "/c", "volume": {"nocopy": True, "subpath": "x"}},
        {"type": "volume", "source": "theirs", "target": "/t", "volume": {}},
        {"type": "volume", "source": "nfs", "target": "/n"},
        {"type": "volume", "target": "/anonymous"},
    ]
    section = {
        "cache": {"name": "shop_cache"},
        "theirs": {"name": "theirs", "external": True},
        "nfs": {"name": "shop_nfs", "driver": "local", "driver_opts": {"type": "nfs"}, "labels": {"l": "1"}},
    }
    labels = {"com.docker.compose.project": "shop"}
    assert mounts(volumes, volumes=section) == [
        {
            "Source": "shop_cache",
            "Target": "/c",
            "Type": "volume",
            "VolumeOptions": {
                "Labels": {**labels, "com.docker.compose.volume": "cache"},
                "NoCopy": True,
                "Subpath": "x",
            },
        },
        {"Source": "theirs", "Target": "/t", "Type": "volume"},
        {
            "Source": "shop_nfs",
            "Target": "/n",
            "Type": "volume",
            "VolumeOptions": {
                "DriverConfig": {"Name": "local", "Options": {"type": "nfs"}},
                "Labels": {**labels, "com.docker.compose.volume": "nfs", "l": "1"},
            },
        },
        {"Target": "/anonymous", "Type": "volume"},
    ]


def test_tmpfs_as_a_volume() -> None:
    volume = {"type": "tmpfs", "target": "/t", "tmpfs": {"size": "1048576", "mode": 493}}
    assert mounts([volume]) == [{"Target": "/t", "TmpfsOptions": {"Mode": 493, "SizeBytes": 1048576}, "Type": "tmpfs"}]


def test_secrets_and_configs_are_files_bound_read_only() -> None:
    definition = {
        "secrets": [{"source": "token"}, {"source": "token", "target": "mine"}, {"source": "token", "target": "/x"}],
        "configs": [{"source": "conf"}],
    }
    whole = config(ranker=service(FOREIGN, **definition))
    whole |= {"secrets": {"token": {"file": "/s"}}, "configs": {"conf": {"file": "/c"}}}
    made = parse(PROJECT, whole).services["ranker"].container["HostConfig"]["Mounts"]
    assert [(each["Source"], each["Target"], each["ReadOnly"]) for each in made] == [
        ("/s", "/run/secrets/token", True),
        ("/s", "/run/secrets/mine", True),
        ("/s", "/x", True),
        ("/c", "/conf", True),
    ]


# ----------------------------------------------------------------------------------------------------------- networks


def with_networks(joined: Any, **stack: Any) -> dict[str, Any]:
    """`stack`: the networks of `controller` and `haproxy`."""
    whole = config(ranker=service({**FOREIGN, "route": "/ranker"}, networks=joined))
    whole["networks"] |= {"back": {"name": "shared_back", "external": True}, "front": {"name": "shop_front"}}
    whole["services"] |= {name: {"image": name, "networks": networks} for name, networks in stack.items()}
    return whole


def test_networks_by_the_engines_names_with_the_service_as_alias() -> None:
    whole = with_networks({"front": {"aliases": ["q", "ranker"]}, "back": {"priority": 5, "driver_opts": {"a": "b"}}})
    made = parse(PROJECT, whole).services["ranker"].container
    assert made["NetworkingConfig"]["EndpointsConfig"] == {
        "shared_back": {"Aliases": ["ranker"], "DriverOpts": {"a": "b"}},
        "shop_front": {"Aliases": ["ranker", "q"]},
    }
    assert made["HostConfig"]["NetworkMode"] == "shared_back"


def test_a_replica_is_reached_where_the_controller_is() -> None:
    whole = with_networks({"front": None, "back": {"priority": 5}}, controller={"front": None, "default": None})
    assert parse(PROJECT, whole).services["ranker"].container["HostConfig"]["NetworkMode"] == "shop_front"


def test_a_replica_is_reached_where_haproxy_is_too() -> None:
    both = {"front": None, "back": None, "default": None}
    whole = with_networks({"front": None, "back": {"priority": 5}}, controller=both, haproxy={"front": None})
    assert parse(PROJECT, whole).services["ranker"].container["HostConfig"]["NetworkMode"] == "shop_front"


def test_what_haproxy_has_no_requests_for_is_reached_where_the_controller_is() -> None:
    whole = with_networks({"back": None}, controller={"back": None, "default": None}, haproxy={"default": None})
    del whole["services"]["ranker"]["x-serve"]["route"]
    assert parse(PROJECT, whole).services["ranker"].container["HostConfig"]["NetworkMode"] == "shared_back"


@pytest.mark.parametrize(
    ("stack", "theirs"),
    [
        ({"controller": {"default": None}}, "default"),
        ({"controller": {"back": None, "default": None}, "haproxy": {"default": None}}, "default"),
        ({"controller": {"back": None}, "haproxy": {"default": None}}, "they share none"),
    ],
)
def test_a_network_that_nobody_shares(stack: dict[str, Any], theirs: str) -> None:
    assert problems_of(with_networks({"back": None}, **stack)) == [
        (
            "services.ranker.networks: the controller, and HAProxy if the service has a route, would not reach it on "
            f"one of these; add one of theirs here ({theirs}), or one of these to the services controller and haproxy"
        )
    ]


# ------------------------------------------------------------------------------------------------------ what is refused

GONE = "not supported with x-serve; remove it"
ONE = "not possible with x-serve: all replicas would have the same one; remove it"


# Lines of a compose file, the problem with them.
REFUSED = {
    "ports: [{target: 80, published: '8080'}]": (
        "ports: not possible with x-serve: a published port belongs to one container and a service has many replicas; "
        "remove it and write x-serve.route (HTTP) or x-serve.grpc_services (gRPC): HAProxy takes the requests and "
        "spreads them"
    ),
    "container_name: x": (
        "container_name: not possible with x-serve: replicas have names of their own (<project>-<service>-<version>-"
        "<n>); remove it"
    ),
    "hostname: x": f"hostname: {ONE} (callers use the service name)",
    "network_mode: host": (
        "network_mode: not possible with x-serve: replicas need addresses of their own on a Compose network; remove it "
        "or write networks"
    ),
    "blkio_config: {}": f"blkio_config: {GONE}",
    "deploy: {update_config: {}}": (
        "deploy.update_config: is for Swarm, Compose and Pierhead do not use it; remove it"
    ),
    "deploy: {mode: global}": 'deploy.mode: expected "replicated", found "global"',
    "deploy: {resources: {limits: {zork: 1}}}": f"deploy.resources.limits.zork: {GONE}",
    "deploy: {resources: {reservations: {generic_resources: []}}}": (
        f"deploy.resources.reservations.generic_resources: {GONE}"
    ),
    "networks: {default: {ipv4_address: 10.0.0.1}}": (
        "networks.default.ipv4_address: not possible with x-serve: it fits one container only; remove it"
    ),
    "networks: {back: null}": "networks.back: no such network in the top-level networks section",
    "environment: {PIERHEAD_PORT: '1'}": "environment.PIERHEAD_PORT: the controller sets this variable; remove it",
    "environment: {PIERHEAD_LOG_LEVEL: debug}": (
        "environment.PIERHEAD_LOG_LEVEL: the controller sets this variable; write x-serve.logging.log_level in its "
        "place"
    ),
    "labels: {pierhead.service: x}": (
        "labels.pierhead.service: the controller sets labels of this name itself; choose another prefix"
    ),
    "pid: 'service:x'": 'pid: expected "host", found "service:x"',
    "ipc: 'service:x'": 'ipc: expected "private" or "shareable" or "host" or "none", found "service:x"',
    "security_opt: ['seccomp:./p.json']": (
        "security_opt: expected seccomp=unconfined or seccomp=builtin (profiles in files are not read), found "
        '"seccomp:./p.json"'
    ),
    "devices: [nvidia.com/gpu=all]": (
        "devices[0]: expected a device path (GPUs belong into deploy.resources.reservations.devices), found "
        '"nvidia.com/gpu=all"'
    ),
    "volumes: [{type: npipe, source: x, target: /y}]": (
        'volumes[0].type: expected "bind", "volume" or "tmpfs", found "npipe"'
    ),
    "volumes: [{type: volume, source: nope, target: /y}]": (
        'volumes[0].source: expected a name of the top-level volumes section, found "nope"'
    ),
    "secrets: [{source: s}]": 'secrets[0].source: expected a name of the top-level secrets section, found "s"',
    "stop_grace_period: soon": 'stop_grace_period: expected a duration such as "30s" or "1m30s", found "soon"',
    "mem_limit: much": 'mem_limit: expected a size such as "512m", found "much"',
    "image: null": "image: expected a string that is not empty, found null",
}


@pytest.mark.parametrize("lines", REFUSED)
def test_what_is_refused(lines: str) -> None:
    assert problems({}, **yaml.safe_load(lines)) == [f"services.ranker.{REFUSED[lines]}"]


def test_a_secret_that_is_no_file() -> None:
    whole = config(ranker=service(secrets=[{"source": "s"}])) | {"secrets": {"s": {"environment": "TOKEN"}}}
    assert problems_of(whole) == [
        "services.ranker.secrets[0]: replicas can only be given a secret from a file; write secrets.s.file"
    ]


@pytest.mark.parametrize("key", sorted({*IGNORED} - {"image", "scale", "stop_grace_period", "gpus"}))
def test_what_has_no_meaning_for_a_replica_changes_nothing(key: str) -> None:
    assert IGNORED[key]  # each says why
    assert container(**{key: {"anything": 1}}) == container()


# --------------------------------------------------------------------------------------------------------- one replica


def body(spec: ServiceSpec, *gpus: Gpu, cdi_kind: str = "nvidia.com/gpu") -> dict[str, Any]:
    return create_body(
        spec, replica_name(PROJECT, spec.name, "abcd1234", 2), "abcd1234", 2, gpus, PROJECT, cdi_kind, "gpu-7"
    )


def test_the_environment_of_a_managed_replica() -> None:
    spec = ranker({"port": 7000, "request_timeout_s": 2.5}, environment={"MODEL": "x"})
    assert body(spec)["Env"] == [
        "MODEL=x",
        "PIERHEAD_ACCESS_LOG=sampled",
        "PIERHEAD_ACCESS_LOG_SAMPLE=0.01",
        "PIERHEAD_ADMIN_PORT=9100",
        "PIERHEAD_BACKPRESSURE_RETRY_AFTER_S=1",
        "PIERHEAD_BACKPRESSURE_STATUS_CODE=503",
        "PIERHEAD_BODY_TIMEOUT_S=30",
        "PIERHEAD_DEBUG=false",
        "PIERHEAD_DISCOVERY=controller:8101",
        "PIERHEAD_DRAIN_TIMEOUT_S=7.5",
        "PIERHEAD_LOG_ENCODING=json",
        "PIERHEAD_LOG_LEVEL=info",
        "PIERHEAD_MAX_ONGOING_REQUESTS=100",
        "PIERHEAD_NODE=gpu-7",
        "PIERHEAD_PORT=7000",
        "PIERHEAD_PROJECT=shop",
        "PIERHEAD_REPLICA=shop-ranker-abcd1234-2",
        "PIERHEAD_REQUEST_TIMEOUT_S=2.5",
        "PIERHEAD_RUN_USER_CODE_IN_SEPARATE_THREAD=false",
        "PIERHEAD_SERVICE=ranker",
        "PIERHEAD_SHARED_MEMORY_BYTES=0",
        "PIERHEAD_SLOW_REQUEST_S=1",
        "PIERHEAD_VERSION=abcd1234",
    ]


@pytest.mark.parametrize(
    ("word", "sample", "block", "found"),
    [
        ("", "", {}, AccessLog()),
        ("all", "0.5", {}, AccessLog("all", 0.5)),
        ("all", "0.5", {"access_log": "off", "slow_request_s": 2}, AccessLog("off", 0.5, 2.0)),
    ],
)
def test_the_stack_decides_what_is_logged_else(word: str, sample: str, block: Any, found: AccessLog) -> None:
    assert parse(PROJECT, with_access_log(word, sample, block)).services["ranker"].access_log == found


def test_wrong_words_for_the_access_log_are_problems() -> None:
    path = "services.controller.environment.PIERHEAD_ACCESS_LOG"
    assert problems_of(with_access_log("some", "often", {})) == [
        f'{path}: expected sampled, all or off (it is set in .env), found "some"',
        f'{path}_SAMPLE: expected a number from 0 to 1 (it is set in .env), found "often"',
    ]


def with_access_log(word: str, sample: str, block: Any) -> dict[str, Any]:
    """A project with the controller, whose service has the stack's words in its environment."""
    words = {"PIERHEAD_ACCESS_LOG": word, "PIERHEAD_ACCESS_LOG_SAMPLE": sample}
    return config(ranker=service({"logging": block}), controller={"image": "c", "environment": words})


MEMORY_VOLUME = {"driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": "mode=1733"}}


def with_memory(of_the_stack: str, x_serve: Any, **definition: Any) -> dict[str, Any]:
    """A project with the controller, whose service has the stack's size in its environment."""
    controller = {"image": "c", "networks": {"default": None}, "environment": {"PIERHEAD_SHARED_MEMORY": of_the_stack}}
    whole = config(ranker=service(x_serve, **definition), controller=controller)
    return whole | {"volumes": {"memory-sockets": MEMORY_VOLUME}}


@pytest.mark.parametrize(
    ("of_the_stack", "x_serve", "size", "threshold"),
    [
        ("", {"shared_memory": {"size": "2GiB"}}, 2 * 1024**3, 100 * 1024),
        ("", {"shared_memory": {"threshold": "1m"}}, 1024**3, 1024**2),
        ("512MiB", {}, 512 * 1024**2, 100 * 1024),
        ("512MiB", {"shared_memory": {"size": "1g"}}, 1024**3, 100 * 1024),
        ("512MiB", {"shared_memory": {"size": 0}}, 0, None),
        ("512MiB", FOREIGN, None, None),
        ("0", {}, 0, None),
    ],
)
def test_shared_memory_is_three_variables_and_the_directory_of_sockets(
    of_the_stack: str, x_serve: Any, size: int | None, threshold: int | None
) -> None:
    created = parse(PROJECT, with_memory(of_the_stack, x_serve)).services["ranker"].container
    of_memory = "PIERHEAD_SHARED_MEMORY_"
    variables = dict(line.removeprefix(of_memory).split("=") for line in created["Env"] if line.startswith(of_memory))
    if not size:
        assert variables == ({} if size is None else {"BYTES": "0"})
        assert "Mounts" not in created["HostConfig"]
        return
    assert variables == {"BYTES": str(size), "THRESHOLD": str(threshold), "DIR": "/run/pierhead/memory"}
    (mount,) = created["HostConfig"]["Mounts"]
    assert (mount["Type"], mount["Source"], mount["Target"]) == ("volume", "shop_memory-sockets", variables["DIR"])
    assert mount["VolumeOptions"] == {
        "NoCopy": True,
        "Labels": {"com.docker.compose.project": "shop", "com.docker.compose.volume": "memory-sockets"},
        "DriverConfig": {"Name": "local", "Options": MEMORY_VOLUME["driver_opts"]},
    }


def test_shared_memory_must_fit_into_the_container() -> None:
    told = (
        "services.ranker.x-serve.shared_memory.size: expected less than the container's memory limit (1 GiB), found "
        "1 GiB: the memory that a replica shares counts in its container's, and the kernel would kill it; raise "
        "mem_limit (deploy.resources.limits.memory), or write a smaller size (0 = no shared memory)"
    )
    assert problems_of(with_memory("1g", {}, mem_limit="1g")) == [told]
    assert problems_of(with_memory("", {"shared_memory": {}}, mem_limit="1g")) == [told]
    assert not problems_of(with_memory("1023m", {}, mem_limit="1g"))


def test_the_stacks_shared_memory_is_a_size() -> None:
    (problem,) = problems_of(with_memory("much", {}))
    assert problem == (
        'services.controller.environment.PIERHEAD_SHARED_MEMORY: expected a size from "1MiB" to "1TiB" such as "2GiB", '
        'or 0 (it is set in .env), found "much"'
    )


def test_a_stack_without_the_volume_of_shared_memory_as_on_a_swarm_has_it_made_with_the_first_replica() -> None:
    whole = with_memory("1g", {}) | {"volumes": {}}
    (mount,) = parse(PROJECT, whole).services["ranker"].container["HostConfig"]["Mounts"]
    assert mount["VolumeOptions"]["DriverConfig"]["Options"] == OPTIONS


def test_it_is_made_with_the_options_that_the_stack_has() -> None:
    stack = yaml.safe_load((Path(__file__).parents[3] / "compose" / "compose.yaml").read_text())
    assert stack["volumes"]["memory-sockets"] == {"driver_opts": OPTIONS}


def test_labels_are_ours_and_those_of_a_compose_one_off() -> None:
    spec = ranker({}, labels={"team": "search"})
    assert body(spec, Gpu("GPU-1"), Gpu("GPU-2"))["Labels"] == {
        "team": "search",
        "pierhead.project": "shop",
        "pierhead.service": "ranker",
        "pierhead.version": "abcd1234",
        "pierhead.number": "2",
        "pierhead.replica": "shop-ranker-abcd1234-2",
        "pierhead.port": "50051",
        "pierhead.listen": "tcp",
        "pierhead.probe": "9100/readyz",
        "pierhead.graceful_shutdown_timeout_s": f"{spec.graceful_shutdown_timeout_s:.10g}",
        "pierhead.stop_grace_period_s": f"{spec.stop_grace_period_s:.10g}",
        "pierhead.gpus": "GPU-1,GPU-2",
        "pierhead.node": "gpu-7",
        "com.docker.compose.project": "shop",
        "com.docker.compose.service": "ranker",
        "com.docker.compose.version": "2",
        "com.docker.compose.config-hash": spec.definition_hash,
        "com.docker.compose.container-number": "2",
        "com.docker.compose.oneoff": "True",
    }


def test_gpus_are_pinned_by_uuid_through_their_driver() -> None:
    spec = ranker({}, gpus=[{"count": 2, "capabilities": ["gpu", "video"]}])
    assert body(spec, Gpu("GPU-1"), Gpu("GPU-2"), cdi_kind="test/gpu")["HostConfig"]["DeviceRequests"] == [
        {"Driver": "cdi", "DeviceIDs": ["test/gpu=GPU-1", "test/gpu=GPU-2"]}
    ]
    assert body(spec, Gpu("GPU-1", driver="nvidia"))["HostConfig"]["DeviceRequests"] == [
        {"Driver": "nvidia", "DeviceIDs": ["GPU-1"], "Capabilities": [["gpu", "video"]]}
    ]
    assert "DeviceRequests" not in body(spec)["HostConfig"]


GIB = 1024**3


@pytest.mark.parametrize(
    ("asked", "gpu", "label", "told"),
    [
        (
            {"memory": "16GiB"},
            Gpu("GPU-1", memory_bytes=80 * GIB),
            "GPU-1=memory:17179869184",
            ["PIERHEAD_GPU_FRACTION=0.2", "PIERHEAD_GPU_MEMORY_BYTES=17179869184"],
        ),
        (
            {"fraction": 0.29},
            Gpu("GPU-1", memory_bytes=100 * GIB),
            "GPU-1=fraction:0.29",
            ["PIERHEAD_GPU_FRACTION=0.29", f"PIERHEAD_GPU_MEMORY_BYTES={29 * GIB}"],
        ),
        ({"fraction": 0.5}, Gpu("GPU-1"), "GPU-1=fraction:0.5", ["PIERHEAD_GPU_FRACTION=0.5"]),
        ({"count": 1}, Gpu("GPU-1", memory_bytes=80 * GIB), "GPU-1", []),
    ],
)
def test_a_replica_of_any_image_gets_its_slot(asked: dict[str, Any], gpu: Gpu, label: str, told: list[str]) -> None:
    made = body(ranker({**FOREIGN, "gpu": asked}), gpu)
    assert made["Labels"]["pierhead.gpus"] == label
    assert made.get("Env", []) == told
    assert set(told) <= set(body(ranker({"gpu": asked}), gpu)["Env"])
    assert made["HostConfig"]["DeviceRequests"][0]["DeviceIDs"] == [f"nvidia.com/gpu={gpu.uuid}"]


@given(st.one_of(st.integers(1, 2**60).map(GpuSlot), st.integers(1, 10_000).map(lambda n: GpuSlot(None, n / 10_000))))
def test_a_label_of_a_slot_is_read_back(slot: GpuSlot) -> None:
    assert GpuSlot.read(str(slot)) == slot
