"""The create body of a replica -> the spec of a Swarm service; what such a service does not have is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from controller.engines.labels import create_body
from controller.files.parse import parse
from controller.files.problems import Problems, ServiceSource
from controller.files.translate import PLAIN, STRUCTURED
from controller.model.actions import replica_name
from controller.model.spec import GpuRequest
from controller.swarm.engine.service_spec import service_spec
from controller.swarm.files.checks import NOT_ON_SWARM, check_swarm
from controller.swarm.files.dialect import DIALECTS
from controller.swarm.files.places import in_swarm
from controller.swarm.up.volumes import _job
from tests.harness.not_carried import not_carried
from tests.unit.controller.compose_configs import config, problems, problems_of, ranker, read, service

FOREIGN = {"protocol": "http", "health": {"probe": {"path": "/"}}}
STACK = {"image": "c", "environment": {"PIERHEAD_ENGINE": "swarm"}}
SECTIONS = {"volumes": {"cache": {}}, "secrets": {"token": {"file": "/s/token"}}, "configs": {"c": {"file": "/s/c"}}}


def body(**definition: Any) -> Any:
    return ranker(FOREIGN, **definition).container


def task(**definition: Any) -> Any:
    """The task template of a service with this definition."""
    return service_spec("shop-ranker-1a2b3c4d-1", body(**definition), 0)["TaskTemplate"]


# Lines of a compose file, what the service's container has for them.
OF_THE_CONTAINER: dict[str, dict[str, Any]] = {
    "{command: [a, b c], entrypoint: [/e]}": {"Args": ["a", "b c"], "Command": ["/e"]},
    "{working_dir: /w, user: '1000:1000', group_add: ['5']}": {"Dir": "/w", "User": "1000:1000", "Groups": ["5"]},
    "{tty: true, stdin_open: true, init: true, read_only: true}": {
        "TTY": True,
        "OpenStdin": True,
        "Init": True,
        "ReadOnly": True,
    },
    "{stop_signal: SIGINT, stop_grace_period: 90s}": {"StopSignal": "SIGINT", "StopGracePeriod": 90_000_000_000},
    "environment: {B: '{{.x}}', A: '{\"a\":{\"b\":1}}'}": {"Env": ['A={"a":{"b":1}}', 'B={{"{{"}}.x}}']},
    "healthcheck: {test: [CMD, x], interval: 1m30s}": {"Healthcheck": {"Test": ["NONE"]}},
    "labels: {a: '1'}": {"Labels": {"a": "1"}},
    "shm_size: '1073741824'": {
        "Mounts": [{"Type": "tmpfs", "Target": "/dev/shm", "TmpfsOptions": {"SizeBytes": 1073741824, "Mode": 0o1777}}]
    },
    "tmpfs: ['/run', '/t:rw,size=64m,mode=700']": {
        "Mounts": [
            {"Type": "tmpfs", "Target": "/run"},
            {"Type": "tmpfs", "Target": "/t", "TmpfsOptions": {"SizeBytes": 67108864, "Mode": 0o700}},
        ]
    },
    "volumes: [{type: bind, source: /d, target: /d, read_only: true, bind: {create_host_path: true}}]": {
        "Mounts": [{"Type": "bind", "Source": "/d", "Target": "/d", "ReadOnly": True, "BindOptions": {}}]
    },
    "{cap_add: [NET_ADMIN], cap_drop: [ALL]}": {"CapabilityAdd": ["NET_ADMIN"], "CapabilityDrop": ["ALL"]},
    "sysctls: {net.core.somaxconn: '1024'}": {"Sysctls": {"net.core.somaxconn": "1024"}},
    "extra_hosts: [h=1.2.3.4, 'v6=::1']": {"Hosts": ["1.2.3.4 h", "::1 v6"]},
    "{dns: [1.1.1.1], dns_search: [a.b], dns_opt: ['ndots:1']}": {
        "DNSConfig": {"Nameservers": ["1.1.1.1"], "Options": ["ndots:1"], "Search": ["a.b"]}
    },
    "ulimits: {nofile: {soft: 10, hard: 20}}": {"Ulimits": [{"Name": "nofile", "Soft": 10, "Hard": 20}]},
    "security_opt: ['no-new-privileges:true', seccomp=unconfined, 'apparmor:unconfined', 'label=type:t']": {
        "Privileges": {
            "NoNewPrivileges": True,
            "Seccomp": {"Mode": "unconfined"},
            "AppArmor": {"Mode": "disabled"},
            "SELinuxContext": {"Type": "t"},
        }
    },
}


@pytest.mark.parametrize("definition", OF_THE_CONTAINER)
def test_what_a_container_gets(definition: str) -> None:
    made = task(**yaml.safe_load(definition))["ContainerSpec"]
    expected = OF_THE_CONTAINER[definition]
    assert {key: made[key] for key in expected} == expected


def test_a_named_volume_is_of_the_stack_and_not_of_a_compose_project_of_its_name() -> None:
    """`down VOLUMES=1` of the one leaves those of the other."""
    files = config(ranker=service(FOREIGN, volumes=[{"type": "volume", "source": "cache", "target": "/c"}]))
    files["volumes"] = {"cache": {"name": "shop_cache", "labels": {"a": "1"}}}
    made = parse("shop", files, DIALECTS).services["ranker"].container
    [mount] = service_spec("shop-ranker-1a2b3c4d-1", made, 0)["TaskTemplate"]["ContainerSpec"]["Mounts"]
    assert (mount["Source"], mount["VolumeOptions"]["Labels"]) == (
        "shop_cache",
        {"a": "1", "com.docker.stack.namespace": "shop"},
    )
    command = _job("shop", "shop_job", "haproxy")["TaskTemplate"]["ContainerSpec"]["Command"]
    assert command[3:] == ["com.docker.stack.namespace=shop"]


def test_what_a_task_gets() -> None:
    resources = {"limits": {"cpus": 1.5, "memory": "536870912", "pids": 100}, "reservations": {"memory": "1048576"}}
    made = task(deploy={"resources": resources}, logging={"driver": "json-file", "options": {"max-size": "1m"}})
    assert made["Resources"] == {
        "Limits": {"NanoCPUs": 1_500_000_000, "MemoryBytes": 536870912, "Pids": 100},
        "Reservations": {"MemoryBytes": 1048576},
    }
    assert made["LogDriver"] == {"Name": "json-file", "Options": {"max-size": "1m"}}
    assert task(logging={"options": {"max-size": "1m"}})["LogDriver"] == {"Name": "", "Options": {"max-size": "1m"}}
    assert made["RestartPolicy"] == {"Condition": "any", "Delay": 2_000_000_000}
    assert made["Networks"] == [{"Target": "shop_default", "Aliases": ["ranker"]}]


# Of `deploy`, what has no effect: the controller decides about restarts.
RESTART_POLICY = "restart_policy: {condition: none}"


@pytest.mark.parametrize(
    "written",
    [
        *("endpoint_mode: vip", "labels: {a: '1'}", "labels: {pierhead.x: '1'}", "mode: global", RESTART_POLICY),
        *("placement: {constraints: [node.role==worker]}", "placement: {preferences: [{spread: node.labels.a}]}"),
        *("rollback_config: {order: stop-first}", "update_config: {parallelism: 2}"),
        *(f"resources: {{limits: {{{limit}}}}}" for limit in ("cpus: '0.5'", "memory: '1048576'", "pids: 9")),
        *(f"resources: {{reservations: {{{key}}}}}" for key in ("cpus: 0.5", "memory: '1048576'", "pids: 9")),
        "resources: {reservations: {generic_resources: [{discrete_resource_spec: {kind: a, value: 1}}]}}",
        "resources: {reservations: {devices: [{capabilities: [gpu, video], count: 1}]}}",
    ],
)
def test_every_key_of_deploy_changes_the_service_or_is_refused_by_name(written: str) -> None:
    deploy = yaml.safe_load(written)
    whole = config(controller=STACK, ranker=service(FOREIGN, deploy=deploy))
    (key,) = deploy
    refused = [line for line in problems_of(whole) if line.startswith(f"services.ranker.deploy.{key}")]
    if not refused:
        assert not not_carried(read_whole(whole))
        with_key = read_spec(whole)
        del whole["services"]["ranker"]["deploy"]
        assert (read_spec(whole) == with_key) == (written == RESTART_POLICY)


def test_cpus_are_reserved_where_swarm_places_a_replica_and_nothing_has_changed_on_one_machine() -> None:
    definition = service(FOREIGN, deploy={"resources": {"reservations": {"cpus": "0.5"}}, "labels": {"a": "1"}})
    whole = config(controller=STACK, ranker=definition)
    made = read_spec(whole)
    assert made["TaskTemplate"]["Resources"] == {"Limits": {}, "Reservations": {"NanoCPUs": 500_000_000}}
    assert made["Labels"] == {"a": "1"}
    assert "a" not in made["TaskTemplate"]["ContainerSpec"]["Labels"]
    whole["services"]["controller"] = STACK | {"environment": {}}
    assert read_whole(whole) == ranker(FOREIGN).container


def test_a_replica_is_a_service_that_is_not_started_and_swarm_says_where_it_is() -> None:
    """Labels are those of one machine: what reads them need not know the engine."""
    spec = ranker()
    name = replica_name("shop", "ranker", "1a2b3c4d", 1)
    made = create_body(spec, name, "1a2b3c4d", 1, (), "shop")
    whole = service_spec(name, made, 2, "registry/shop/ranker@sha256:0")
    assert (whole["Name"], whole["Mode"]) == (name, {"Replicated": {"Replicas": 0}})
    container = whole["TaskTemplate"]["ContainerSpec"]
    assert whole["Labels"] == container["Labels"] == made["Labels"]
    assert container["Image"] == "registry/shop/ranker@sha256:0"
    assert "PIERHEAD_NODE={{.Node.Hostname}}" in container["Env"]
    assert [entry for entry in container["Env"] if "{{" in entry] == ["PIERHEAD_NODE={{.Node.Hostname}}"]
    gpus = whole["TaskTemplate"]["Resources"]["Reservations"]["GenericResources"]
    assert gpus == [{"DiscreteResourceSpec": {"Kind": "NVIDIA-GPU", "Value": 2}}]


# A value for each key; where none is written, "x" is one.
VALUES: dict[str, Any] = yaml.safe_load("""{
annotations: {x: y}, storage_opt: {x: y}, sysctls: {x: y}, labels: {x: y}, environment: {x: y},
cap_add: [x], cap_drop: [x], device_cgroup_rules: [x], dns: [x], dns_opt: [x], dns_search: [x], group_add: [x],
cpu_period: 10, cpu_quota: 10, cpu_shares: 10, mem_swappiness: 10, oom_score_adj: 10, pids_limit: 10, cpus: 1,
mem_limit: '1048576', mem_reservation: '1048576', memswap_limit: '1048576', shm_size: '1048576',
init: true, oom_kill_disable: true, privileged: true, read_only: true, stdin_open: true, tty: true,
command: [x], entrypoint: [x], devices: [/dev/kvm], ipc: host, pid: host, logging: {driver: local},
deploy: {resources: {limits: {memory: '1048576'}}}, extra_hosts: [h=1.2.3.4], healthcheck: {test: 'true'},
networks: {default: {aliases: [x]}}, security_opt: [seccomp=unconfined], tmpfs: ['/t:size=1m'], ulimits: {nproc: 1},
secrets: [token], configs: [c], volumes: [{type: volume, source: cache, target: /c}]
}""")


@pytest.mark.parametrize("key", sorted({*PLAIN, *STRUCTURED}))
def test_every_key_changes_the_service_or_is_refused_by_name(key: str) -> None:
    whole = config(ranker=service(FOREIGN, **{key: VALUES.get(key, "x")})) | SECTIONS
    plain = not_carried(read_whole(whole))
    whole["services"]["controller"] = STACK
    refused = [
        line for line in problems_of(whole) if line.startswith(f"services.ranker.{key}: not possible on a Swarm")
    ]
    with_key = None if refused else read_spec(whole)
    assert bool(plain) == bool(refused) == (key in NOT_ON_SWARM), (plain, refused)
    if not refused and key != "healthcheck":
        del whole["services"]["ranker"][key]
        assert read_spec(whole) != with_key


def read_spec(whole: Any) -> Any:
    """The Swarm service of the compose file's service."""
    ids = {("Secrets", "token"): "1", ("Configs", "c"): "2"}
    return service_spec("r", read_whole(whole), 0, ids=ids)


def read_whole(whole: Any) -> Any:
    return parse("shop", whole, DIALECTS).services["ranker"].container


# A value that a Swarm does not have, of a key that it has.
OTHER_VALUES = {
    "entrypoint: []": "entrypoint",
    "extra_hosts: [h=host-gateway]": "extra_hosts",
    "security_opt: [systempaths=unconfined]": "security_opt",
    "tmpfs: ['/t:exec']": "tmpfs",
    "volumes: [{type: bind, source: /d, target: /d, bind: {selinux: z}}]": "volumes[0].bind.selinux",
    "volumes: [{type: volume, source: cache, target: /c, volume: {subpath: a}}]": "volumes[0].volume.subpath",
}


@pytest.mark.parametrize("definition", OTHER_VALUES)
def test_values_that_a_swarm_does_not_have(definition: str) -> None:
    whole = config(ranker=service(FOREIGN, **yaml.safe_load(definition))) | SECTIONS
    assert not_carried(read_whole(whole))
    whole["services"]["controller"] = STACK
    (line,) = problems_of(whole)
    assert line.startswith(f"services.ranker.{OTHER_VALUES[definition]}: not possible on a Swarm: ")


def test_where_swarm_may_place_a_replica() -> None:
    placement = {"constraints": ["node.labels.zone == a"], "preferences": [{"spread": "node.labels.rack"}]}
    made = read(controller=STACK, ranker=service(FOREIGN, deploy={"placement": placement})).services["ranker"].container
    assert service_spec("r", made, 0)["TaskTemplate"]["Placement"] == {
        "Constraints": ["node.labels.zone == a"],
        "Preferences": [{"Spread": {"SpreadDescriptor": "node.labels.rack"}}],
    }
    gpus = {"placement": placement, "resources": {"reservations": {"devices": [{"capabilities": ["gpu"], "count": 2}]}}}
    whole = read(controller=STACK, ranker=service(FOREIGN, deploy=gpus))
    assert whole.services["ranker"].gpu == GpuRequest(2, constraints=("node.labels.zone == a",))
    assert problems(FOREIGN, deploy={"placement": placement}) == [
        "services.ranker.deploy.placement: is for Swarm, Compose and Pierhead do not use it; remove it"
    ]


REFUSED: dict[str, str] = {
    "{x-serve: {gpu: {fraction: 0.5}}}": "a Swarm gives out whole GPUs only",
    "{deploy: {resources: {reservations: {devices: [{capabilities: [gpu], device_ids: [GPU-1]}]}}}}": (
        "write count in place of device_ids"
    ),
    "{deploy: {placement: {max_replicas_per_node: 1}}}": "write x-serve.max_replicas_per_node",
    "{deploy: {placement: {preferences: [{spread: node.id}]}}}": (
        'preferences[0].spread: expected a label of nodes such as node.labels.zone, found "node.id"'
    ),
    "{x-serve: {autoscale: {max: 2, policy: 'night:wanted'}}}": (
        "x-serve.autoscale.policy: not possible on a Swarm: a function is a file of the project"
    ),
    "{networks: {local: null, default: null}}": 'networks.local.driver: "bridge" ends at its node',
    "{secrets: [word]}": "a secret from a file, or one that is in Swarm; write secrets.word.file, or create it "
    "(`docker secret create`) and write secrets.word.external: true",
}


def test_the_name_of_a_gpu_is_refused_as_no_node_tells_it() -> None:
    check_swarm(ServiceSource("shop", "ranker", {}), None, GpuRequest(1, kind="H100"), found := Problems())
    assert [line.partition(": ")[0] for line in found.lines] == ["services.ranker.x-serve.llm.accelerator_type"]


@pytest.mark.parametrize("definition", REFUSED)
def test_what_a_swarm_cannot_have_says_what_to_do(definition: str) -> None:
    written = yaml.safe_load(definition)
    x_serve = FOREIGN | written.pop("x-serve", {})
    whole = config(controller=STACK, ranker=service(x_serve, **written))
    whole["networks"] |= {"local": {"driver": "bridge"}, "wide": {"driver": "overlay"}}
    whole["secrets"] = {"word": {"environment": "HOME"}}
    (line,) = problems_of(whole)
    assert REFUSED[definition] in line


def test_files_of_the_project_are_in_swarm_under_the_name_of_their_content() -> None:
    whole = config(
        controller=STACK,
        ranker=service(
            FOREIGN,
            secrets=[{"source": "token", "target": "t", "uid": "103", "mode": "256"}, "own"],
            configs=["settings"],
        ),
    )
    whole["secrets"] = {"token": {"name": "shop_token", "file": "/s/token"}, "own": {"name": "own", "external": True}}
    whole["configs"] = {"settings": {"name": "shop_settings" + 60 * "s", "file": "/s/settings"}}
    named, wanted = in_swarm(whole, {("secrets", "token"): b"1", ("configs", "settings"): b""})
    assert all(one["external"] for kind in ("secrets", "configs") for one in named[kind].values())
    assert {kind: len(name) for kind, name in wanted} == {"secrets": 23, "configs": 64}
    (secret,) = (name for kind, name in wanted if kind == "secrets")
    assert secret == "shop_token-6b86b273ff34"
    assert wanted["secrets", secret] == b"1"

    made = parse("shop", named, DIALECTS).services["ranker"]
    assert not not_carried(made.container)
    ids = {("Secrets", secret): "i1", ("Secrets", "own"): "i2"} | {
        ("Configs", name): "i3" for kind, name in wanted if kind == "configs"
    }
    container = service_spec("r", made.container, 0, ids=ids)["TaskTemplate"]["ContainerSpec"]
    assert container["Secrets"] == [
        {
            "SecretID": "i1",
            "SecretName": secret,
            "File": {"Name": "/run/secrets/t", "UID": "103", "GID": "0", "Mode": 0o400},
        },
        {
            "SecretID": "i2",
            "SecretName": "own",
            "File": {"Name": "/run/secrets/own", "UID": "0", "GID": "0", "Mode": 0o444},
        },
    ]
    assert [(one["ConfigID"], one["File"]["Name"]) for one in container["Configs"]] == [("i3", "/settings")]
    changed = parse("shop", in_swarm(whole, {("secrets", "token"): b"2", ("configs", "settings"): b""})[0], DIALECTS)
    assert changed.services["ranker"].definition_hash != made.definition_hash
