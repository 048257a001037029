"""`pierhead import ray` of applications of language models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pierhead import llm_config as own
from pierhead.classes.target import imported
from pierhead.llm.server.service import LLMService
from pierhead.llm.v1.llm_pb2 import LLMRequest
from pierhead.metrics import RuntimeMetrics
from pierhead.rayserve.exceptions import RayServeException
from pierhead.rayserve.import_ray import compose_of
from pierhead.rayserve.services import bound_of
from pierhead.runner.options import options_of

from controller.files.parse import parse
from tests.harness.imports import ROOT

SEED = """
applications:
- args:
    llm_configs:
    - model_loading_config:
        model_id: qwen-0.5b
        model_source: Qwen/Qwen2.5-0.5B-Instruct
      accelerator_type: A10G
      deployment_config:
        autoscaling_config: {min_replicas: 1, max_replicas: 2}
      runtime_env: {env_vars: {TOKEN: a$b}, pip: [x]}
    - model_loading_config: {model_id: Large, model_source: {bucket_uri: "s3://models/large"}}
      engine_kwargs: {tensor_parallel_size: 2, max_model_len: 8192}
      lora_config: {dynamic_lora_loading_path: "s3://models/loras"}
      deployment_config: {num_replicas: 3, max_ongoing_requests: 64}
  import_path: ray.serve.llm:build_openai_app
  name: llm_app
  route_prefix: /
"""
BUILDER = """
applications:
- args:
    llm_config:
      model_loading_config:
        model_id: qwen-0.5b
        model_source: Qwen/Qwen2.5-0.5B-Instruct
      accelerator_type: A10G
      deployment_config:
        autoscaling_config:
          min_replicas: 1
          max_replicas: 2
  import_path: builder:my_build_function
  name: custom_llm_deployment
  route_prefix: /
"""


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "rayserve" / "llm_apps"))


def services(text: str) -> tuple[dict[str, Any], list[str]]:
    """The services, which the controller can read, and what was left out."""
    written, notes = compose_of(text)
    document = yaml.safe_load(written)
    checked = {name: {**each, "volumes": []} for name, each in document["services"].items()}
    assert set(parse("app", {**document, "services": checked}).services) == set(checked)
    return document["services"], notes


def gpus(service: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = service["deploy"]["resources"]["reservations"]["devices"]
    return found


def test_the_seed_s_yaml_becomes_the_stack_s_own_services() -> None:
    found, notes = services(SEED)
    assert list(found) == ["llm-gateway", "llm-qwen-0-5b", "llm-large"]
    gateway, qwen, large = found.values()
    assert gateway["environment"] == {
        "PIERHEAD_LLM_MODELS_OF_LLM_QWEN_0_5B": '{"qwen-0.5b": {"service": "llm-qwen-0-5b"}}',
        "PIERHEAD_LLM_MODELS_OF_LLM_LARGE": '{"Large": {"service": "llm-large"}}',
    }
    assert gateway["x-serve"] == {
        "replicas": 1,
        "route": "/",
        "max_ongoing_requests": 4096,
        "request_timeout_s": 600.0,
        "shared_memory": {"size": "1MiB"},
    }
    assert qwen["x-serve"] == {
        "max_ongoing_requests": 256,
        "request_timeout_s": 600.0,
        "router": {"policy": "prefix"},
        "shared_memory": {"size": "1MiB"},
        "autoscale": {"min": 1, "max": 2, "target_ongoing_requests": 64.0},
        "llm": {
            "model_loading": {"model_id": "qwen-0.5b", "model_source": "Qwen/Qwen2.5-0.5B-Instruct"},
            "accelerator_type": "A10G",
        },
    }
    assert qwen["environment"]["TOKEN"] == "a$$b"
    assert gpus(qwen) == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    assert (large["x-serve"]["replicas"], large["x-serve"]["max_ongoing_requests"]) == (3, 64)
    assert large["x-serve"]["llm"] == {
        "model_loading": {"model_id": "Large", "model_source": "s3://models/large"},
        "tensor_parallel_size": 2,
        "engine_kwargs": {"max_model_len": 8192},
        "lora": {"dynamic_lora_loading_path": "s3://models/loras", "max_num_adapters_per_replica": 16},
    }
    assert gpus(large) == [{"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}]
    assert notes == ["applications.llm_app.qwen-0.5b.runtime_env.pip: write it into the Dockerfile"]


def test_what_the_yaml_says_of_a_deployment_counts() -> None:
    more = """
  deployments:
  - {name: "LLMServer:Large", num_replicas: 2, ray_actor_options: {num_cpus: 8}}
  - {name: OpenAiIngress, num_replicas: 2}
"""
    found, _ = services(SEED + more)
    assert (found["llm-large"]["x-serve"]["replicas"], found["llm-gateway"]["x-serve"]["replicas"]) == (2, 2)
    assert found["llm-large"]["deploy"]["resources"]["limits"] == {"cpus": "8"}
    assert gpus(found["llm-large"])[0]["count"] == 2


def test_a_server_without_an_ingress_gets_the_gateway() -> None:
    found, _ = services(BUILDER)
    assert list(found) == ["llm-gateway", "llm-qwen-0-5b"]
    assert found["llm-gateway"]["x-serve"]["route"] == "/"
    assert "route" not in found["llm-qwen-0-5b"]["x-serve"]


def test_prefill_and_decode_are_services_of_their_own() -> None:
    config = """
      model_loading_config: {model_id: qwen}
      engine_kwargs: {kv_transfer_config: {kv_connector: NixlConnector, kv_role: kv_both}}
"""
    text = f"""
applications:
- name: llm
  import_path: ray.serve.llm:build_pd_openai_app
  args:
    prefill_config: {config}
    decode_config: {config}
"""
    found, _ = services(text)
    assert list(found) == ["llm-gateway", "llm-prefill-qwen", "llm-decode-qwen"]
    models = '{"qwen": {"service": "llm-decode-qwen", "prefill": "llm-prefill-qwen"}}'
    assert found["llm-gateway"]["environment"]["PIERHEAD_LLM_MODELS_OF_LLM_DECODE_QWEN"] == models


def test_a_share_of_a_gpu_is_a_slot() -> None:
    config = "{model_loading_config: {model_id: q}, placement_group_config: {bundles: [{GPU: 0.4}]}}"
    text = (
        f"applications: [{{name: a, import_path: 'ray.serve.llm:build_dp_openai_app', args: {{llm_config: {config}}}}}]"
    )
    found, _ = services(text)
    assert found["llm-q"]["x-serve"]["gpu"] == {"fraction": 0.4}
    assert "deploy" not in found["llm-q"]


def test_two_applications_have_a_gateway_each() -> None:
    second = SEED.replace("llm_app", "Second App").replace("route_prefix: /", "route_prefix: /second")
    found, _ = services(SEED + second.replace("applications:\n", "").lstrip("\n"))
    assert list(found)[3:] == ["second-app-llm-gateway", "second-app-llm-qwen-0-5b", "second-app-llm-large"]
    gateway = found["second-app-llm-gateway"]
    assert (gateway["x-serve"]["route"], gateway["x-serve"]["strip_prefix"]) == ("/second", True)
    assert '{"Large": {"service": "second-app-llm-large"}}' in gateway["environment"].values()


def test_a_long_answer_has_its_time_in_the_user_s_own_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIERHEAD_PICKLE_SECRET", "x" * 32)
    text, _ = compose_of("applications: [{name: app, import_path: 'custom_server:app'}]")
    blocks = [each["x-serve"] for each in yaml.safe_load(text)["services"].values()]
    assert [each.get("request_timeout_s") for each in blocks] == [600.0, 600.0]
    built = bound_of(imported("custom_server:app"))
    assert [options_of(each, {})["request_timeout_s"] for each in (built, *built.uses())] == [600.0, 600.0]


@pytest.mark.parametrize("target", ["custom_engine:app", "custom_server:app", "multimodal:app"])
def test_classes_of_a_user_s_own_are_in_the_user_s_own_image(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIERHEAD_PICKLE_SECRET", "x" * 32)
    text, _ = compose_of(f"applications: [{{name: app, import_path: '{target}'}}]")
    commands = [each["command"] for each in yaml.safe_load(text)["services"].values()]
    assert commands == [["python", "-m", "pierhead", "serve", target]] * len(commands)


OWN_CLASSES = """
from pierhead.rayserve.llm import LLMServer, OpenAiIngress
from pierhead.rayserve.request_router import RequestRouter

class MyIngress(OpenAiIngress):
    pass

class MyRouter(RequestRouter):
    pass

class NoLLMServer:
    get_deployment_options = LLMServer.get_deployment_options

    def __init__(self, llm_config):
        pass
"""
NAMED = """
applications:
- name: Own App
  import_path: ray.serve.llm:build_openai_app
  args:
    llm_configs:
    - model_loading_config: {model_id: small}
      llm_engine: custom_engine:MyCustomEngine
      server_cls: custom_server.CustomLLMServer
      placement_group_config: {bundles: [{CPU: 1}]}
    - {model_loading_config: {model_id: own}, llm_engine: "custom_engine:MyCustomEngine"}
    - {model_loading_config: {model_id: plain}, server_cls: "ray.serve.llm.deployment:LLMServer"}
"""


def test_classes_that_the_yaml_names_are_language_models_in_the_users_image() -> None:
    found, notes = services(NAMED)
    assert (list(found), notes) == (["llm-gateway", "llm-small", "llm-own", "llm-plain"], [])
    gateway, small, mine, plain = found.values()
    assert gateway["image"].startswith("pierhead/llm-gateway:")
    assert small["x-serve"]["llm"] == {
        "engine": "custom_engine:MyCustomEngine",
        "server_cls": "custom_server:CustomLLMServer",
        "model_loading": {"model_id": "small"},
    }
    assert small["x-serve"]["request_timeout_s"] == 600.0
    assert mine["x-serve"]["llm"]["server_cls"] == "pierhead.rayserve.llm.deployment:LLMServer"
    for service in (small, mine):
        assert service["image"] == "${COMPOSE_PROJECT_NAME}-own-app"
        assert service["command"] == ["python", "-m", "pierhead.llm.server"]
    assert [name for name, each in found.items() if "build" in each] == ["llm-small"]
    assert plain["image"].startswith("pierhead/llm-cuda:")
    assert "server_cls" not in plain["x-serve"]["llm"]


@pytest.mark.parametrize(("number", "words"), [(0, "small: added words"), (1, "own: hello")])
async def test_the_replica_of_such_a_service_shows_them_ray_serve_llm_s_config(
    number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pierhead.replica.starting.START.report", lambda *_: None)
    found, _ = services(NAMED)
    block = list(found.values())[number + 1]["x-serve"]["llm"]
    replica = LLMService(own.LLMConfig.model_validate(block), metrics=RuntimeMetrics())
    await replica.check_health()
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    [reply] = [each async for each in replica.Chat(LLMRequest(body=body), None)]
    assert json.loads(reply.data)["choices"][0]["message"]["content"] == words
    await replica.aclose()


def test_a_class_that_a_builder_is_given_by_its_path_is_used() -> None:
    config = "{model_loading_config: {model_id: q}}"
    args = f"{{llm_config: {config}, deployment_cls: 'custom_server:CustomLLMServer'}}"
    path = "ray.serve.llm:build_llm_deployment"
    found, _ = services(f"applications: [{{name: a, import_path: '{path}', args: {args}}}]")
    assert list(found) == ["llm-gateway", "llm-q"]
    assert found["llm-q"]["x-serve"]["llm"]["server_cls"] == "custom_server:CustomLLMServer"


def test_the_drain_of_a_model_does_not_shorten_its_requests() -> None:
    path = "ray.serve.llm:build_llm_deployment"

    def block(drain_s: int) -> tuple[dict[str, Any], list[str]]:
        args = f"{{llm_config: {{{MODEL}, deployment_config: {{graceful_shutdown_timeout_s: {drain_s}}}}}}}"
        found, notes = services(f"applications: [{{name: a, import_path: '{path}', args: {args}}}]")
        serve: dict[str, Any] = found["llm-q"]["x-serve"]
        return {name: value for name, value in serve.items() if name.endswith("timeout_s")}, notes

    found, [note] = block(300)
    assert found == {"request_timeout_s": 600.0}
    assert note.endswith(".graceful_shutdown_timeout_s: a drain takes request_timeout_s, which is 600 s, and 5 s")
    assert block(900) == ({"request_timeout_s": 600.0, "graceful_shutdown_timeout_s": 900.0}, [])


def test_models_whose_names_make_one_service_name_get_numbers() -> None:
    names = [f"organisation/a-model-of-a-long-name-{size}" for size in ("instruct-7b", "instruct-70b")]
    names.append("Gateway")
    configs = ", ".join(f"{{model_loading_config: {{model_id: {name}}}}}" for name in names)
    args = f"{{llm_configs: [{configs}]}}"
    found, _ = services(f"applications: [{{name: a, import_path: 'ray.serve.llm:build_openai_app', args: {args}}}]")
    made = {name: each["x-serve"]["llm"]["model_loading"]["model_id"] for name, each in list(found.items())[1:]}
    assert list(made.values()) == names
    long = "llm-organisation-a-model-of-a-long-name"
    assert list(made) == [long, f"{long[:38]}-2", "llm-gateway-2"]
    entries = [json.loads(each) for each in found["llm-gateway"]["environment"].values()]
    assert {model: entry["service"] for each in entries for model, entry in each.items()} == {
        model: name for name, model in made.items()
    }
    assert found["llm-gateway"]["depends_on"] == sorted(made)


def test_a_router_s_parameters_are_those_of_the_policy_or_are_named() -> None:
    kwargs = "{imbalanced_threshold: 5, match_rate_threshold: 0.5, eviction_threshold_chars: 10, do_eviction: true}"
    name = "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
    router = f"{{request_router_class: {name}, request_router_kwargs: {kwargs}}}"
    config = f"{{{MODEL}, deployment_config: {{request_router_config: {router}}}}}"
    path = "ray.serve.llm:build_llm_deployment"
    found, notes = services(f"applications: [{{name: a, import_path: '{path}', args: {{llm_config: {config}}}}}]")
    assert found["llm-q"]["x-serve"]["router"] == {
        "policy": "prefix",
        "policy_kwargs": {"imbalance_threshold": 5, "match_rate_threshold": 0.5, "max_chars": 8192},
    }
    assert notes == ["applications.a.q.request_router_kwargs.do_eviction: the policy `prefix` has no such parameter"]


ROUTED_APP = """
from pierhead.rayserve.llm import LLMConfig, build_llm_deployment

kwargs = {{"imbalanced_threshold": float("{threshold}"), "match_rate_threshold": 0.5}}
router = {{
    "request_router_class": "ray.serve.llm.request_router.PrefixCacheAffinityRouter", "request_router_kwargs": kwargs
}}
app = build_llm_deployment(
    LLMConfig(model_loading_config={{"model_id": "q"}}, deployment_config={{"request_router_config": router}})
)
"""


@pytest.mark.parametrize("threshold", ["inf", "0.5", "-1", "nan"])
def test_a_threshold_of_the_router_that_the_policy_does_not_take_is_left_out(
    threshold: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"routed_app_{len(threshold)}{threshold[-1]}"
    text = ROUTED_APP.format(threshold=threshold)
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    found, notes = services(f"applications: [{{name: a, import_path: '{module}:app'}}]")
    assert found["llm-q"]["x-serve"]["router"]["policy_kwargs"] == {"match_rate_threshold": 0.5}
    why = "the policy `prefix` takes a finite number from 1 on; its default is in force"
    assert notes == [f"applications.a.q.request_router_kwargs.imbalanced_threshold: {why}"]


def test_names_that_begin_with_a_long_application_s_name_are_at_most_40_characters_long() -> None:
    path = "ray.serve.llm:build_openai_app"
    args = f"args: {{llm_configs: [{{{MODEL}}}]}}"
    long = "An application with a name that is long"
    found, _ = services(
        f"applications: [{{name: a, import_path: '{path}', {args}}}, "
        f"{{name: {long}, route_prefix: /b, import_path: '{path}', {args}}}]"
    )
    start = "an-application-with-a-name-t"
    assert list(found) == ["llm-gateway", "llm-q", f"{start}-llm-gateway", f"{start}-llm-q"]
    assert max(map(len, found)) == 40


MODEL = "model_loading_config: {model_id: q}"
ROUTED = "deployment_config: {request_router_config: {request_router_class: 'own_classes:MyRouter'}}"


@pytest.mark.parametrize(
    "args",
    [
        f"{{llm_configs: [{{{MODEL}}}], ingress_cls_config: {{ingress_cls: 'own_classes:MyIngress'}}}}",
        f"{{llm_configs: [{{{MODEL}, server_cls: 'own_classes:NoLLMServer'}}]}}",
        f"{{llm_configs: [{{{MODEL}, {ROUTED}}}]}}",
    ],
)
def test_what_no_service_of_the_stack_can_have_runs_as_the_application_itself(
    args: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_classes.py").write_text(OWN_CLASSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PIERHEAD_PICKLE_SECRET", "x" * 32)
    text, _ = compose_of(f"applications: [{{name: a, import_path: 'ray.serve.llm:build_openai_app', args: {args}}}]")
    commands = [each["command"] for each in yaml.safe_load(text)["services"].values()]
    assert [each[:4] for each in commands] == [["python", "-m", "pierhead", "serve"]] * 2


def test_no_secret_is_written_where_nothing_is_pickled(tmp_path: Path) -> None:
    source = tmp_path / "serve.yaml"
    source.write_text(SEED)
    from pierhead.__main__ import main

    main(["import-ray", str(source), "-o", str(tmp_path / "compose.yaml")])
    assert "llm-cache" in yaml.safe_load((tmp_path / "compose.yaml").read_text())["volumes"]
    assert not (tmp_path / ".env").exists()


def test_what_is_no_config_names_the_application() -> None:
    with pytest.raises(RayServeException, match=r"applications\.a: .*llm_engine: there is no engine SGLang here"):
        compose_of(
            "applications: [{name: a, import_path: 'ray.serve.llm:build_openai_app', args: {llm_configs: "
            "[{llm_engine: SGLang, model_loading_config: {model_id: q}}]}}]"
        )
