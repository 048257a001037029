"""Spec: defaults, what is derived from what, and the message of everything that can be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from controller.model.spec import (
    AutoscaleSpec,
    BackpressureAnswer,
    FunctionPolicy,
    GpuRequest,
    GpuSlot,
    ProbeSpec,
    PrometheusPolicy,
    YieldSpec,
)
from tests.unit.controller.compose_configs import config, problems, problems_of, ranker, read, service

GIB = 1024**3
AN_IMAGE = {"health": {"probe": {"path": "/health", "port": 8000}}}
UNMANAGED = "has no effect on an image that is not built on Pierhead's runtime (managed: false)"


def refused(begins: str, x_serve: Any = None, **definition: Any) -> None:
    """Check that this service has one problem. A row of a table may leave out a fixed end of its message."""
    (found,) = problems(x_serve, **definition)
    assert found.startswith(f"services.ranker.{begins}")


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
    assert (spec.route, spec.grpc_services, spec.gpu, spec.has_build) == (None, (), None, False)


def test_a_probe_path_makes_it_a_foreign_image_unless_managed_is_written() -> None:
    spec = ranker({"protocol": "http", "port": 8000, "health": {"probe": {"path": "/v2/health/ready"}}})
    assert (spec.managed, spec.metrics_port) == (False, None)
    assert (spec.probe.port, spec.probe.path) == (8000, "/v2/health/ready")
    managed = ranker({"managed": True, "health": {"probe": {"path": "/mine"}}})
    assert (managed.managed, managed.probe.port, managed.probe.path) == (True, 9100, "/mine")


def test_settings_of_the_process_reach_it_in_its_environment() -> None:
    logging = {"log_level": "debug", "encoding": "text", "access_log": "off", "slow_request_s": 2.5}
    backpressure = {"status_code": 429, "retry_after_s": 2.5}
    spec = ranker({"route": "/a", "debug": True, "backpressure": backpressure, "logging": logging})
    assert spec.backpressure == BackpressureAnswer(429, 2.5)
    assert {
        "PIERHEAD_DEBUG=true",
        "PIERHEAD_BACKPRESSURE_STATUS_CODE=429",
        "PIERHEAD_BACKPRESSURE_RETRY_AFTER_S=2.5",
        "PIERHEAD_LOG_LEVEL=debug",
        "PIERHEAD_LOG_ENCODING=text",
        "PIERHEAD_ACCESS_LOG=off",
        "PIERHEAD_ACCESS_LOG_SAMPLE=0.01",
        "PIERHEAD_SLOW_REQUEST_S=2.5",
    } <= set(spec.container["Env"])
    threaded = ranker({"run_user_code_in_separate_thread": True})
    assert "PIERHEAD_RUN_USER_CODE_IN_SEPARATE_THREAD=true" in threaded.container["Env"]
    streaming = ranker({"streams_requests": True, "request_timeout_s": 90.0})
    assert "PIERHEAD_BODY_TIMEOUT_S=90" in streaming.container["Env"], "its bodies may take as long as its requests"


def test_arguments_of_a_policy_reach_callers_as_json_and_need_no_new_container() -> None:
    plain = ranker({})
    spec = ranker({"router": {"policy": "prefix", "policy_kwargs": {"max_chars": 9000, "balance": 1.5}}})
    assert (spec.router_policy, spec.router_policy_kwargs) == ("prefix", '{"balance":1.5,"max_chars":9000}')
    assert (plain.router_policy_kwargs, spec.definition_hash) == ("", plain.definition_hash)


def test_the_grace_period_follows_the_drain_unless_it_is_written() -> None:
    assert ranker({"request_timeout_s": 30, "graceful_shutdown_timeout_s": 45}).stop_grace_period_s == 55
    written = ranker({}, stop_grace_period="1m6s")
    assert (written.stop_grace_period_s, written.container["StopTimeout"]) == (66, 66)


def test_an_image_that_is_only_built_has_the_name_compose_gives_it() -> None:
    spec = ranker({}, image=None, build={"context": "/src"})
    assert (spec.image, spec.has_build) == ("shop-ranker", True)


def test_an_image_that_several_services_build_is_a_warning() -> None:
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


def test_what_holds_back_a_container_and_no_replica_is_a_warning() -> None:
    needed = {"migrate": {"condition": "service_completed_successfully"}, "db": {"condition": "service_healthy"}}
    web = service(depends_on=needed, profiles=["web"])
    found = read(web=web, migrate={"image": "shop/web", "profiles": ["web"], "depends_on": needed}, db={"image": "db"})
    profiles, condition = found.warnings
    assert profiles == (
        "services.web.profiles: holds no replica back: they run whatever profile is chosen, and Compose builds the "
        "image and makes the networks only where it is chosen; remove it, and keep a service that not every machine "
        "runs in a file that COMPOSE_FILE names there"
    )
    assert condition == (
        "services.web.depends_on.migrate.condition: has no effect with x-serve: replicas do not wait for the end of "
        "migrate; run it before `up` and `deploy`: `docker compose run --rm migrate`"
    )


def test_services_without_a_block_are_left_to_compose() -> None:
    assert list(read(ranker=service(), database={"image": "postgres", "ports": ["5432:5432"]}).services) == ["ranker"]
    assert not problems_of({"name": "shop", "services": {}})


@pytest.mark.parametrize("key", ["x-server", "x-SERVE", "x-srve", "x-sevre", "x-serce", "x-service", "x-serve-"])
def test_a_misspelt_block_is_a_problem(key: str) -> None:
    (problem,) = problems_of(config(ranker=service(), web={"image": "shop/web", "scale": 0, key: {"route": "/web"}}))
    assert problem == (
        f'services.web.{key}: unknown key; did you mean "x-serve"? A service without it is left to Compose; an '
        "extension of your own needs a name that is less like it"
    )
    assert problems({}, **{key: {}}) == [problem.replace("services.web.", "services.ranker.")], "next to the block too"


@pytest.mark.parametrize("key", ["x-anything", "x-logging", "x-secret", "x-serve-defaults", "x-", "x-pierhead"])
def test_other_extensions_are_the_users_own(key: str) -> None:
    database = {"image": "postgres", key: {"a": 1}}
    assert list(read(ranker=service(**{key: {"a": 1}}), database=database).services) == ["ranker"]


# --------------------------------------------------------------------------------------------------------------- GPUs


A_SLOT, PINNED = GpuSlot(memory_bytes=16 * GIB), nvidia(device_ids=["GPU-1", "GPU-2"])
# Compose prints a count that is left out as -1.
SOME = nvidia(count=-1, capabilities=["gpu", "video"])


@pytest.mark.parametrize(
    ("gpu", "deploy", "request_"),
    [
        (None, nvidia(count=2), GpuRequest(2)),
        (None, PINNED, GpuRequest(2, ("GPU-1", "GPU-2"))),
        (None, nvidia(driver="cdi", device_ids=["nvidia.com/gpu=GPU-1"]), GpuRequest(1, ("GPU-1",))),
        (None, nvidia(count=1, capabilities=["gpu", "video"]), GpuRequest(1, (), ("gpu", "video"))),
        ({"count": 2}, None, GpuRequest(2)),
        ({"memory": "16GiB"}, None, GpuRequest(1, slot=A_SLOT)),
        ({"fraction": 0.29}, None, GpuRequest(1, slot=GpuSlot(fraction=0.29))),
        ({"fraction": 1, "placement": "spread"}, None, GpuRequest(1, slot=GpuSlot(fraction=1.0), placement="spread")),
        # The reservation says which GPUs, x-serve how much of them.
        ({"fraction": 0.5}, SOME, GpuRequest(1, (), ("gpu", "video"), GpuSlot(fraction=0.5))),
        ({"memory": "16g"}, PINNED, GpuRequest(1, ("GPU-1", "GPU-2"), slot=A_SLOT)),
        ({"count": 1}, PINNED, GpuRequest(1, ("GPU-1", "GPU-2"))),
    ],
)
def test_gpus(gpu: dict[str, Any] | None, deploy: dict[str, Any] | None, request_: GpuRequest) -> None:
    assert ranker({} if gpu is None else {"gpu": gpu}, deploy=deploy).gpu == request_


DEVICE = "deploy.resources.reservations.devices[0]"
ALL = 'expected the number of GPUs of one replica, found "all" (also meant where neither count nor device_ids is '


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        ({"count": -1}, f".count: {ALL}"),
        ({}, f".count: {ALL}"),
        ({"count": 0}, ".count: expected an integer from 1 to 64, found 0"),
        ({"driver": "amd", "count": 1}, '.driver: expected "nvidia" or "cdi", found "amd"'),
        ({"count": 1, "device_ids": ["GPU-1"]}, ": expected either count or device_ids, found both"),
        ({"device_ids": ["0"]}, ".device_ids[0]: expected a GPU's UUID as `nvidia-smi -L` prints it (indexes change"),
        ({"device_ids": []}, ".device_ids: expected at least one UUID, found a list"),
        ({"device_ids": ["GPU-1", "GPU-1"]}, ".device_ids[1]: names GPU-1 a second time"),
        ({"count": 1, "capabilities": ["tpu"]}, '.capabilities: expected "gpu" among them, found "tpu"'),
        ({"count": 1, "options": {"a": "b"}}, ".options: not supported for replicas; remove it"),
    ],
)
def test_wrong_reservations(device: dict[str, Any], problem: str) -> None:
    refused(DEVICE + problem, deploy=nvidia(**device))


def test_two_replicas_cannot_have_the_same_gpus() -> None:
    begins = f"{DEVICE}.device_ids: pins every replica to GPU-1, so only 1 of 2 replicas could run; write count: 1 in"
    refused(begins, {"replicas": 2}, deploy=nvidia(device_ids=["GPU-1"]))


ONE_AMOUNT = "x-serve.gpu: expected exactly one of count, memory and fraction, found"
A_SIZE = 'expected a size from "1MiB" to "1TiB" such as "16GiB", found'


@pytest.mark.parametrize(
    ("gpu", "definition", "problem"),
    [
        ({}, {}, f"{ONE_AMOUNT} none of them"),
        ({"count": 1, "fraction": 0.5}, {}, f"{ONE_AMOUNT} count and fraction"),
        ({"count": 0}, {}, "x-serve.gpu.count: expected an integer from 1 to 64, found 0"),
        ({"fraction": 1.5}, {}, "x-serve.gpu.fraction: expected a number from 0.0001 to 1, found 1.5"),
        ({"memory": "much"}, {}, f'x-serve.gpu.memory: {A_SIZE} "much"'),
        ({"count": 1, "placement": "tight"}, {}, 'x-serve.gpu.placement: expected "pack" or "spread", found "tight"'),
        (
            {"fraction": 0.5},
            {"deploy": nvidia(count=1)},
            f"{DEVICE}.count: is used together with x-serve.gpu, which says how",
        ),
        (
            {"count": 3},
            {"deploy": PINNED},
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
    refused(problem, {"gpu": gpu}, **definition)


def test_no_setting_may_give_a_replica_all_gpus() -> None:
    definition = {"deploy": nvidia(count=1), "privileged": True, "environment": {"NVIDIA_VISIBLE_DEVICES": "all"}}
    privileged, visible = problems({}, **definition)
    assert privileged.startswith("services.ranker.privileged: gives a replica every GPU of the machine; remove it or")
    assert visible.startswith(
        "services.ranker.environment.NVIDIA_VISIBLE_DEVICES: the controller chooses the GPUs of each replica; remove it"
    )


def test_a_slot_needs_new_containers_when_it_changes_and_its_placement_does_not() -> None:
    half, third = ({"fraction": share, "placement": "pack"} for share in (0.5, 0.3))
    assert ranker({"gpu": half}).definition_hash != ranker({"gpu": third}).definition_hash
    elsewhere = {**half, "placement": "spread"}
    assert ranker({"gpu": half}).definition_hash == ranker({"gpu": elsewhere}).definition_hash
    assert ranker({"gpu": {"count": 1}}).definition_hash == ranker({}, deploy=nvidia(count=1)).definition_hash


ASLEEP = {"min": 0, "max": 1}
YIELDS = "x-serve.gpu.yields"


@pytest.mark.parametrize(
    ("gpu", "deploy", "rule"),
    [
        ({"count": 1, "yields": {}}, None, YieldSpec(idle_s=3.0, min_stay_s=30.0)),
        ({"yields": {"idle_s": 1, "min_stay_s": 5, "group": "chat"}}, nvidia(count=1), YieldSpec(1.0, 5.0, "chat")),
        ({"count": 1, "yields": None}, None, None),
    ],
)
def test_a_service_that_gives_way(gpu: dict[str, Any], deploy: dict[str, Any] | None, rule: YieldSpec | None) -> None:
    spec = ranker({"gpu": gpu, "autoscale": ASLEEP}, deploy=deploy)
    assert (spec.gpu, spec.yields) == (GpuRequest(1), rule)
    assert spec.definition_hash == ranker({"gpu": {"count": 1}}).definition_hash


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"gpu": {"yields": {}}, "autoscale": ASLEEP}, f"{YIELDS}: has no effect without GPUs: write count, memory or"),
        ({"gpu": {"count": 1, "yields": {}}}, f"{YIELDS}: needs a service that scales to zero, as its replicas leave"),
        (
            {"gpu": {"count": 1, "yields": {}}, "autoscale": {"min": 1, "max": 2}},
            f"{YIELDS}: needs a service that scales to zero, as its replicas leave",
        ),
        (
            {"gpu": {"count": 1, "yields": {"idle_s": -1}}, "autoscale": ASLEEP},
            f"{YIELDS}.idle_s: expected a number of seconds from 0 to 86400, found -1",
        ),
        (
            {"gpu": {"count": 1, "yields": {"group": "a b"}}, "autoscale": ASLEEP},
            f'{YIELDS}.group: expected a word of up to 63 letters, digits and "-_.", which starts with a letter or',
        ),
    ],
)
def test_wrong_rules_of_giving_way(block: dict[str, Any], problem: str) -> None:
    refused(problem, block)


def test_no_request_times_out_before_the_service_it_waits_for_gives_way() -> None:
    def one(**block: Any) -> dict[str, Any]:
        return service({"gpu": {"count": 1, "yields": {"min_stay_s": 60}}, "autoscale": ASLEEP, **block})

    (problem,) = problems_of(config(quick=one(), slow=one(request_timeout_s=300)))
    assert problem == (
        "services.slow.x-serve.gpu.yields.min_stay_s: expected less than 60, the request_timeout_s of quick, whose "
        "requests may have to wait so long, found 60.0"
    )


# ---------------------------------------------------------------------------------------------------------- autoscale


def test_an_autoscaled_service_begins_with_its_initial_number() -> None:
    spec = ranker({"autoscale": {"min": 1, "max": 8, "initial": 3}})
    assert (spec.replicas, spec.autoscale) == (3, AutoscaleSpec(min=1, max=8, initial=3))
    assert ranker({"autoscale": {"min": 2, "max": 8}}).replicas == 2
    assert ranker({"autoscale": {"max": 4}}).definition_hash == ranker({}).definition_hash


A_FUNCTION = {"policy": "autoscaling.night:wanted", "policy_kwargs": {"least": 2}}
A_QUERY = {"policy": {"prometheus": {"query": "avg(gpu)", "target": 70, "url": "https://metrics/prom/"}}}


@pytest.mark.parametrize(
    ("block", "policy"),
    [
        (A_FUNCTION, FunctionPolicy("autoscaling.night:wanted", {"least": 2})),
        (A_QUERY, PrometheusPolicy("avg(gpu)", 70.0, "https://metrics/prom", 5.0, 4.0)),
    ],
)
def test_with_a_policy_no_load_is_a_burst_unless_its_target_is_written(block: dict[str, Any], policy: object) -> None:
    for changes, threshold in [({}, None), ({"target_ongoing_requests": 2}, 2.0)]:
        spec = ranker({"autoscale": {**block, **changes}}).autoscale
        assert spec is not None
        assert (spec.policy, spec.panic_threshold) == (policy, threshold)


A_POLICY = 'an import path such as "autoscaling.night:wanted", or {prometheus: {query: ..., target: ...}}'


@pytest.mark.parametrize(
    ("autoscale", "problem"),
    [
        ({"mx": 4}, '.mx: unknown key; did you mean "max"?'),
        ({"min": 3, "max": 2}, ".max: expected an integer from 3 (min) to 1000, found 2"),
        ({"min": 2, "max": 4, "initial": 5}, ".initial: expected an integer from 2 (min) to 4 (max), found 5"),
        ({"target_ongoing_requests": 0}, ".target_ongoing_requests: expected a number from 0.01 to 1000000, found 0"),
        ({"policy": "night"}, f'.policy: expected {A_POLICY}, found "night"'),
        ({"policy": {}}, ".policy.prometheus: expected a mapping, found nothing"),
        ({"policy_kwargs": {"a": 1}}, ".policy_kwargs: has no effect without a policy that is an import path"),
    ],
)
def test_wrong_autoscale_blocks(autoscale: Any, problem: str) -> None:
    refused(f"x-serve.autoscale{problem}", {"autoscale": autoscale})


AN_ADDRESS = '.url: expected an address such as "http://prometheus:9090", without user, password, query and fragment'
A_HOST = ".url: expected an address whose host is an IP address or a name of 1 to 63 letters, digits, hyphens and"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"query": None}, ".query: expected a string, found nothing"),
        ({"query": " "}, ".query: expected a PromQL query of at most 10000 characters that is not empty, found"),
        ({"target": 0}, ".target: expected a number from 0.0001 to 1000000000, found 0"),
        ({"url": "http://u:p@prom:9090"}, AN_ADDRESS),
        ({"url": "http://prom..local:9090"}, A_HOST),
        ({"url": "http://[::::]:9090"}, A_HOST),
        ({"intervall": 5}, ".intervall: unknown key; known keys: query, target, url, period_s, timeout_s"),
    ],
)
def test_wrong_queries(changes: dict[str, Any], problem: str) -> None:
    query = {key: value for key, value in {"query": "up", "target": 1, **changes}.items() if value is not None}
    refused(f"x-serve.autoscale.policy.prometheus{problem}", {"autoscale": {"policy": {"prometheus": query}}})


# ---------------------------------------------------------------------------------------------- one block's own keys

A_ROUTER = (
    "expected one of power_of_two, round_robin, least_ongoing, consistent_hash, prefix, engine_load, or an import"
)
KWARGS = "expected the policy's keyword arguments by name, such as {match_rate_threshold: 0.2}"
LONG_KWARGS = {"policy_kwargs": {"a": "x" * 5000}}
SECONDS = "expected a number of seconds from"
A_SIZE = 'expected a size from "1MiB" to "1TiB" such as "2GiB"'


@pytest.mark.parametrize(
    ("x_serve", "problem"),
    [
        # What is expected, by type.
        ({"replicas": "two"}, 'replicas: expected an integer >= 0, found "two"'),
        ({"protocol": "tcp"}, 'protocol: expected "http" or "grpc", found "tcp"'),
        ({"route": 5}, "route: expected a string, found 5"),
        ({"debug": "on"}, 'debug: expected true or false, found "on"'),
        ({"grpc_services": "a.B"}, 'grpc_services: expected a list of strings, found "a.B"'),
        ({"health": {"probe": "/ready"}}, 'health.probe: expected a mapping, found "/ready"'),
        ({"backpressure": {"status_code": 500}}, "backpressure.status_code: expected 503 or 429, found 500"),
        ({"request_timeout_s": "60s"}, f'request_timeout_s: {SECONDS} 0.001 to 86400, found "60s"'),
        # What is found.
        ({"replicas": True}, "replicas: expected an integer >= 0, found true"),
        ({"replicas": 2.5}, "replicas: expected an integer >= 0, found 2.5"),
        ({"replicas": 10**30}, "replicas: expected at most 1000 replicas, found an integer of more than 64 bits"),
        ({"request_timeout_s": float("nan")}, f"request_timeout_s: {SECONDS} 0.001 to 86400, found .nan"),
        # Bounds.
        ({"replicas": -1}, "replicas: expected an integer >= 0, found -1"),
        ({"replicas": 1001}, "replicas: expected at most 1000 replicas, found 1001"),
        ({"allow": ["fe80::1%eth0"]}, "allow[0]: expected an address or a network, such as 10.0.0.0/8 "),
        ({"max_queued_requests": -2}, "max_queued_requests: expected an integer from -1 to 1000000, found -2"),
        ({"graceful_shutdown_wait_loop_s": 0}, f"graceful_shutdown_wait_loop_s: {SECONDS} 0.25 to 86400, found 0"),
        # Keys that do not exist, and those of other systems or earlier versions.
        ({"replcas": 2}, 'replcas: unknown key; did you mean "replicas"?'),
        (
            {"zz": 2},
            "zz: unknown key; known keys: user_config, strip_prefix, streams_requests, startup, shared_memory, ",
        ),
        ({"a b\n": 2}, '"a b\\n": unknown key; known keys: auth, debug, allow, health, canary, startup and '),
        ({"health": {"probe": {"prt": 1}}}, 'health.probe.prt: unknown key; did you mean "port"?'),
        ({"logging": {"logs_dir": "/var/log"}}, "logging.logs_dir: unknown key; a replica writes to standard error"),
        ({"logging_config": {}}, "logging_config: unknown key; write logging"),
        ({"readiness": {}}, "readiness: unknown key; write health, with path and port in health.probe"),
        ({"health": {"path": "/health"}}, "health.path: unknown key; write health.probe.path"),
        ({"startup_timeout_s": 60}, "startup_timeout_s: unknown key; write startup.deadline_s"),
        ({"health_check_period_s": 10}, "health_check_period_s: unknown key; write health.period_s"),
        ({"workers": 4}, "workers: unknown key; write replicas: HAProxy spreads requests over as many ingress"),
        # Sizes.
        ({"shared_memory": "2GiB"}, 'shared_memory: expected a mapping, found "2GiB"'),
        ({"shared_memory": {"size": "512"}}, f'shared_memory.size: {A_SIZE}, or 0 (none), found "512"'),
        ({"shared_memory": {"size": False}}, f"shared_memory.size: {A_SIZE}, or 0 (none), found false"),
        ({"shared_memory": {"threshold": "1k"}}, 'shared_memory.threshold: expected a size from "4KiB" to "1TiB" such'),
        # Policies of callers.
        ({"router": {"policy": "pow2"}}, f"router.policy: {A_ROUTER}"),
        ({"router": {"policy_kwargs": {"a-b": 1}}}, f"router.policy_kwargs: {KWARGS}, found a mapping"),
        ({"router": LONG_KWARGS}, "router.policy_kwargs: expected at most 4096 bytes as JSON, since every caller gets"),
    ],
)
def test_wrong_keys_and_values(x_serve: dict[Any, Any], problem: str) -> None:
    refused(f"x-serve.{problem}", x_serve)


def test_the_key_closest_to_an_unknown_one_is_named_alone() -> None:
    found = problems({"request_timeout": 2})
    assert found == ['services.ranker.x-serve.request_timeout: unknown key; did you mean "request_timeout_s"?']


@pytest.mark.parametrize(("block", "found"), [("on", '"on"'), ([], "a list"), (True, "true"), (None, "null")])
def test_a_block_that_is_no_mapping(block: Any, found: str) -> None:
    written = {**service(), "x-serve": block}
    assert problems_of(config(ranker=written)) == [
        f'services.ranker.x-serve: expected a mapping of settings ("x-serve: {{}}" takes every default), found {found}'
    ]


SYNTAX = 'expected a path that starts with "/" and has only letters, digits and "/-_.~" (at most 200)'


@pytest.mark.parametrize(
    ("route", "problem"),
    [
        *(
            (route, f"{SYNTAX}, found ")
            for route in ("echo", "", "/a b", "/a\n", '/a"', "/a'", "/a#", "/$HOME", "/{x}", "/%[src]", "/a\\", "/ä")
        ),
        ("/a\nuse_backend x", f'{SYNTAX}, found "/a\\nuse_backend x"'),
        ("/" + "a" * 200, f'{SYNTAX}, found "/{"a" * 74}..."'),
        ("/echo/", 'expected a path without a slash at its end ("/echo"), found "/echo/"'),
        ("/a//b", 'expected a path without empty, "." and ".." parts, found "/a//b"'),
        ("/-/healthz", 'expected a path outside "/-/" (Pierhead answers there itself), found "/-/healthz"'),
    ],
)
def test_wrong_routes(route: str, problem: str) -> None:
    refused(f"x-serve.route: {problem}", {"route": route})


@pytest.mark.parametrize("route", ["/", "/a", "/a/b-c_d.e~f", "/-x"])
def test_right_routes(route: str) -> None:
    assert ranker({"route": route}).route == route


A_PROBE = 'expected a path that starts with "/" and has only letters, digits and "/-_.~?=&" (at most 200), found "'
A_NAME = 'expected the full name of a gRPC service such as "pierhead.echo.v1.Echo", found "'


@pytest.mark.parametrize("path", ["health", "/a b", "/a\n", "/%[src]", '/"'])
def test_wrong_probe_paths(path: str) -> None:
    refused(f"x-serve.health.probe.path: {A_PROBE}", {"protocol": "http", "health": {"probe": {"path": path}}})


@pytest.mark.parametrize("name", ["", "a b", "a.B\n", "/a.B", "a..B", "1a.B", "a.B/Rank"])
def test_wrong_grpc_names(name: str) -> None:
    refused(f"x-serve.grpc_services[0]: {A_NAME}", {"grpc_services": [name]})


@pytest.mark.parametrize("name", ["", "a b", "-a", "a\n", "a/b", "ä", "a" * 64, 'a"'])
def test_wrong_applications(name: str) -> None:
    refused(
        'x-serve.application: expected a name of up to 63 letters, digits and "-_.", which starts with a letter or',
        {"grpc_services": ["a.B"], "application": name},
    )


# ----------------------------------------------------------------------------------------- keys that do not go together

NEEDS_GRPC = {"route": "/a", "run_user_code_in_separate_thread": True}
FOREIGN_THREAD = {**AN_IMAGE, "protocol": "grpc", "run_user_code_in_separate_thread": True}


@pytest.mark.parametrize(
    ("x_serve", "problem"),
    [
        (NEEDS_GRPC, 'run_user_code_in_separate_thread: needs protocol "grpc": the handlers of an HTTP application'),
        (FOREIGN_THREAD, f"run_user_code_in_separate_thread: {UNMANAGED}"),
        ({**AN_IMAGE, "debug": True}, f"debug: {UNMANAGED}"),
        (
            {**AN_IMAGE, "logging": {"log_level": "info"}},
            f"logging.log_level: {UNMANAGED}: its own program decides what it logs",
        ),
        ({**AN_IMAGE, "health": {**AN_IMAGE["health"], "progress_timeout_s": 5}}, "health.progress_timeout_s: has no"),
        ({**AN_IMAGE, "shared_memory": {}}, "shared_memory: needs an image that is built on Pierhead's runtime"),
        ({"protocol": "grpc", "route": "/a"}, "route: a route takes HTTP requests and this service has protocol"),
        ({"route": "/a", "grpc_services": ["a.B"]}, 'grpc_services: gRPC needs protocol "grpc" and this service has'),
        ({"application": "eu"}, "application: is how gRPC clients choose between services, and this one has no"),
        ({"router": {"replica_header": True}}, "router.replica_header: is for requests from outside, and none come"),
        ({"auth": "key"}, "auth: is for requests from outside, and none come"),
        ({"allow": ["10.0.0.0/8"]}, "allow: is for requests from outside, and none come"),
        ({"host": "shop.example"}, "host: is for requests to a route, and this service has none"),
        ({"auth": "jwt"}, "auth: is for requests from outside, and none come"),
        ({"auth": "basic"}, 'auth: expected "none" or "key" or "jwt", found "basic"'),
        ({"strip_prefix": True}, "strip_prefix: strips the route from the path, and this service has no route"),
        ({"port": 9100}, "port: 9100 is the admin port of a managed replica; choose another one"),
        ({"managed": False}, "health.probe.path: expected a path, found null: an image that is not built on"),
        ({"health": {"probe": {"port": 1}}}, "health.probe.port: has no effect without health.probe.path; write both"),
        ({"health": {"probe": {"path": "/ready"}}}, "health.probe.port: expected a port, found null: the probe uses"),
        ({**AN_IMAGE, "metrics": {"path": "/m"}}, "metrics.port: expected a port, found null: metrics.path has no"),
        (
            {"autoscale": {"max": 4}, "replicas": 2},
            "replicas: has no effect together with autoscale, which decides the number",
        ),
        ({"grpc_services": ["a.B", "a.B"]}, 'grpc_services[1]: "a.B" is named twice'),
        ({"rollout": {"max_surge": 0}}, "rollout.max_surge: expected at least 1, found 0, while max_unavailable is 0"),
    ],
)
def test_keys_that_do_not_go_together(x_serve: dict[str, Any], problem: str) -> None:
    refused(f"x-serve.{problem}", x_serve)


GRACE = "services.ranker.stop_grace_period: expected more than x-serve.graceful_shutdown_timeout_s"
DRAIN = "services.ranker.x-serve.graceful_shutdown_timeout_s: expected more than request_timeout_s"
STAY = "services.ranker.x-serve.graceful_shutdown_wait_loop_s: expected less than graceful_shutdown_timeout_s"


@pytest.mark.parametrize(
    ("x_serve", "grace", "expected"),
    [
        ({"request_timeout_s": 30, "graceful_shutdown_timeout_s": 60}, "1m0s", [(f"{GRACE} (60 s)", "is 70 s)")]),
        ({"request_timeout_s": 60, "graceful_shutdown_timeout_s": 60}, None, [(f"{DRAIN} (60 s)", "is 65 s)")]),
        ({}, "40s", [(f"{GRACE} (65 s, 5 s more than request_timeout_s)", "is 75 s)")]),
        (
            {"graceful_shutdown_wait_loop_s": 65},
            None,
            [(f"{STAY} (65 s, 5 s more than request_timeout_s)", "or raise graceful_shutdown_timeout_s")],
        ),
        (
            {"request_timeout_s": 30, "graceful_shutdown_timeout_s": 20, "graceful_shutdown_wait_loop_s": 25},
            "10s",
            [
                (f"{STAY} (20 s)", "or raise graceful_shutdown_timeout_s"),
                (f"{DRAIN} (30 s)", "is 35 s)"),
                (f"{GRACE} (20 s)", "is 30 s)"),
            ],
        ),
    ],
    ids=["grace period", "drain", "grace period of a derived drain", "stay", "every link"],
)
def test_each_timeout_must_be_longer_than_the_one_that_it_covers(
    x_serve: dict[str, Any], grace: str | None, expected: list[tuple[str, str]]
) -> None:
    found = problems(x_serve, stop_grace_period=grace)
    assert [problem.partition(", found")[0] for problem in found] == [begin for begin, _ in expected]
    assert all(problem.endswith(end) for problem, (_, end) in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("definition", "found"),
    [
        ({"scale": 0}, None),
        ({"scale": None, "deploy": {"replicas": 0}}, None),
        ({"scale": None}, "nothing, which means 1"),
        ({"scale": None, "deploy": {"replicas": 2}}, "2"),
    ],
)
def test_compose_must_start_nothing(definition: dict[str, Any], found: str | None) -> None:
    expected = f"services.ranker.scale: expected 0, found {found}: Compose would start containers without GPUs of their"
    told = problems({}, **definition)
    assert [line[: len(expected)] for line in told] == ([] if found is None else [expected])


# ---------------------------------------------------------------------------------------------------- across services

BOTH = 'write x-serve.application into both, and clients choose one of them by the metadata "application"'
SAME = 'x-serve.application is "us", too; clients choose by it, so write another name into one of the two'


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        (
            ({"route": "/x"}, {"route": "/x/y"}, {"route": "/x"}),
            (
                'c.x-serve.route: route "/x" is already taken by service "a"; each route belongs to one service, '
                "or give each a host of its own"
            ),
        ),
        (
            ({"grpc_services": ["p.A", "p.B"]}, {"grpc_services": ["p.C", "p.B"]}, {}),
            f'b.x-serve.grpc_services[1]: "p.B" is already taken by service "a"; {BOTH}',
        ),
        (
            ({"grpc_services": ["p.A"], "application": "eu"}, {"grpc_services": ["p.A"]}, {}),
            f'b.x-serve.grpc_services[0]: "p.A" is already taken by service "a"; {BOTH}',
        ),
        (
            (
                {"grpc_services": ["p.A"], "application": "eu"},
                {"grpc_services": ["p.A"], "application": "us"},
                {"grpc_services": ["p.A"], "application": "us"},
            ),
            f'c.x-serve.grpc_services[0]: "p.A" is already taken by service "b", whose {SAME}',
        ),
    ],
)
def test_a_name_used_twice_is_a_problem_with_both_services(blocks: tuple[dict[str, Any], ...], problem: str) -> None:
    services = {name: service(block) for name, block in zip("abc", blocks, strict=True)}
    assert problems_of(config(**services)) == [f"services.{problem}"]


def test_services_share_a_grpc_service_by_their_applications() -> None:
    blocks: dict[str, dict[str, Any]] = {
        "a": {"grpc_services": ["p.A", "p.B"], "application": "eu"},
        "b": {"grpc_services": ["p.A"], "application": "us-1.x"},
        "c": {"grpc_services": ["p.C"], "application": "eu"},
    }
    found = read(**{name: service(block) for name, block in blocks.items()}).services
    assert {name: found[name].application for name in found} == {"a": "eu", "b": "us-1.x", "c": "eu"}


def test_all_problems_are_reported_at_once() -> None:
    whole = config(
        a=service({"route": "/x", "replicas": "two", "zz": 1}, scale=1),
        b=service({"route": "/x", "strip_prefix": 3}),
        c=service({"route": "/y"}, ports=[]),
        d=service({"route": "/y"}),
    )
    assert [problem.split(":")[0].removeprefix("services.") for problem in problems_of(whole)] == [
        "a.scale",
        "a.x-serve.replicas",
        "a.x-serve.zz",
        "b.x-serve.strip_prefix",
        "c.ports",
        "d.x-serve.route",
    ]


@pytest.mark.parametrize("name", ["Ranker", "my_ranker", "my.ranker", "-a", "a-", "a" * 41, "a\nserver x"])
def test_names_that_dns_or_haproxy_do_not_take(name: str) -> None:
    (problem,) = problems_of({**config(), "services": {name: service()}})
    assert problem.startswith('services."a\\nserver x":' if "\n" in name else f"services.{name}:")
    assert ": expected a service name of lower-case letters, digits and hyphens (at most 40, no hyphen at" in problem


@pytest.mark.parametrize(
    ("whole", "problem"),
    [
        (None, "compose file: expected a mapping, found null"),
        ({"services": ["a"]}, "services: expected a mapping, found a list"),
        ({"services": {}, "volumes": 3}, "volumes: expected a mapping, found 3"),
    ],
)
def test_a_file_that_is_no_project(whole: Any, problem: str) -> None:
    assert problems_of(whole) == [problem]


def test_a_project_name_that_makes_no_container_name() -> None:
    (problem,) = problems_of(config(), project="My Shop")
    assert problem.startswith("name: expected a project name of lower-case letters, digits, hyphens and underscores, ")
