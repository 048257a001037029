"""Properties of reading the spec: garbage never breaks it, the order of keys never matters, the hash is stable."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from pierhead.serve_block import ServeBlock, keys_of

from controller.errors import SpecError
from controller.files.parse import parse
from controller.files.translate import FORBIDDEN, IGNORED, PLAIN, STRUCTURED
from controller.model.spec import Spec
from tests.unit.controller.compose_configs import PROJECT, config, ranker, read, service

ROOT = Path(__file__).parents[3]

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["/", "/a", "http", "grpc", "nvidia", "all", "10s", "1g", "a.B", "default", 10**40, "9" * 5000])
)
MOUNT_KEYS = ("path", "port", "type", "source", "target", "bind", "soft")
DEPLOY_KEYS = ("devices", "limits", "count", "resources", "reservations")
KEYS = st.text(max_size=8) | st.sampled_from([*MOUNT_KEYS, *DEPLOY_KEYS])
GARBAGE = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.integers(), inner, max_size=4)
)
SECTIONS = ("services", "networks", "volumes", "secrets", "configs")
COMPOSE_KEYS = sorted({*PLAIN, *STRUCTURED, *IGNORED, *FORBIDDEN, "x-serve", "zork"})


def reading_ends_well(whole: Any) -> None:
    try:
        spec = parse(PROJECT, whole)
    except SpecError as error:
        problems = error.problems
    else:
        assert isinstance(spec, Spec)
        json.dumps([dict(each.container) for each in spec.services.values()], allow_nan=False)
        return
    assert problems
    for problem in problems:
        path, separator, sentence = problem.partition(": ")
        assert re.split(r"[.\[]", path)[0] in (*SECTIONS, "compose file")
        assert separator
        assert sentence
        assert "\n" not in problem


@given(GARBAGE | st.dictionaries(st.sampled_from([key.name for key in keys_of(ServeBlock)]), GARBAGE, max_size=5))
@settings(max_examples=300, deadline=None)
def test_any_garbage_in_a_block_is_a_spec_or_a_spec_error(garbage: Any) -> None:
    whole = config(ranker=service())
    whole["services"]["ranker"]["x-serve"] = garbage
    reading_ends_well(whole)


@given(st.dictionaries(st.sampled_from(COMPOSE_KEYS), GARBAGE, max_size=6))
@settings(max_examples=400, deadline=None)
def test_any_garbage_around_a_block_is_a_spec_or_a_spec_error(garbage: dict[str, Any]) -> None:
    reading_ends_well(config(ranker={**service(), **garbage}))


def of(*keys: str) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping with some of these keys, and garbage for values."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(keys, GARBAGE))


@given(
    volumes=st.lists(of("type", "source", "target", "bind", "volume", "tmpfs", "read_only", "consistency"), max_size=3),
    kind=st.sampled_from(["bind", "volume", "tmpfs"]),
    networks=st.dictionaries(st.sampled_from(["default", "back"]), of("aliases", "driver_opts", "priority")),
    gpus=st.lists(of("driver", "count", "device_ids", "capabilities", "options"), max_size=2),
    logging=of("driver", "options"),
    healthcheck=of("test", "interval", "retries", "disable"),
    garbage=GARBAGE,
)
@settings(max_examples=300, deadline=None)
def test_garbage_inside_what_has_the_right_shape(
    volumes: list[dict[str, Any]], kind: str, networks: dict[str, Any], gpus: list[Any], garbage: Any, **others: Any
) -> None:
    mounted = [{"type": kind, "target": "/a", **volume} for volume in volumes]
    whole = config(ranker=service(volumes=mounted, networks=networks, gpus=gpus, ulimits={"x": garbage}, **others))
    whole["volumes"] = {"x": garbage, "": garbage}
    whole["networks"]["back"] = garbage
    reading_ends_well(whole)


@given(st.dictionaries(st.sampled_from([*SECTIONS, "name"]), GARBAGE))
@settings(max_examples=100, deadline=None)
def test_any_garbage_for_a_project_is_a_spec_or_a_spec_error(garbage: dict[str, Any]) -> None:
    reading_ends_well(garbage)


RICH: dict[str, Any] = {
    "command": ["serve", "--model", "x"],
    "environment": {"B": "2", "A": "1", "C": None},
    "labels": {"z": "1", "y": "2"},
    "sysctls": {"net.core.somaxconn": "1024", "kernel.shmmax": "1"},
    "ulimits": {"nproc": 10, "nofile": {"soft": 1, "hard": 2}},
    "networks": {"default": {"aliases": ["q"]}, "back": {"priority": 1, "driver_opts": {"b": "1", "a": "2"}}},
    "volumes": [
        {"type": "bind", "source": "/a", "target": "/b", "bind": {"create_host_path": True}, "read_only": True}
    ],
    "logging": {"driver": "json-file", "options": {"max-size": "1m", "max-file": "2"}},
    "deploy": {
        "resources": {
            "limits": {"cpus": 1.5, "memory": "1073741824"},
            "reservations": {"devices": [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]},
        }
    },
    "x-serve": {"replicas": 2, "route": "/a", "health": {"period_s": 2, "failures": 4}},
}


def shuffled(value: Any, draw: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(value[key], draw) for key in draw(st.permutations(sorted(value)))}
    return [shuffled(item, draw) for item in value] if isinstance(value, list) else value


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_the_order_of_keys_never_matters(data: st.DataObject) -> None:
    whole = config(ranker={**service(), **RICH}, other=service())
    whole["networks"]["back"] = {"name": "shop_back"}
    assert parse(PROJECT, shuffled(whole, data.draw)) == parse(PROJECT, whole)


def test_the_hash_is_the_same_in_another_process_with_another_seed() -> None:
    whole = config(ranker={**service(), **RICH})
    whole["networks"]["back"] = {"name": "shop_back"}
    program = (
        "import json,sys\nfrom controller.files.parse import parse\n"
        "print(parse('shop', json.load(sys.stdin)).services['ranker'].definition_hash, end='')"
    )
    for seed in ("1", "2"):
        found = subprocess.check_output(
            [sys.executable, "-c", program],
            input=json.dumps(whole),
            text=True,
            timeout=60,
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
        )
        assert found == parse(PROJECT, whole).services["ranker"].definition_hash


def test_which_changes_need_a_new_container() -> None:
    base = ranker({"port": 7000}).definition_hash
    same: dict[str, Any] = {
        "replicas": 5,
        "max_replicas_per_node": 3,
        "grpc_services": ["a.B"],
        "application": "eu",
        "router": {"policy": "round_robin", "replica_header": True},
        "startup": {"deadline_s": 5},
        "health": {"period_s": 5, "timeout_s": 1, "failures": 9},
        "metrics": {"port": 5},
        "max_queued_requests": 5,
        "graceful_shutdown_wait_loop_s": 5,
    }
    ignored = {"depends_on": {"x": {}}, "profiles": ["p"], "build": {"context": "/"}, "restart": "always"}
    assert ranker({"port": 7000, **same}, **ignored).definition_hash == base
    routed = {"port": 7000, "protocol": "http", "route": "/a", "strip_prefix": True}
    assert ranker(routed).definition_hash == base
    other: list[dict[str, Any]] = [
        {"port": 7001},
        {"managed": False, "health": {"probe": {"path": "/", "port": 1}}},
        {"max_ongoing_requests": 5},
        {"backpressure": {"status_code": 429}},
        {"backpressure": {"retry_after_s": 5}},
        {"debug": True},
        {"logging": {"log_level": "debug"}},
        {"logging": {"encoding": "text"}},
        {"logging": {"access_log": "off"}},
        {"run_user_code_in_separate_thread": True},
        {"request_timeout_s": 5},
        {"graceful_shutdown_timeout_s": 70},
    ]
    definitions: list[dict[str, Any]] = [
        {"image": "other"},
        {"command": ["x"]},
        {"environment": {"A": "1"}},
        {"stop_grace_period": "90s"},
        {"gpus": [{"count": 1}]},
        {"gpus": [{"count": 2}]},
    ]
    hashes = {ranker({"port": 7000, **x_serve}).definition_hash for x_serve in other}
    hashes |= {ranker({"port": 7000}, **definition).definition_hash for definition in definitions}
    assert len(hashes | {base}) == len(other) + len(definitions) + 1


def test_limits_of_a_foreign_image_need_no_new_container() -> None:
    image = {"protocol": "http", "health": {"probe": {"path": "/"}}}
    changed = {**image, "max_ongoing_requests": 7, "request_timeout_s": 7, "max_queued_requests": 7}
    assert ranker(image).definition_hash == ranker(changed).definition_hash


def test_another_service_does_not_change_the_hash() -> None:
    alone = read(ranker=service()).services["ranker"]
    assert read(ranker=service(), other=service({"route": "/a"})).services["ranker"] == alone
