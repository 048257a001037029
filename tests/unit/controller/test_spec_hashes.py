"""The hash of a definition is part of a version: another hash for the same block would restart every replica."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest
from pierhead.serve_block import Between, Key, ServeBlock, Syntax, all_keys, is_block

from controller.files.parse import parse
from controller.model.spec import ServiceSpec
from controller.swarm.files.dialect import DIALECTS
from tests.unit.controller.compose_configs import PROJECT, config, ranker, service

SCALED = {"autoscale": {"min": 0, "max": 4, "initial": 2}, "rollout": {"max_surge": 2}, "canary": {"weight": 5}}
LLM = {"engine": "mock", "model_loading": {"model_id": "tiny"}, "engine_kwargs": {"max_model_len": 64}}


@pytest.mark.parametrize(
    ("block", "known"),
    [
        ({}, "fa09cd40b728f6a6763ef23a38552e0ef94fa9e2db9e1680e54f4d96aaaac612"),
        (SCALED, "fa09cd40b728f6a6763ef23a38552e0ef94fa9e2db9e1680e54f4d96aaaac612"),
        ({"shared_memory": {"size": 0}}, "fa09cd40b728f6a6763ef23a38552e0ef94fa9e2db9e1680e54f4d96aaaac612"),
        (
            {"route": "/shop", "strip_prefix": True, "port": 8081},
            "c5a259e8937948a2cc118252ad34a47ee8cd9adcd1addd99f09d84fd2678d5a1",
        ),
        (
            {
                "max_ongoing_requests": 7,
                "request_timeout_s": 2.5,
                "body_timeout_s": 5,
                "max_queued_requests": 3,
                "graceful_shutdown_timeout_s": 20,
            },
            "3c3781e22490a2668e707264da44a36552ad2d0b208cca2b1d91295a35a9ef83",
        ),
        (
            {"backpressure": {"status_code": 429, "retry_after_s": 0.5}, "debug": True},
            "c2d5aef20b912003260c9faf9cfcd6c807ddd75c01efed7749929a75580d9bac",
        ),
        (
            {"run_user_code_in_separate_thread": True, "user_config": {"b": [1, 2.5, None], "a": "x"}},
            "11b4fc8bb8a9e9be6fff5f8381faa6c6a2bc8d570bffe892259163f3b9e926f8",
        ),
        (
            {"logging": {"log_level": "debug", "encoding": "text", "access_log": "all", "slow_request_s": 0.25}},
            "bebb2abfa86aa1cfb1bfbce8117a2abeda990806c068e29fbd676ba45776fbe7",
        ),
        (
            {"shared_memory": {"size": "2GiB", "threshold": "4KiB"}},
            "32015979e393b60adf410cd4fdb353f871f13d7f09c8d92a4a89ef1f4e516a76",
        ),
        (
            {"health": {"probe": {"path": "/health", "port": 9000}}, "route": "/", "metrics": {"port": 9001}},
            "78f44d0873cfc9ac9deb5e260b9a2e9fa07ca222c3e2ee86f89fd41189469cd6",
        ),
        (
            {"gpu": {"fraction": 0.25, "placement": "spread"}},
            "f6c0c59936517addd7aed51bcfefe7c1247fac3a5e16b2aaa750d55c4d19a808",
        ),
        ({"llm": LLM}, "7e045d6b4a75fb9c688cc0ae82a0d6823b6ae0fa95a70fb06404ab4bf48eda41"),
    ],
)
def test_the_hash_of_a_block_stays(block: dict[str, Any], known: str) -> None:
    assert ranker(block).definition_hash == known


SAMPLES: dict[str, Any] = {
    "host": "shop.example",
    "application": "x",
    "group": "x",
    "grpc_name": "a.B",
    "route": "/b",
    "probe_path": "/b",
    "router_policy": "round_robin",
    "gpu_memory": "2GiB",
    "threshold": "8KiB",
    "shared_memory_size": "2GiB",
    "replicas": 2,
    "autoscale_policy": "a:b",
    "user_config": {"a": 1},
    "policy_kwargs": {"a": 1},
    "llm": LLM,
}
YIELDING = {"gpu": {"count": 1}, "autoscale": {"min": 0}}
AROUND: dict[str, dict[str, Any]] = {
    "autoscale": {"autoscale": {"min": 1, "max": 9}},
    "autoscale.policy_kwargs": {"autoscale": {"policy": "a:b"}},
    "gpu.placement": {"gpu": {"fraction": 0.5}},
    **{f"gpu.yields.{key}": YIELDING for key in ("idle_s", "min_stay_s", "group")},
    "strip_prefix": {"route": "/a"},
    "application": {"grpc_services": ["a.B"]},
    "router.replica_header": {"route": "/a"},
    "auth": {"route": "/a"},
    "allow": {"route": "/a"},
    "host": {"route": "/a"},
    "managed": {"health": {"probe": {"path": "/a"}}, "route": "/a"},
    "health.probe.path": {"route": "/a"},
    "graceful_shutdown_wait_loop_s": {"graceful_shutdown_timeout_s": 86_460},
    "logging.access_log": {"logging": {"access_log": "all"}},
    "health.probe.port": {"health": {"probe": {"path": "/a"}}, "route": "/a"},
    "route": {"route": "/a"},
}
"""What a key needs next to it."""


def sample(key: Key) -> Any:
    """A value of the key that is not its default."""
    if key.path == "allow":  # its syntax is that of an item
        return ["10.0.0.0/8"]
    syntax, bounds = key.get(Syntax), key.get(Between)
    if syntax:
        return SAMPLES[syntax.name]
    if bounds:
        return next(each for each in (bounds.most, bounds.least) if each != key.default)
    if get_origin(key.hint) is Literal:
        return next(each for each in get_args(key.hint) if each != key.default)
    return not key.default if key.hint is bool else {list: ["a.B"], dict: {"a": 1}}[get_origin(key.hint)]


def put(block: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the block with this value at a key's path."""
    name, _, rest = path.partition(".")
    return {**block, name: put(block.get(name) or {}, rest, value) if rest else value}


def with_sockets(block: dict[str, Any]) -> ServiceSpec:
    """The service in a stack whose replicas may listen at sockets."""
    whole = config(ranker=service(block)) | {"volumes": {"replica-sockets": {}}}
    return parse(PROJECT, whole, DIALECTS).services["ranker"]


KEYS = {key.path: key for key in all_keys(ServeBlock) if not is_block(key.hint)}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_key_that_needs_a_new_container_changes_the_hash_and_no_other_does(key: Key) -> None:
    around = AROUND.get(key.path, AROUND.get(key.path.partition(".")[0], {}))
    before, after = with_sockets(around), with_sockets(put(around, key.path, sample(key)))
    assert (before.definition_hash != after.definition_hash) is key.needs_new_container
