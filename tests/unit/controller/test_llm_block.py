"""`x-serve.llm`: what is read, what goes with it, what the replica receives, and which GPUs it may have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pierhead.llm_app import llm_service
from pierhead.llm_config import LLMConfig, Lora, ModelLoading

from controller.model.observed import Observed
from controller.model.spec import GpuRequest
from controller.model.world import Gpu
from controller.plan.placement import GpuBudget, Shortage
from tests.unit.controller.compose_configs import problems, ranker

MODEL = {"model_loading": {"model_id": "qwen"}}


def nvidia(count: int) -> dict[str, Any]:
    devices = [{"driver": "nvidia", "capabilities": ["gpu"], "count": count}]
    return {"resources": {"reservations": {"devices": devices}}}


def test_a_replica_receives_the_whole_config_and_only_the_controller_sets_it() -> None:
    lora = {"dynamic_lora_loading_path": "s3://bucket/adapters", "max_num_adapters_per_replica": 4, "adapters": ["fr"]}
    spec = ranker({"llm": {**MODEL, "engine_kwargs": {"max_model_len": 2048}, "stall_timeout_s": 30, "lora": lora}})
    environment = dict(line.split("=", 1) for line in spec.container["Env"])
    assert LLMConfig.model_validate_json(environment["PIERHEAD_LLM_CONFIG"]) == LLMConfig(
        model_loading=ModelLoading(model_id="qwen"),
        engine_kwargs={"max_model_len": 2048},
        stall_timeout_s=30,
        lora=Lora(dynamic_lora_loading_path="s3://bucket/adapters", max_num_adapters_per_replica=4, adapters=["fr"]),
    )
    assert (spec.protocol, spec.gpu, spec.models) == ("grpc", None, ("qwen", "qwen:fr"))
    told = problems({"llm": MODEL}, environment={"PIERHEAD_LLM_CONFIG": "{}"})
    assert told == ["services.ranker.environment.PIERHEAD_LLM_CONFIG: the controller sets this variable; remove it"]


def test_another_config_is_another_version() -> None:
    one, same, other = (
        ranker({"llm": {**MODEL, **more}}) for more in ({}, {"engine": "vllm"}, {"engine_kwargs": {"seed": 1}})
    )
    assert one.definition_hash == same.definition_hash != other.definition_hash


def test_a_model_over_several_gpus_gets_as_many_and_of_its_kind() -> None:
    block = {**MODEL, "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "accelerator_type": "H100"}
    spec = ranker({"llm": block}, deploy=nvidia(4))
    assert spec.gpu == GpuRequest(4, kind="H100")
    other = ranker({"llm": {**block, "accelerator_type": None}}, deploy=nvidia(4))
    assert other.gpu == GpuRequest(4)
    assert other.definition_hash != spec.definition_hash


@pytest.mark.parametrize(
    ("tensor", "pipeline", "kwargs", "gpus"),
    [
        (1, 1, {"data_parallel_size": 2}, 2),
        (2, 1, {"data_parallel_size": 2, "enable_expert_parallel": True}, 4),
        (2, 3, {"data_parallel_size": 4}, 24),
        (4, 1, {"enable_expert_parallel": True}, 4),
    ],
)
def test_every_kind_of_parallel_engine_gets_its_gpus(
    tensor: int, pipeline: int, kwargs: dict[str, Any], gpus: int
) -> None:
    """Experts are spread over the GPUs that tensor and data parallelism have."""
    block = {**MODEL, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "engine_kwargs": kwargs}
    request = ranker({"llm": block}, deploy=nvidia(gpus)).gpu
    assert request == GpuRequest(gpus)
    written = llm_service(LLMConfig.model_validate(block))
    assert written["deploy"] == {
        "resources": {"reservations": {"devices": [{"driver": "nvidia", "count": gpus, "capabilities": ["gpu"]}]}}
    }
    machine = GpuBudget.of(Observed(gpus=(Gpu("GPU-1"),)), 0.0)
    shortage = machine.take("llm", request, ())
    assert isinstance(shortage, Shortage)
    assert shortage.reason.startswith(f"it asks for {gpus} GPUs and 1 of 1 are free")


A_SOURCE = 'model_loading.model_source: expected a directory inside the container ("/models/qwen"), a Hugging Face id'
AN_ENGINE = 'engine: expected "vllm", "openai", "mock", or an import path such as "my_package.engine:MyEngine", found '
NO_SERVER = "engine_kwargs.base_url: expected the address of the server that the engine openai asks, such as "
ADAPTERS = {"dynamic_lora_loading_path": "/adapters"}
LONG_NAMES = [f"{number:0100}" for number in range(700)]


@pytest.mark.parametrize(
    "more",
    [
        {"engine": "mock"},
        {"engine": "openai", "engine_kwargs": {"base_url": "http://sglang:30000/v1"}},
        {"engine": "my_package.engine:MyEngine"},
        {"engine": "engines:Mine"},
    ],
)
def test_engines_that_may_be(more: dict[str, Any]) -> None:
    assert problems({"llm": {**MODEL, **more}}) == []


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"model_loading": None}, ".model_loading: expected a mapping, found null"),
        ({"model_loading": {}}, ".model_loading.model_id: expected a string, found nothing"),
        ({"model_loading": {"model_id": "qwen:fr"}}, ".model_loading.model_id: expected a name of letters, digits and"),
        ({"model_loading": {"model_id": "qwen", "model_source": "./qwen"}}, f".{A_SOURCE}"),
        ({"model_loading": {"model_id": "qwen", "model_source": "s3://B/qwen"}}, f".{A_SOURCE}"),
        ({"engine": "VLLM"}, f'.{AN_ENGINE}"VLLM"'),
        ({"engine": "my_package.engine"}, f'.{AN_ENGINE}"my_package.engine"'),
        ({"engine": "openai"}, f'.{NO_SERVER}"http://sglang:30000/v1", found nothing'),
        ({"engine": "openai", "engine_kwargs": {"base_url": 1}}, f'.{NO_SERVER}"http://sglang:30000/v1", found 1'),
        ({"tensor_parallel_size": 0}, ".tensor_parallel_size: expected an integer from 1 to 64, found 0"),
        ({"engine_kwargs": {"a": "x" * 40_000}}, ".engine_kwargs: expected at most 32768 bytes as JSON (these are 4"),
        ({"engine_kwargs": {"a": {3: "b"}}}, ".engine_kwargs: expected what JSON can hold: text, finite numbers"),
        (
            {"engine_kwargs": {"data_parallel_size": "2"}},
            ".engine_kwargs: expected data_parallel_size as an integer of at",
        ),
        (
            {"engine_kwargs": {"data_parallel_size": 0}},
            ".engine_kwargs: expected data_parallel_size as an integer of at",
        ),
        ({"engine_kwargs": {"a": [float("nan")]}}, ".engine_kwargs: expected what JSON can hold: text, finite"),
        (
            {"lora": {**ADAPTERS, "adapters": ["fr", "de", "fr"]}},
            ".lora: expected max_num_adapters_per_replica of at least 2, as many as adapters names for every replica",
        ),
        (
            {"lora": {**ADAPTERS, "max_num_adapters_per_replica": 1000, "adapters": LONG_NAMES}},
            ": expected at most 65536 bytes as JSON in all (these are 7",
        ),
        ({"lora": {}}, ".lora.dynamic_lora_loading_path: expected a string, found nothing"),
        ({"lora": {**ADAPTERS, "adapters": ["../x"]}}, ".lora.adapters[0]: expected the name of an adapter: letters, "),
        (
            {"model": "qwen"},
            ".model: unknown key; known keys: model_loading, server_cls, tensor_parallel_size, lora, ",
        ),
    ],
)
def test_wrong_keys_and_values(more: dict[str, Any], problem: str) -> None:
    [found] = problems({"llm": {**MODEL, **more}})
    assert found.startswith(f"services.ranker.x-serve.llm{problem}")


@pytest.mark.parametrize(
    ("x_serve", "definition", "problem"),
    [
        ({"llm": MODEL, "route": "/llm"}, {}, 'llm: needs protocol "grpc" and this service has "http" (the default'),
        (
            {"llm": MODEL, "managed": False, "health": {"probe": {"path": "/ready", "port": 80}}},
            {},
            "llm: needs an image that is built on Pierhead's runtime (managed: true), such as pierhead/llm-cuda; an",
        ),
        (
            {"llm": {**MODEL, "tensor_parallel_size": 2}},
            {},
            "llm: is spread over 2 GPUs (tensor_parallel_size x pipeline_parallel_size = 2) and the service asks",
        ),
        (
            {"llm": MODEL},
            {"deploy": nvidia(2)},
            "llm: is spread over 1 GPU (tensor_parallel_size x pipeline_parallel_size = 1) and each replica asks for 2",
        ),
        (
            {"llm": {**MODEL, "engine_kwargs": {"data_parallel_size": 4}}},
            {"deploy": nvidia(1)},
            "llm: is spread over 4 GPUs (tensor_parallel_size x pipeline_parallel_size x data_parallel_size = 4) and ",
        ),
        (
            {"llm": {**MODEL, "accelerator_type": "H100"}},
            {},
            "llm.accelerator_type: says which GPUs and the service asks for none; write deploy.resources.reservations",
        ),
    ],
)
def test_keys_that_do_not_go_together(x_serve: dict[str, Any], definition: dict[str, Any], problem: str) -> None:
    [found] = problems(x_serve, **definition)
    assert found.startswith(f"services.ranker.x-serve.{problem}")


def test_only_gpus_of_the_kind_are_given() -> None:
    names = ("NVIDIA A10", "NVIDIA H100 80GB HBM3", "NVIDIA A10")
    gpus = tuple(Gpu(f"GPU-{number}", name=name) for number, name in enumerate(names, 1))
    budget = GpuBudget.of(Observed(gpus=gpus), 0.0)
    request = GpuRequest(1, kind="h100")
    first = budget.take("llm", request, ())
    assert not isinstance(first, Shortage)
    assert [gpu.uuid for gpu in first.gpus] == ["GPU-2"]
    second = budget.take("llm", request, ())
    assert isinstance(second, Shortage)
    assert second.reason == "it asks for 1 GPU and 0 of 1 are free: 1 held by llm"
    none = budget.take("llm", replace(request, kind="B200"), ())
    assert isinstance(none, Shortage)
    assert none.reason == (
        'it asks for 1 GPU whose name has "B200" in it; this machine has NVIDIA A10, NVIDIA H100 80GB HBM3'
    )
