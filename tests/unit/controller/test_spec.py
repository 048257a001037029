"""Spec: defaults, what is derived from what, and the message of everything that can be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from controller.model.spec import (
    AutoscaleSpec,
    Backpressure,
    FunctionPolicy,
    GpuRequest,
    GpuSlot,
    ProbeSpec,
    PrometheusPolicy,
)
from tests.unit.controller.compose_configs import config, problems, problems_of, ranker, read, service

KNOWN = (
    "replicas, autoscale, rollout, canary, max_replicas_per_node, gpu, protocol, port, route, strip_prefix, "
    "grpc_services, max_ongoing_requests, max_queued_requests, router, backpressure, request_timeout_s, "
    "body_timeout_s, graceful_shutdown_wait_loop_s, graceful_shutdown_timeout_s, startup, "
    "run_user_code_in_separate_thread, debug, logging, user_config, llm, managed, health, metrics"
)
A_ROUTER = (
    "expected one of power_of_two, round_robin, least_ongoing, consistent_hash, prefix, engine_load, or an import path "
    'such as "my_package.routing:MyPolicy"'
)
KWARGS = "expected the policy's keyword arguments by name, such as {match_rate_threshold: 0.2}"
AN_IMAGE = {"health": {"probe": {"path": "/health", "port": 8000}}}


def nvidia(**device: Any) -> dict[str, Any]:
    whole = {"driver": "nvidia", "capabilities": ["gpu"], **device}
    return {"resources": {"reservations": {"devices": [whole]}}}


# ------------------------------------------------------------------------------------------- defaults and derivation


def test_a_block_without_keys_is_a_managed_grpc_service() -> None:
    spec = ranker({})
    assert (spec.protocol, spec.port, spec.replicas, spec.managed) == ("grpc", 50051, 1, True)
    assert spec.probe == ProbeSpec(port=9100, path="/readyz", period_s=1, timeout_s=2, failures=3)
    assert (spec.metrics_port, spec.metrics_path) == (9100, "/metrics")
    assert (spec.max_ongoing_requests, spec.max_queued_requests) == (100, -1)
    assert (spec.request_timeout_s, spec.graceful_shutdown_timeout_s, spec.stop_grace_period_s) == (60, 65, 75)
    assert spec.graceful_shutdown_wait_loop_s is None
    assert (spec.route, spec.grpc_services, spec.gpu, spec.has_build) == (None, (), None, False)


def test_a_route_makes_it_http() -> None:
    spec = ranker({"route": "/rank"})
    assert (spec.protocol, spec.port, spec.route) == ("http", 8080, "/rank")


def test_a_probe_path_makes_it_somebody_elses_image() -> None:
    spec = ranker({"protocol": "http", "port": 8000, "health": {"probe": {"path": "/v2/health/ready"}}})
    assert not spec.managed
    assert (spec.probe.port, spec.probe.path) == (8000, "/v2/health/ready")
    assert spec.metrics_port is None
    assert not any(variable.startswith("PIERHEAD_") for variable in spec.container["Env"])


def test_a_managed_image_may_be_asked_elsewhere() -> None:
    spec = ranker({"managed": True, "health": {"probe": {"path": "/mine"}}})
    assert spec.managed
    assert (spec.probe.port, spec.probe.path) == (9100, "/mine")


def test_what_a_process_is_to_do_reaches_it() -> None:
    written = {
        "route": "/a",
        "debug": True,
        "backpressure": {"status_code": 429, "retry_after_s": 2.5},
    }
    spec = ranker(written)
    assert spec.backpressure == Backpressure(429, 2.5)
    assert {
        "PIERHEAD_DEBUG=true",
        "PIERHEAD_BACKPRESSURE_STATUS_CODE=429",
        "PIERHEAD_BACKPRESSURE_RETRY_AFTER_S=2.5",
    } <= set(spec.container["Env"])
    threaded = ranker({"run_user_code_in_separate_thread": True})
    assert "PIERHEAD_RUN_USER_CODE_IN_SEPARATE_THREAD=true" in threaded.container["Env"]


def test_what_a_replica_is_to_log_reaches_it() -> None:
    driver = {"driver": "json-file", "options": {"max-size": "1m"}}
    written = {"log_level": "debug", "encoding": "text", "enable_access_log": False}
    spec = ranker({"logging": written}, logging=driver)
    assert {"PIERHEAD_LOG_LEVEL=debug", "PIERHEAD_LOG_ENCODING=text", "PIERHEAD_ACCESS_LOG=false"} <= set(
        spec.container["Env"]
    )
    assert spec.container["HostConfig"]["LogConfig"] == {"Type": "json-file", "Config": {"max-size": "1m"}}


def test_what_a_policy_is_made_with_reaches_callers_as_json_and_needs_no_new_container() -> None:
    plain = ranker({})
    spec = ranker({"router": {"policy": "prefix", "policy_kwargs": {"max_chars": 9000, "balance": 1.5}}})
    assert (spec.router_policy, spec.router_policy_kwargs) == ("prefix", '{"balance":1.5,"max_chars":9000}')
    assert (plain.router_policy_kwargs, spec.definition_hash) == ("", plain.definition_hash)


def test_what_a_policy_is_made_with_has_a_bound() -> None:
    (problem,) = problems({"router": {"policy_kwargs": {"a": "x" * 5000}}})
    assert problem.endswith(
        "expected at most 4096 bytes as JSON, since every caller gets them (these are 5008), found a mapping"
    )


def test_the_line_at_callers_is_no_business_of_the_replica() -> None:
    spec = ranker({"max_queued_requests": 5}, environment={"PIERHEAD_MAX_QUEUED_REQUESTS": "7"})
    assert spec.max_queued_requests == 5
    assert "PIERHEAD_MAX_QUEUED_REQUESTS=7" in spec.container["Env"], "the bound of lines to services unknown here"


def test_numbers_without_a_fraction_are_seconds_too() -> None:
    assert ranker({"request_timeout_s": 5}).request_timeout_s == 5.0


def test_the_grace_period_follows_the_drain_unless_it_is_written() -> None:
    assert ranker({"request_timeout_s": 30, "graceful_shutdown_timeout_s": 45}).stop_grace_period_s == 55
    assert ranker({}, stop_grace_period="1m6s").stop_grace_period_s == 66
    assert ranker({}, stop_grace_period="1m6s").container["StopTimeout"] == 66


def test_an_image_that_is_only_built_has_the_name_compose_gives_it() -> None:
    spec = ranker({}, image=None, build={"context": "/src"})
    assert (spec.image, spec.has_build) == ("shop-ranker", True)


def test_one_image_that_several_services_build_is_warned_of() -> None:
    app = {"image": "shop/app", "scale": 0, "x-serve": {}, "build": {"context": "/src"}}
    spec = read(api=app, worker={**app, "image": "shop/app:latest"}, other={**app, "image": "shop/other"})
    (warning,) = spec.warnings
    assert warning == (
        "services.worker.build: api and worker both build shop/app:latest; Compose labels the image with the service's "
        "name, so each build replaces the other's and both services roll out without an edit: keep build in "
        "services.api and remove it here"
    )
    shared = {**app, "build": None}
    assert read(api=app, worker=shared, database={"image": "shop/app", "build": "/src"}).warnings == ()


def test_services_without_a_block_are_none_of_ours() -> None:
    whole = config(ranker=service(), database={"image": "postgres", "ports": ["5432:5432"]})
    assert list(read(**whole["services"]).services) == ["ranker"]
    assert not problems_of({"name": "shop", "services": {}})


@pytest.mark.parametrize(
    "key",
    ["x-server", "x-Serve", "x-SERVE", "x-serv", "x-srve", "x-sevre", "x-serce", "x-service", "x-serve-", "x-serves"],
)
def test_a_misspelt_block_is_a_problem_and_no_service_of_composes(key: str) -> None:
    plain = {"image": "shop/web", "scale": 0}
    path = f"services.web.{key}: "
    (problem,) = problems_of(config(ranker=service(), web={**plain, key: {"route": "/web"}}))
    assert problem == (
        path + 'unknown key; did you mean "x-serve"? A service without it is left to Compose; an extension of your own '
        "needs a name that is less like it"
    )
    assert problems({}, **{key: {}}) == [problem.replace("services.web.", "services.ranker.")], "beside the block too"


@pytest.mark.parametrize("key", ["x-anything", "x-logging", "x-secret", "x-serve-defaults", "x-", "x-pierhead"])
def test_other_extensions_are_the_users_own(key: str) -> None:
    database = {"image": "postgres", key: {"a": 1}}
    assert list(read(ranker=service(**{key: {"a": 1}}), database=database).services) == ["ranker"]


@pytest.mark.parametrize("written", [{"scale": 0}, {"scale": None, "deploy": {"replicas": 0}}])
def test_scale_zero_in_either_form(written: dict[str, Any]) -> None:
    assert problems({}, **written) == []


# --------------------------------------------------------------------------------------------------------------- GPUs


def test_gpus_by_number_by_uuid_and_in_the_short_form() -> None:
    assert ranker({}, deploy=nvidia(count=2)).gpu == GpuRequest(2)
    assert ranker({}, deploy=nvidia(device_ids=["GPU-1", "GPU-2"])).gpu == GpuRequest(2, ("GPU-1", "GPU-2"))
    cdi = nvidia(driver="cdi", device_ids=["nvidia.com/gpu=GPU-1"])
    assert ranker({}, deploy=cdi).gpu == GpuRequest(1, ("GPU-1",))
    assert ranker({}, gpus=[{"count": 1}]).gpu == GpuRequest(1)
    assert ranker({}, deploy=nvidia(count=1, capabilities=["gpu", "video"])).gpu == GpuRequest(1, (), ("gpu", "video"))


DEVICE = "services.ranker.deploy.resources.reservations.devices[0]"
ALL = (
    'expected the number of GPUs of one replica, found "all" (also meant where neither count nor device_ids is '
    "written): the controller gives every replica GPUs of its own; write count: 1"
)


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        ({"count": -1}, f"{DEVICE}.count: {ALL}"),
        ({"count": "all"}, f"{DEVICE}.count: {ALL}"),
        ({}, f"{DEVICE}.count: {ALL}"),
        ({"count": 0}, f"{DEVICE}.count: expected an integer from 1 to 64, found 0"),
        ({"count": 1.5}, f"{DEVICE}.count: expected an integer, found 1.5"),
        ({"count": True}, f"{DEVICE}.count: expected an integer, found true"),
        ({"driver": "amd", "count": 1}, f'{DEVICE}.driver: expected "nvidia" or "cdi", found "amd"'),
        (
            {"count": 1, "device_ids": ["GPU-1"]},
            f"{DEVICE}: expected either count or device_ids, found both",
        ),
        (
            {"device_ids": ["0"]},
            (
                f"{DEVICE}.device_ids[0]: expected a GPU's UUID as `nvidia-smi -L` prints it (indexes change between "
                'boots), found "0"'
            ),
        ),
        ({"device_ids": []}, f"{DEVICE}.device_ids: expected at least one UUID, found a list"),
        ({"device_ids": ["GPU-1", "GPU-1"]}, f"{DEVICE}.device_ids[1]: names GPU-1 a second time"),
        ({"count": 1, "capabilities": ["tpu"]}, f'{DEVICE}.capabilities: expected "gpu" among them, found "tpu"'),
        ({"count": 1, "options": {"a": "b"}}, f"{DEVICE}.options: not supported for replicas; remove it"),
    ],
)
def test_wrong_gpus(device: dict[str, Any], problem: str) -> None:
    assert problems({}, deploy=nvidia(**device)) == [problem]


A_POLICY = 'an import path such as "autoscaling.night:wanted", or {prometheus: {query: ..., target: ...}}'


@pytest.mark.parametrize(
    ("x_serve", "problem"),
    [
        ({"autoscale": 3}, "autoscale: expected a mapping, found 3"),
        ({"autoscale": {"min": -1}}, "autoscale.min: expected an integer >= 0, found -1"),
        ({"autoscale": {"mx": 4}}, 'autoscale.mx: unknown key; did you mean "max"?'),
        ({"autoscale": {"min": 3, "max": 2}}, "autoscale.max: expected an integer from 3 (min) to 1000, found 2"),
        ({"autoscale": {"min": 0, "max": 0}}, "autoscale.max: expected an integer from 1 (min) to 1000, found 0"),
        (
            {"autoscale": {"min": 2, "max": 4, "initial": 5}},
            "autoscale.initial: expected an integer from 2 (min) to 4 (max), found 5",
        ),
        (
            {"autoscale": {"target_ongoing_requests": 0}},
            "autoscale.target_ongoing_requests: expected a number from 0.01 to 1000000, found 0",
        ),
        (
            {"autoscale": {"aggregation_function": "median"}},
            'autoscale.aggregation_function: expected "mean" or "max" or "min", found "median"',
        ),
        (
            {"autoscale": {"upscale_delay_s": "soon"}},
            'autoscale.upscale_delay_s: expected a number of seconds from 0 to 86400, found "soon"',
        ),
        (
            {"autoscale": {"max": 4}, "replicas": 2},
            "replicas: has no effect beside autoscale, which decides the number; remove it",
        ),
        ({"autoscale": {"policy": "night"}}, f'autoscale.policy: expected {A_POLICY}, found "night"'),
        ({"autoscale": {"policy": "a/b:c"}}, f'autoscale.policy: expected {A_POLICY}, found "a/b:c"'),
        ({"autoscale": {"policy": 3}}, f"autoscale.policy: expected {A_POLICY}, found 3"),
        (
            {"autoscale": {"policy": {"prometheus": {"query": "up", "target": 1}, "promtheus": {}}}},
            'autoscale.policy.promtheus: unknown key; did you mean "prometheus"? known keys: prometheus',
        ),
        ({"autoscale": {"policy": {}}}, "autoscale.policy.prometheus: expected a mapping, found nothing"),
        ({"autoscale": {"policy": {"prometheus": 1}}}, "autoscale.policy.prometheus: expected a mapping, found 1"),
        (
            {"autoscale": {"policy": {"prometheus": {"target": 1}}}},
            "autoscale.policy.prometheus.query: expected a string, found nothing",
        ),
        (
            {"autoscale": {"policy": {"prometheus": {"query": " ", "target": 1}}}},
            (
                "autoscale.policy.prometheus.query: expected a PromQL query of at most 10000 characters that is not "
                'empty, found " "'
            ),
        ),
        (
            {"autoscale": {"policy": {"prometheus": {"query": "up"}}}},
            "autoscale.policy.prometheus.target: expected a number from 0.0001 to 1000000000, found nothing",
        ),
        (
            {"autoscale": {"policy": {"prometheus": {"query": "up", "target": 0}}}},
            "autoscale.policy.prometheus.target: expected a number from 0.0001 to 1000000000, found 0",
        ),
        (
            {"autoscale": {"policy": {"prometheus": {"query": "up", "target": 1, "url": "http://u:p@prom:9090"}}}},
            (
                'autoscale.policy.prometheus.url: expected an address such as "http://prometheus:9090", without user, '
                'password, query and fragment, found "http://u:p@prom:9090"'
            ),
        ),
        *(
            (
                {"autoscale": {"policy": {"prometheus": {"query": "up", "target": 1, "url": url}}}},
                (
                    "autoscale.policy.prometheus.url: expected an address whose host is an IP address or a name of 1 "
                    "to 63 letters, digits, hyphens and underscores between dots, and whose port, if any, is from 1 to "
                    f'65535, found "{url}"'
                ),
            )
            for url in ("http://prom..local:9090", f"http://{'a' * 64}", "http://[::::]:9090", "http://prom:65536")
        ),
        (
            {"autoscale": {"policy": {"prometheus": {"query": "up", "target": 1, "period_s": 0}}}},
            "autoscale.policy.prometheus.period_s: expected a number of seconds from 1 to 3600, found 0",
        ),
        (
            {"autoscale": {"policy": {"prometheus": {"query": "up", "target": 1, "intervall": 5}}}},
            "autoscale.policy.prometheus.intervall: unknown key; known keys: query, target, url, period_s, timeout_s",
        ),
        (
            {"autoscale": {"policy_kwargs": {"a": 1}}},
            "autoscale.policy_kwargs: has no effect without a policy that is an import path; remove it",
        ),
        ({"autoscale": {"policy_kwargs": 3}}, "autoscale.policy_kwargs: expected a mapping, found 3"),
    ],
)
def test_autoscale_blocks_that_cannot_be(x_serve: dict[str, Any], problem: str) -> None:
    (found,) = problems(x_serve)
    assert found.startswith(f"services.ranker.x-serve.{problem}")


def test_an_autoscaled_service_begins_with_its_initial_number() -> None:
    spec = ranker({"autoscale": {"min": 1, "max": 8, "initial": 3}})
    assert spec.replicas == 3
    assert spec.autoscale == AutoscaleSpec(min=1, max=8, initial=3)
    assert ranker({"autoscale": {"min": 2, "max": 8}}).replicas == 2
    assert ranker({"autoscale": {"max": 4}}).definition_hash == ranker({}).definition_hash


def test_policies() -> None:
    plain = {"policy": "autoscaling.night:wanted", "policy_kwargs": {"least": 2}}
    spec = ranker({"autoscale": plain}).autoscale
    assert spec is not None
    assert spec.policy == FunctionPolicy("autoscaling.night:wanted", {"least": 2})
    measured = {"policy": {"prometheus": {"query": "avg(gpu)", "target": 70, "url": "https://metrics/prom/"}}}
    spec = ranker({"autoscale": measured}).autoscale
    assert spec is not None
    assert spec.policy == PrometheusPolicy("avg(gpu)", 70.0, "https://metrics/prom", 5.0, 4.0)


def test_with_a_policy_no_load_is_a_burst_until_somebody_says_what_a_replica_is_for() -> None:
    for changes, threshold in [({}, None), ({"target_ongoing_requests": 2}, 2.0)]:
        spec = ranker({"autoscale": {"policy": "a:b", **changes}}).autoscale
        assert spec is not None
        assert spec.panic_threshold == threshold


def test_two_replicas_cannot_have_the_same_gpus() -> None:
    assert problems({"replicas": 2}, deploy=nvidia(device_ids=["GPU-1"])) == [
        (
            f"{DEVICE}.device_ids: pins every replica to GPU-1, so only 1 of 2 replicas could run; write count: 1 in "
            "its place and the controller chooses, or replicas: 1"
        )
    ]


GIB = 1024**3


def test_how_much_of_a_gpu() -> None:
    assert ranker({"gpu": {"count": 2}}).gpu == GpuRequest(2)
    assert ranker({"gpu": {"memory": "16GiB"}}).gpu == GpuRequest(1, slot=GpuSlot(memory_bytes=16 * GIB))
    assert ranker({"gpu": {"memory": "1.5 g"}}).gpu == GpuRequest(1, slot=GpuSlot(memory_bytes=GIB * 3 // 2))
    spread = {"gpu": {"fraction": 0.29, "placement": "spread"}}
    assert ranker(spread).gpu == GpuRequest(1, slot=GpuSlot(fraction=0.29), placement="spread")
    assert ranker({"gpu": {"fraction": 1}}).gpu == GpuRequest(1, slot=GpuSlot(fraction=1.0))
    assert ranker({"gpu": {"fraction": 0.33339}}).gpu == GpuRequest(1, slot=GpuSlot(fraction=0.3333))


def test_the_reservation_says_which_gpus_and_x_serve_how_much_of_them() -> None:
    # Compose prints a count that is left out as -1.
    both = ranker({"gpu": {"fraction": 0.5}}, deploy=nvidia(count=-1, capabilities=["gpu", "video"])).gpu
    assert both == GpuRequest(1, (), ("gpu", "video"), GpuSlot(fraction=0.5))
    some = ranker({"gpu": {"memory": "8g"}, "replicas": 4}, deploy=nvidia(device_ids=["GPU-1", "GPU-2"])).gpu
    assert some == GpuRequest(1, ("GPU-1", "GPU-2"), slot=GpuSlot(memory_bytes=8 * GIB))
    assert ranker({"gpu": {"count": 1}, "replicas": 2}, deploy=nvidia(device_ids=["GPU-1", "GPU-2"])).gpu == GpuRequest(
        1, ("GPU-1", "GPU-2")
    )


@pytest.mark.parametrize(
    ("gpu", "definition", "problem"),
    [
        ({}, {}, "x-serve.gpu: expected exactly one of count, memory and fraction, found none of them"),
        (
            {"count": 1, "fraction": 0.5},
            {},
            "x-serve.gpu: expected exactly one of count, memory and fraction, found count and fraction",
        ),
        (3, {}, "x-serve.gpu: expected a mapping, found 3"),
        ({"count": 0}, {}, "x-serve.gpu.count: expected an integer from 1 to 64, found 0"),
        ({"fraction": 0}, {}, "x-serve.gpu.fraction: expected a number from 0.0001 to 1, found 0"),
        ({"fraction": 1.5}, {}, "x-serve.gpu.fraction: expected a number from 0.0001 to 1, found 1.5"),
        (
            {"memory": "much"},
            {},
            'x-serve.gpu.memory: expected a size from "1MiB" to "1TiB" such as "16GiB", found "much"',
        ),
        ({"memory": "1k"}, {}, 'x-serve.gpu.memory: expected a size from "1MiB" to "1TiB" such as "16GiB", found "1k"'),
        ({"memory": 16}, {}, 'x-serve.gpu.memory: expected a size from "1MiB" to "1TiB" such as "16GiB", found 16'),
        (
            {"count": 1, "placement": "tight"},
            {},
            'x-serve.gpu.placement: expected "pack" or "spread", found "tight"',
        ),
        (
            {"fraction": 0.5},
            {"deploy": nvidia(count=1)},
            (
                "deploy.resources.reservations.devices[0].count: stands beside x-serve.gpu, which says how much of a "
                "GPU each replica gets; remove one of the two"
            ),
        ),
        (
            {"count": 3},
            {"deploy": nvidia(device_ids=["GPU-1", "GPU-2"])},
            "x-serve.gpu.count: expected an integer from 1 to 2 (the reservation's device_ids), found 3",
        ),
        (
            {"fraction": 0.5},
            {"environment": {"PIERHEAD_GPU_FRACTION": "1"}},
            "environment.PIERHEAD_GPU_FRACTION: the controller sets this variable; remove it",
        ),
    ],
)
def test_wrong_amounts_of_gpu(gpu: Any, definition: dict[str, Any], problem: str) -> None:
    assert problems({"gpu": gpu}, **definition) == [f"services.ranker.{problem}"]


def test_replicas_on_one_machine() -> None:
    assert ranker({}).max_replicas_per_node is None
    assert ranker({"max_replicas_per_node": 2}).max_replicas_per_node == 2
    assert problems({"max_replicas_per_node": 0}) == [
        "services.ranker.x-serve.max_replicas_per_node: expected an integer from 1 to 1000, found 0"
    ]


def test_a_slot_needs_new_containers_when_it_changes_and_its_placement_does_not() -> None:
    half, third = ({"fraction": share, "placement": "pack"} for share in (0.5, 0.3))
    assert ranker({"gpu": half}).definition_hash != ranker({"gpu": third}).definition_hash
    elsewhere = {**half, "placement": "spread"}
    assert ranker({"gpu": half}).definition_hash == ranker({"gpu": elsewhere}).definition_hash
    assert ranker({"gpu": {"count": 1}}).definition_hash == ranker({}, deploy=nvidia(count=1)).definition_hash
    assert ranker({"max_replicas_per_node": 3}).definition_hash == ranker({}).definition_hash


def test_nothing_may_show_a_replica_all_gpus() -> None:
    definition = {"deploy": nvidia(count=1), "privileged": True, "environment": {"NVIDIA_VISIBLE_DEVICES": "all"}}
    assert problems({}, **definition) == [
        "services.ranker.privileged: gives a replica every GPU of the machine; remove it or the GPU reservation",
        (
            "services.ranker.environment.NVIDIA_VISIBLE_DEVICES: the controller chooses the GPUs of each replica; "
            "remove it or the GPU reservation"
        ),
    ]


# ---------------------------------------------------------------------------------------------- one block's own keys


@pytest.mark.parametrize(
    ("x_serve", "problem"),
    [
        ({"replicas": "two"}, 'replicas: expected an integer >= 0, found "two"'),
        ({"replicas": "2"}, 'replicas: expected an integer >= 0, found "2"'),
        ({"replicas": -1}, "replicas: expected an integer >= 0, found -1"),
        ({"replicas": True}, "replicas: expected an integer >= 0, found true"),
        ({"replicas": None}, "replicas: expected an integer >= 0, found null"),
        ({"replicas": 2.5}, "replicas: expected an integer >= 0, found 2.5"),
        ({"replicas": [1]}, "replicas: expected an integer >= 0, found a list"),
        ({"replicas": 1001}, "replicas: expected at most 1000 replicas, found 1001"),
        ({"replicas": 10**30}, "replicas: expected at most 1000 replicas, found an integer of more than 64 bits"),
        ({"replcas": 2}, f'replcas: unknown key; did you mean "replicas"? known keys: {KNOWN}'),
        ({"zz": 2}, f"zz: unknown key; known keys: {KNOWN}"),
        ({"a b\n": 2}, f'"a b\\n": unknown key; known keys: {KNOWN}'),
        ({3: 2}, f"3: unknown key; known keys: {KNOWN}"),
        ({"protocol": "tcp"}, 'protocol: expected "http" or "grpc", found "tcp"'),
        ({"port": 0}, "port: expected an integer from 1 to 65535, found 0"),
        ({"port": "80"}, 'port: expected an integer from 1 to 65535, found "80"'),
        ({"route": 5}, "route: expected a string, found 5"),
        ({"route": "/a", "strip_prefix": "yes"}, 'strip_prefix: expected true or false, found "yes"'),
        ({"route": "/a", "strip_prefix": 1}, "strip_prefix: expected true or false, found 1"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests: expected an integer from 1 to 1000000, found 0"),
        ({"max_queued_requests": -2}, "max_queued_requests: expected an integer from -1 to 1000000, found -2"),
        (
            {"request_timeout_s": float("nan")},
            "request_timeout_s: expected a number of seconds from 0.001 to 86400, found .nan",
        ),
        (
            {"request_timeout_s": float("inf")},
            "request_timeout_s: expected a number of seconds from 0.001 to 86400, found .inf",
        ),
        (
            {"request_timeout_s": True},
            "request_timeout_s: expected a number of seconds from 0.001 to 86400, found true",
        ),
        (
            {"request_timeout_s": "60s"},
            'request_timeout_s: expected a number of seconds from 0.001 to 86400, found "60s"',
        ),
        (
            {"graceful_shutdown_wait_loop_s": 0},
            "graceful_shutdown_wait_loop_s: expected a number of seconds from 0.25 to 86400, found 0",
        ),
        ({"logging": "debug"}, 'logging: expected a mapping, found "debug"'),
        (
            {"logging": {"log_level": "DEBUG"}},
            'logging.log_level: expected "debug" or "info" or "warning" or "error", found "DEBUG"',
        ),
        ({"logging": {"encoding": "xml"}}, 'logging.encoding: expected "json" or "text", found "xml"'),
        (
            {"logging": {"enable_access_log": "no"}},
            'logging.enable_access_log: expected true or false, found "no"',
        ),
        (
            {"logging": {"level": "info"}},
            (
                'logging.level: unknown key; did you mean "log_level"? known keys: log_level, encoding, '
                "enable_access_log"
            ),
        ),
        (
            {"logging": {"logs_dir": "/var/log"}},
            (
                "logging.logs_dir: unknown key; a replica writes to standard error and Docker keeps it as the "
                "service's own logging key (beside x-serve) says; remove it"
            ),
        ),
        ({"logging_config": {}}, "logging_config: unknown key; write logging"),
        ({"grpc_services": "a.B"}, 'grpc_services: expected a list of strings, found "a.B"'),
        ({"grpc_services": [1]}, "grpc_services[0]: expected a string, found 1"),
        ({"health": None}, "health: expected a mapping, found null"),
        ({"health": {"failures": 0}}, "health.failures: expected an integer from 1 to 1000, found 0"),
        (
            {"health": {"perod_s": 1}},
            (
                'health.perod_s: unknown key; did you mean "period_s"? known keys: probe, period_s, timeout_s, '
                "failures, progress_timeout_s"
            ),
        ),
        (
            {"health": {"probe": {"prt": 1}}},
            'health.probe.prt: unknown key; did you mean "port"? known keys: path, port',
        ),
        ({"health": {"probe": "/ready"}}, 'health.probe: expected a mapping, found "/ready"'),
        ({"startup": 60}, "startup: expected a mapping, found 60"),
        (
            {"startup": {"deadline_s": 0}},
            "startup.deadline_s: expected a number of seconds from 1 to 604800, found 0",
        ),
        ({"startup": {"timeout_s": 5}}, "startup.timeout_s: unknown key; known keys: deadline_s"),
        # Names that blocks have had, or have in Ray Serve.
        (
            {"readiness": {"path": "/health"}},
            "readiness: unknown key; write health, with path and port in health.probe",
        ),
        ({"health": {"path": "/health"}}, "health.path: unknown key; write health.probe.path"),
        ({"health": {"port": 8000}}, "health.port: unknown key; write health.probe.port"),
        ({"startup_timeout_s": 60}, "startup_timeout_s: unknown key; write startup.deadline_s"),
        ({"health_check_period_s": 10}, "health_check_period_s: unknown key; write health.period_s"),
        ({"health_check_timeout_s": 30}, "health_check_timeout_s: unknown key; write health.timeout_s"),
        (
            {"workers": 4},
            "workers: unknown key; write replicas: HAProxy spreads requests over as many ingress replicas as there are",
        ),
        ({"debug": "on"}, 'debug: expected true or false, found "on"'),
        (
            {"run_user_code_in_separate_thread": 1},
            "run_user_code_in_separate_thread: expected true or false, found 1",
        ),
        ({"router": "round_robin"}, 'router: expected a mapping, found "round_robin"'),
        ({"router": {"policy": "pow2"}}, f'router.policy: {A_ROUTER}, found "pow2"'),
        ({"router": {"policy": None}}, f"router.policy: {A_ROUTER}, found null"),
        ({"router": {"header": "x"}}, "router.header: unknown key; known keys: policy, policy_kwargs"),
        ({"router": {"policy_kwargs": [1]}}, f"router.policy_kwargs: {KWARGS}, found a list"),
        ({"router": {"policy_kwargs": {"a-b": 1}}}, f"router.policy_kwargs: {KWARGS}, found a mapping"),
        ({"backpressure": 503}, "backpressure: expected a mapping, found 503"),
        ({"backpressure": {"status_code": 500}}, "backpressure.status_code: expected 503 or 429, found 500"),
        ({"backpressure": {"status_code": "503"}}, 'backpressure.status_code: expected 503 or 429, found "503"'),
        (
            {"backpressure": {"retry_after_s": -1}},
            "backpressure.retry_after_s: expected a number of seconds from 0 to 86400, found -1",
        ),
        (
            {"backpressure": {"status": 503}},
            'backpressure.status: unknown key; did you mean "status_code"? known keys: status_code, retry_after_s',
        ),
        ({"metrics": {"port": 70000}}, "metrics.port: expected an integer from 1 to 65535, found 70000"),
    ],
)
def test_wrong_keys_and_values(x_serve: dict[Any, Any], problem: str) -> None:
    assert problems(x_serve) == [f"services.ranker.x-serve.{problem}"]


@pytest.mark.parametrize(
    ("x_serve", "found"), [("on", '"on"'), ([], "a list"), (3, "3"), (True, "true"), ({"": {}}, None)]
)
def test_a_block_that_is_no_mapping(x_serve: Any, found: str | None) -> None:
    if found is not None:
        assert problems(x_serve) == [
            (
                'services.ranker.x-serve: expected a mapping of settings ("x-serve: {}" takes every default), '
                f"found {found}"
            )
        ]


def test_an_empty_block_says_how_to_write_it() -> None:
    whole = config(ranker=service())
    whole["services"]["ranker"]["x-serve"] = None
    assert problems_of(whole) == [
        'services.ranker.x-serve: expected a mapping of settings ("x-serve: {}" takes every default), found null'
    ]


SYNTAX = 'expected a path that starts with "/" and has only letters, digits and "/-_.~" (at most 200)'


@pytest.mark.parametrize(
    ("route", "problem"),
    [
        ("echo", f'{SYNTAX}, found "echo"'),
        ("", f'{SYNTAX}, found ""'),
        ("/a b", f'{SYNTAX}, found "/a b"'),
        ("/a\nuse_backend x", f'{SYNTAX}, found "/a\\nuse_backend x"'),
        ("/a\n", f'{SYNTAX}, found "/a\\n"'),
        ('/a"', f'{SYNTAX}, found "/a\\""'),
        ("/a'", f'{SYNTAX}, found "/a\'"'),
        ("/a#", f'{SYNTAX}, found "/a#"'),
        ("/$HOME", f'{SYNTAX}, found "/$HOME"'),
        ("/{x}", f'{SYNTAX}, found "/{{x}}"'),
        ("/%[src]", f'{SYNTAX}, found "/%[src]"'),
        ("/a\\", f'{SYNTAX}, found "/a\\\\"'),
        ("/ä", f'{SYNTAX}, found "/\\u00e4"'),
        ("/" + "a" * 200, f'{SYNTAX}, found "/{"a" * 74}..."'),
        ("/echo/", 'expected a path without a slash at its end ("/echo"), found "/echo/"'),
        ("/a//b", 'expected a path without empty, "." and ".." parts, found "/a//b"'),
        ("/a/../b", 'expected a path without empty, "." and ".." parts, found "/a/../b"'),
        ("/-", 'expected a path outside "/-/" (Pierhead answers there itself), found "/-"'),
        ("/-/healthz", 'expected a path outside "/-/" (Pierhead answers there itself), found "/-/healthz"'),
    ],
)
def test_wrong_routes(route: str, problem: str) -> None:
    assert problems({"route": route}) == [f"services.ranker.x-serve.route: {problem}"]


@pytest.mark.parametrize("route", ["/", "/a", "/a/b-c_d.e~f", "/-x"])
def test_right_routes(route: str) -> None:
    assert ranker({"route": route}).route == route


@pytest.mark.parametrize("path", ["health", "/a b", "/a\n", "/%[src]", '/"'])
def test_wrong_probe_paths(path: str) -> None:
    (problem,) = problems({"protocol": "http", "health": {"probe": {"path": path}}})
    assert problem.startswith(
        'services.ranker.x-serve.health.probe.path: expected a path that starts with "/" and has only letters, digits '
        'and "/-_.~?=&" (at most 200), found "'
    )


@pytest.mark.parametrize("name", ["", "a b", "a.B\n", "/a.B", "a..B", "1a.B", "a.B/Rank"])
def test_wrong_grpc_names(name: str) -> None:
    (problem,) = problems({"grpc_services": [name]})
    assert problem.startswith(
        "services.ranker.x-serve.grpc_services[0]: expected the full name of a gRPC service such as "
        '"pierhead.recsys.v1.Ranker", found "'
    )


# ----------------------------------------------------------------------------------------- keys that do not go together


@pytest.mark.parametrize(
    ("x_serve", "problem"),
    [
        (
            {"route": "/a", "run_user_code_in_separate_thread": True},
            (
                'run_user_code_in_separate_thread: needs protocol "grpc": the handlers of an HTTP application read and '
                "write their connections and stay on the server's event loop; put what blocks into asyncio.to_thread, "
                "or write more replicas"
            ),
        ),
        (
            {**AN_IMAGE, "protocol": "grpc", "run_user_code_in_separate_thread": True},
            (
                "run_user_code_in_separate_thread: has no effect on an image that is not built on Pierhead's runtime "
                "(managed: false)"
            ),
        ),
        (
            {**AN_IMAGE, "debug": True},
            "debug: has no effect on an image that is not built on Pierhead's runtime (managed: false)",
        ),
        (
            {**AN_IMAGE, "logging": {"log_level": "info"}},
            (
                "logging: has no effect on an image that is not built on Pierhead's runtime (managed: false): its own "
                "program decides what it logs; configure it there (command, environment), and remove this"
            ),
        ),
        (
            {"protocol": "grpc", "route": "/a"},
            (
                'route: a route takes HTTP requests and this service has protocol "grpc"; write grpc_services in its '
                "place, or protocol: http"
            ),
        ),
        (
            {"route": "/a", "grpc_services": ["a.B"]},
            (
                'grpc_services: gRPC needs protocol "grpc" and this service has "http" (the default of a service with '
                "a route)"
            ),
        ),
        ({"strip_prefix": True}, "strip_prefix: strips the route from the path, and this service has no route"),
        ({"port": 9100}, "port: 9100 is the admin port of a managed replica; choose another one"),
        (
            {"managed": False},
            (
                "health.probe.path: expected a path, found null: an image that is not built on Pierhead's runtime "
                "(managed: false) needs a path that answers whether it is ready"
            ),
        ),
        (
            {"health": {"probe": {"port": 1}}},
            "health.probe.port: has no effect without health.probe.path; write both or none",
        ),
        (
            {"health": {"probe": {"path": "/ready"}}},
            "health.probe.port: expected a port, found null: the probe uses HTTP, and port takes gRPC",
        ),
        (
            {**AN_IMAGE, "metrics": {"path": "/m"}},
            "metrics.port: expected a port, found null: metrics.path has no effect without it",
        ),
        ({"grpc_services": ["a.B", "a.B"]}, 'grpc_services[1]: "a.B" is named twice'),
    ],
)
def test_keys_that_do_not_go_together(x_serve: dict[str, Any], problem: str) -> None:
    assert problems(x_serve) == [f"services.ranker.x-serve.{problem}"]


def test_the_chain_of_timeouts() -> None:
    assert problems({"request_timeout_s": 30, "graceful_shutdown_timeout_s": 60}, stop_grace_period="1m0s") == [
        (
            "services.ranker.stop_grace_period: expected more than x-serve.graceful_shutdown_timeout_s (60 s), found "
            '"1m0s": the engine would kill replicas that still finish requests; raise it, lower '
            "graceful_shutdown_timeout_s, or leave it out (then it is 70 s)"
        )
    ]
    assert problems({"request_timeout_s": 60, "graceful_shutdown_timeout_s": 60}) == [
        (
            "services.ranker.x-serve.graceful_shutdown_timeout_s: expected more than request_timeout_s (60 s), found "
            "60: a replica that drains would cut off requests that are still allowed to run; raise it, lower "
            "request_timeout_s, or leave it out (then it is 65 s)"
        )
    ]
    assert problems({}, stop_grace_period="40s") == [
        (
            "services.ranker.stop_grace_period: expected more than x-serve.graceful_shutdown_timeout_s (65 s, 5 s more "
            'than request_timeout_s), found "40s": the engine would kill replicas that still finish requests; raise '
            "it, lower graceful_shutdown_timeout_s, or leave it out (then it is 75 s)"
        )
    ]


def test_a_replica_may_not_have_to_stay_longer_than_it_can() -> None:
    assert ranker({"graceful_shutdown_wait_loop_s": 64}).graceful_shutdown_wait_loop_s == 64
    path = "services.ranker.x-serve.graceful_shutdown_wait_loop_s"
    why = (
        "a replica that drains would be stopped before it has stayed that long; lower it, or raise "
        "graceful_shutdown_timeout_s"
    )
    assert problems({"graceful_shutdown_wait_loop_s": 65}) == [
        (
            f"{path}: expected less than graceful_shutdown_timeout_s (65 s, 5 s more than request_timeout_s), found "
            f"65: {why}"
        )
    ]
    written = {"request_timeout_s": 5, "graceful_shutdown_timeout_s": 20, "graceful_shutdown_wait_loop_s": 30}
    assert problems(written) == [f"{path}: expected less than graceful_shutdown_timeout_s (20 s), found 30: {why}"]


def test_the_chain_of_timeouts_tells_each_link_that_is_wrong() -> None:
    written = {"request_timeout_s": 30, "graceful_shutdown_timeout_s": 20, "graceful_shutdown_wait_loop_s": 25}
    told = problems(written, stop_grace_period="10s")
    assert [line.partition(", found")[0] for line in told] == [
        "services.ranker.x-serve.graceful_shutdown_wait_loop_s: expected less than graceful_shutdown_timeout_s (20 s)",
        "services.ranker.x-serve.graceful_shutdown_timeout_s: expected more than request_timeout_s (30 s)",
        "services.ranker.stop_grace_period: expected more than x-serve.graceful_shutdown_timeout_s (20 s)",
    ]


@pytest.mark.parametrize(
    ("definition", "found"),
    [
        ({"scale": None}, "nothing, which means 1"),
        ({"scale": 3}, "3"),
        ({"scale": -1}, "-1"),
        ({"scale": False}, "false"),
        ({"scale": None, "deploy": {"replicas": 2}}, "2"),
    ],
)
def test_compose_must_start_nothing(definition: dict[str, Any], found: str) -> None:
    assert problems({}, **definition) == [
        (
            f"services.ranker.scale: expected 0, found {found}: Compose would start containers without GPUs of their "
            "own that no request reaches; write scale: 0 here, and the number of replicas into x-serve.replicas"
        )
    ]


# ---------------------------------------------------------------------------------------------------- across services


def test_a_route_used_twice_names_both_services() -> None:
    whole = config(a=service({"route": "/x"}), b=service({"route": "/x/y"}), c=service({"route": "/x"}))
    assert problems_of(whole) == [
        'services.c.x-serve.route: route "/x" is already taken by service "a"; each route belongs to one service'
    ]


def test_a_grpc_service_used_twice_names_both_services() -> None:
    whole = config(a=service({"grpc_services": ["p.A", "p.B"]}), b=service({"grpc_services": ["p.C", "p.B"]}))
    assert problems_of(whole) == [
        'services.b.x-serve.grpc_services[1]: "p.B" is already taken by service "a"; port 9000 sends it to one service'
    ]


def test_all_problems_are_told_at_once() -> None:
    whole = config(
        a=service({"route": "/x", "replicas": "two", "zz": 1}, scale=1),
        b=service({"route": "/x", "strip_prefix": 3}),
        c=service({"route": "/y"}, ports=[]),
        d=service({"route": "/y"}),
    )
    told = problems_of(whole)
    assert [problem.split(":")[0] for problem in told] == [
        "services.a.scale",
        "services.a.x-serve.replicas",
        "services.a.x-serve.zz",
        "services.b.x-serve.strip_prefix",
        "services.c.ports",
        "services.d.x-serve.route",
    ]


@pytest.mark.parametrize("name", ["Ranker", "my_ranker", "my.ranker", "-a", "a-", "a" * 41, "a\nserver x"])
def test_names_that_dns_or_haproxy_do_not_take(name: str) -> None:
    whole = config()
    whole["services"][name] = service()
    (problem,) = problems_of(whole)
    assert problem.endswith(
        ": expected a service name of lower-case letters, digits and hyphens (at most 40, no hyphen at the ends), as "
        "it becomes a name in DNS and in HAProxy"
    )
    assert problem.startswith('services."a\\nserver x"' if "\n" in name else f"services.{name}:")


@pytest.mark.parametrize(
    ("whole", "problem"),
    [
        (None, "compose file: expected a mapping, found null"),
        (["a"], "compose file: expected a mapping, found a list"),
        ({"services": ["a"]}, "services: expected a mapping, found a list"),
        ({"services": {}, "volumes": 3}, "volumes: expected a mapping, found 3"),
    ],
)
def test_what_is_no_project(whole: Any, problem: str) -> None:
    assert problems_of(whole) == [problem]


def test_a_project_name_that_makes_no_container_name() -> None:
    assert problems_of(config(), project="My Shop") == [
        'name: expected a project name of lower-case letters, digits, hyphens and underscores, found "My Shop"'
    ]
