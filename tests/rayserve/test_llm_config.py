"""Ray Serve LLM's LLMConfig: what each field is in Pierhead, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pierhead import llm_config as own
from pierhead.rayserve.config import AutoscalingConfig
from pierhead.rayserve.llm import (
    CloudMirrorConfig,
    InputModality,
    LLMConfig,
    LLMServingArgs,
    LoraConfig,
    ModelLoadingConfig,
)
from pierhead.rayserve.llm.config import DPServingArgs, LLMParts, PDServingArgs, of_x_serve, parts_of
from pierhead.rayserve.pickles import copied
from pydantic import ValidationError

MODEL = {"model_id": "qwen", "model_source": "Qwen/Qwen2.5-0.5B-Instruct"}
LORA: dict[str, Any] = {"dynamic_lora_loading_path": "s3://bucket/loras/"}
NIXL = {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}
KV_AWARE = "ray.serve.llm.request_router.KVAwareRouter"


def made(**fields: Any) -> LLMConfig:
    return LLMConfig(**{"model_loading_config": MODEL, **fields})


def parts(**fields: Any) -> LLMParts:
    return parts_of(made(**fields))


def gpus(found: LLMParts) -> float:
    return float(found.options.get("ray_actor_options", {}).get("num_gpus", 0))


@pytest.mark.parametrize(
    ("loading", "found"),
    [
        (MODEL, MODEL),
        (ModelLoadingConfig(model_id="qwen"), {"model_id": "qwen", "model_source": None}),
        (
            {"model_id": "q", "model_source": {"bucket_uri": "s3://models/qwen"}},
            {"model_id": "q", "model_source": "s3://models/qwen"},
        ),
        (
            {"model_id": "q", "model_source": CloudMirrorConfig(bucket_uri="gs://models/qwen")},
            {"model_id": "q", "model_source": "gs://models/qwen"},
        ),
        ({"model_id": "q", "model_source": CloudMirrorConfig()}, {"model_id": "q", "model_source": None}),
        ({**MODEL, "input_modality": InputModality.MULTIMODAL}, MODEL),
        ({**MODEL, "input_modality": "image"}, MODEL),
    ],
)
def test_where_the_model_comes_from(loading: Any, found: dict[str, Any]) -> None:
    assert parts(model_loading_config=loading).config.model_loading.model_dump() == found


@pytest.mark.parametrize(
    ("fields", "block", "count"),
    [
        ({}, {}, 1),
        ({"accelerator_type": "A10G"}, {"accelerator_type": "A10G"}, 1),
        ({"accelerator_type": "A100-80G"}, {"accelerator_type": "A100"}, 1),
        ({"engine_kwargs": {"tensor_parallel_size": 4}}, {"tensor_parallel_size": 4}, 4),
        (
            {"engine_kwargs": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}},
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            4,
        ),
        (
            {"engine_kwargs": {"tensor_parallel_size": 2, "data_parallel_size": 3}},
            {"tensor_parallel_size": 2, "engine_kwargs": {"data_parallel_size": 3}},
            6,
        ),
        ({"engine_kwargs": {"task": "multimodal", "max_model_len": 99}}, {"engine_kwargs": {"max_model_len": 99}}, 1),
        (
            {"model_loading_config": {**MODEL, "tokenizer_source": "Qwen/Other"}},
            {"engine_kwargs": {"tokenizer": "Qwen/Other"}},
            1,
        ),
        ({"placement_group_config": {"bundle_per_worker": {"GPU": 1, "CPU": 4}}}, {}, 1),
        ({"placement_group_config": {"bundles": [{"GPU": 1}, {"CPU": 2}], "strategy": "PACK"}}, {}, 1),
        (
            {
                "engine_kwargs": {"tensor_parallel_size": 2},
                "placement_group_config": {"bundles": [{"GPU": 1, "CPU": 1}] * 2},
            },
            {"tensor_parallel_size": 2},
            2,
        ),
        ({"placement_group_config": {"bundle_per_worker": {"GPU": 0.45}}}, {}, 0.45),
        ({"placement_group_config": {"bundles": [{"CPU": 8}]}}, {}, 0),
        ({"accelerator_config": {"kind": "cpu"}}, {}, 0),
        ({"llm_engine": "mock", "accelerator_type": "L4"}, {"engine": "mock"}, 0),
        ({"llm_engine": "my_package.engine:MyEngine"}, {"engine": "my_package.engine:MyEngine"}, 1),
        (
            {"lora_config": LORA, "engine_kwargs": {"enable_lora": True, "max_lora_rank": 64}},
            {
                "lora": {"dynamic_lora_loading_path": "s3://bucket/loras", "max_num_adapters_per_replica": 16},
                "engine_kwargs": {"max_lora_rank": 64},
            },
            1,
        ),
        (
            {"lora_config": LoraConfig(**LORA, max_num_adapters_per_replica=2), "engine_kwargs": {"max_loras": 4}},
            {"lora": {"dynamic_lora_loading_path": "s3://bucket/loras", "max_num_adapters_per_replica": 4}},
            1,
        ),
        (
            {"engine_kwargs": {"distributed_executor_backend": "mp"}},
            {"engine_kwargs": {"distributed_executor_backend": "mp"}},
            1,
        ),
    ],
)
def test_what_the_engine_gets(fields: dict[str, Any], block: dict[str, Any], count: float) -> None:
    found = parts(**fields)
    written = found.config.model_dump(exclude_defaults=True)
    del written["model_loading"]
    assert (written, gpus(found)) == (block, count)


@pytest.mark.parametrize(
    ("deployment", "options"),
    [
        ({}, {"max_ongoing_requests": 256}),
        ({"num_replicas": 3, "max_ongoing_requests": 8}, {"num_replicas": 3, "max_ongoing_requests": 8}),
        (
            {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
            {
                "max_ongoing_requests": 256,
                "autoscaling_config": {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 64},
            },
        ),
        (
            {"autoscaling_config": {"max_replicas": 2, "target_ongoing_requests": 7}},
            {"max_ongoing_requests": 256, "autoscaling_config": {"max_replicas": 2, "target_ongoing_requests": 7}},
        ),
    ],
)
def test_options_of_the_deployment(deployment: dict[str, Any], options: dict[str, Any]) -> None:
    assert parts(llm_engine="mock", deployment_config=deployment).options == options


def test_an_object_of_the_options_stays_one() -> None:
    scaling = AutoscalingConfig(max_replicas=2)
    assert parts(deployment_config={"autoscaling_config": scaling}).options["autoscaling_config"] is scaling


def test_what_changes_nothing_is_named() -> None:
    found = parts(
        runtime_env={"env_vars": {"HF_TOKEN": "t", "N": 1}, "pip": ["x"], "working_dir": "."},
        experimental_configs={"stream_batching_interval_ms": 10, "other": 1},
        log_engine_metrics=False,
        lora_config={**LORA, "max_download_tries": 9},
        placement_group_config={"bundles": [{"GPU": 1}], "strategy": "SPREAD"},
    )
    assert found.environment == {"HF_TOKEN": "t", "N": "1"}
    assert found.notes == {
        "experimental_configs.stream_batching_interval_ms": "the tokens of one step of the engine travel together at "
        "once",
        "experimental_configs.other": "there is no counterpart",
        "runtime_env.pip": "write it into the Dockerfile",
        "runtime_env.working_dir": "the image holds the code",
        "log_engine_metrics": "the engine's metrics are always exposed",
        "lora_config.max_download_tries": "a load that fails fails its request, and the next request tries again",
        "placement_group_config.strategy": "a replica is one container",
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"llm_engine": "SGLang"}, "llm_engine: there is no engine SGLang here; run its server, and write llm_engine="),
        ({"engine_kwargs": {"model": "x"}}, r"engine_kwargs.model is not supported: write model_loading_config"),
        ({"engine_kwargs": {"served_model_name": "x"}}, r"engine_kwargs.served_model_name is not supported: write mod"),
        ({"engine_kwargs": {"distributed_executor_backend": "ray"}}, "distributed_executor_backend is not supported: "),
        ({"engine_kwargs": {"data_parallel_backend": "ray"}}, "engine_kwargs.data_parallel_backend is not supported: "),
        ({"engine_kwargs": {"disable_log_stats": True}}, "disable_log_stats cannot be set to True when log_engine_met"),
        ({"engine_kwargs": {"enable_lora": True}}, "lora_config.dynamic_lora_loading_path: expected where the adapter"),
        ({"engine_kwargs": {"tensor_parallel_size": 99}}, "tensor_parallel_size: Input should be less than or equal t"),
        ({"lora_config": {}}, "lora_config.dynamic_lora_loading_path: expected where the adapters are, found nothing"),
        ({"accelerator_type": "TPU-V6E"}, "accelerator_type: TPUs are not supported: engines run on GPUs and CPUs her"),
        ({"accelerator_config": {"kind": "tpu"}}, "accelerator_type: TPUs are not supported"),
        ({"placement_group_config": {"bundles": [{"TPU": 4}]}}, "placement_group_config: TPUs are not supported"),
        ({"placement_group_config": {"strategy": "PACK"}}, "placement_group_config: expected either bundle_per_worker"),
        (
            {"placement_group_config": {"bundles": [{"GPU": 1}] * 2, "strategy": "STRICT_SPREAD"}},
            "placement_group_config.strategy STRICT_SPREAD is not supported: a replica is one container on one mach",
        ),
        ({"placement_group_config": {"bundles": [{"GPU": 1}] * 2}}, "has 2 GPUs and the model is spread over 1 "),
        ({"placement_group_config": {"bundles": [{"GPU": 0.5}] * 3}}, "a share of a GPU is for a model on one GPU"),
        (
            {"placement_group_config": {"bundles": [{"CPU": 1}]}, "accelerator_type": "L4"},
            "accelerator_type='L4' cannot be used with CPU-only configurations: leave it out, or write GPU into placem",
        ),
        ({"callback_config": {"callback_class": "a.B"}}, "callback_config.callback_class is not supported: there are "),
        ({"experimental_configs": {"num_router_replicas": 1}}, "has been renamed to 'num_ingress_replicas'"),
        ({"deployment_config": {"placement_group_bundles": []}}, "deployment_config.placement_group_bundles is not su"),
        ({"deployment_config": {"gang_scheduling_config": {"gang_size": 2}}}, "deployment_config: @serve.deployment: "),
        (
            {"deployment_config": {"request_router_config": {"request_router_class": KV_AWARE}}},
            "deployment_config: request_router_config: KVAwareRouter is not supported: nothing here follows",
        ),
        ({"deployment_config": {"replicas": 2}}, "deployment_config: @serve.deployment: replicas is not one of auto"),
        ({"server_cls": "there.is.none:Server"}, "there.is.none:Server: expected a class as module:Class; No module n"),
        ({"server_cls": "json"}, "json: expected a class as module:Class; Empty module name"),
        (
            {"server_cls": "ray.llm._internal.x:SGLangServer"},
            "is Ray's own: name a class of yours, derived from LLMServ",
        ),
        ({"server_cls": "json:"}, "json:: expected a class as module:Class; module 'json' has no attribute ''"),
        (
            {"model_loading_config": {"model_id": "q", "model_source": {"bucket_uri": "azure://a/b"}}},
            "model_source: azure:// is not supported: copy the model to s3:// or gs://, or mount it as a directory",
        ),
        (
            {
                "model_loading_config": {
                    "model_id": "q",
                    "model_source": {
                        "bucket_uri": "s3://bucket/b",
                        "extra_files": [{"bucket_uri": "s3://bucket/c", "destination_path": "/c"}],
                    },
                }
            },
            "model_source.extra_files is not supported: put the files into the bucket of the model",
        ),
        ({"model_loading_config": {"model_id": "a b"}}, "model_loading.model_id: expected a name of letters, digits a"),
        ({"gpus": 1}, "Extra inputs are not permitted"),
    ],
)
def test_what_is_refused_says_what_to_do(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        made(**fields)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["apply_checkpoint_info", "setup_engine_backend", "kv_connector_backend"])
def test_what_only_ray_s_nodes_call_is_not_there(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"LLMConfig\.{name} is not supported: the engine "):
        getattr(made(), name)


def test_it_can_be_changed_and_travels() -> None:
    config = made()
    config.update_engine_kwargs(max_model_len=99)
    config.deployment_config["num_replicas"] = 2
    assert config.get_engine_config().engine_kwargs == {"max_model_len": 99}
    assert (config.model_id, config.max_request_context_length, config.input_modality) == ("qwen", 99, "text")
    assert parts_of(config).options["num_replicas"] == 2
    assert copied(config) == config


def test_a_replica_s_config_is_that_of_ray_serve_llm() -> None:
    written = own.LLMConfig.model_validate({
        "engine": "my_package.engine:MyEngine",
        "server_cls": "my_package.server:MyServer",
        "model_loading": MODEL,
        "accelerator_type": "L4",
        "tensor_parallel_size": 2,
        "engine_kwargs": {"max_model_len": 8, "disable_log_stats": True},
        "lora": {"dynamic_lora_loading_path": "/loras", "max_num_adapters_per_replica": 3, "adapters": ["french"]},
        "stall_timeout_s": 9.0,
    })  # fmt: skip
    config = of_x_serve(written)
    assert (config.model_id, config.engine_kwargs["tensor_parallel_size"], config.accelerator_type) == ("qwen", 2, "L4")
    assert config.lora_config == LoraConfig(dynamic_lora_loading_path="/loras", max_num_adapters_per_replica=3)
    assert config.get_engine_config() == copied(config).get_engine_config() == written
    config.update_engine_kwargs(max_model_len=99)  # as a server's constructor may
    assert config.get_engine_config().engine_kwargs["max_model_len"] == 99


def test_args_of_build_openai_app(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump({"model_loading_config": {"model_id": "third"}}))
    configs = [made(), {"model_loading_config": {"model_id": "second"}}, str(file)]
    found = LLMServingArgs.model_validate({"llm_configs": configs})
    assert found.llm_configs[0] is configs[0]
    assert [each.model_id for each in found.llm_configs] == ["qwen", "second", "third"]


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ([], "List of models is empty"),
        ([made(), made()], "Duplicate models found"),
        (["there/is/none.yaml"], "Could not load model config from there/is/none.yaml, as the file does not exist"),
    ],
)
def test_args_that_cannot_be(configs: list[Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        LLMServingArgs.model_validate({"llm_configs": configs})


def test_prefill_and_decode_belong_together() -> None:
    one, other = made(engine_kwargs=NIXL), made(engine_kwargs=NIXL, model_loading_config={"model_id": "other"})
    assert PDServingArgs(prefill_config=one, decode_config=one).prefill_config is one
    assert DPServingArgs.model_validate({"llm_config": {"model_loading_config": MODEL}}).llm_config == made()
    with pytest.raises(ValidationError, match="P/D model id mismatch"):
        PDServingArgs(prefill_config=one, decode_config=other)
    with pytest.raises(ValidationError, match="kv_transfer_config is required"):
        PDServingArgs(prefill_config=made(), decode_config=made())
