"""compose/reference.yaml is the documentation of the x-serve block: its keys and values are the model's."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pierhead.llm_config import LLMConfig, Lora, ModelLoading
from pierhead.serve_block import (
    AutoscaleBlock,
    BackpressureBlock,
    GpuBlock,
    HealthBlock,
    KeyBlock,
    MetricsBlock,
    PrometheusBlock,
    ServeBlock,
    SharedMemoryBlock,
    StartupBlock,
    YieldsBlock,
    keys_of,
)

from controller.files.parse import parse
from controller.files.serve_block import model_of
from controller.files.yaml import load_written

REFERENCE = Path(__file__).parents[3] / "compose" / "reference.yaml"


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    loaded = load_written(REFERENCE.read_text())
    assert isinstance(loaded, dict)
    return loaded


LLM = LLMConfig(model_loading=ModelLoading(model_id="qwen2.5-7b"), lora=Lora(dynamic_lora_loading_path="/adapters"))


@pytest.mark.parametrize(
    ("service", "key", "model"),
    [
        ("reference", None, ServeBlock()),
        ("autoscaled", "autoscale", AutoscaleBlock()),
        ("gpu-slots", "gpu", GpuBlock(memory="16GiB")),
        ("large-tensors", "shared_memory", SharedMemoryBlock()),
        ("language-model", "llm", LLM),
    ],
)
def test_keys_and_values_are_those_of_the_model(
    written: dict[str, Any], service: str, key: str | None, model: KeyBlock | LLMConfig
) -> None:
    block = written["services"][service]["x-serve"]
    values = model.model_dump() if isinstance(model, LLMConfig) else model.values()
    # As text: the keys are in the order of the model, too.
    assert json.dumps(block[key] if key else block) == json.dumps(values)


def test_the_rule_of_giving_way_has_every_key_and_the_defaults(written: dict[str, Any]) -> None:
    block = written["services"]["gpu-turns"]["x-serve"]["gpu"]
    assert json.dumps(block) == json.dumps({"yields": YieldsBlock().values()})


def test_the_reference_means_the_same_as_an_empty_block(written: dict[str, Any]) -> None:
    from_reference = parse("reference", written)
    written["services"]["reference"] |= {"x-serve": {}}
    written["services"]["autoscaled"]["x-serve"] |= {"autoscale": {}}
    written["services"]["gpu-slots"]["x-serve"] |= {"gpu": {"memory": "16GiB"}}
    written["services"]["gpu-turns"]["x-serve"] |= {"gpu": {"yields": {}}}
    written["services"]["large-tensors"]["x-serve"] |= {"shared_memory": {}}
    written["services"]["language-model"]["x-serve"]["llm"] = {
        "model_loading": {"model_id": "qwen2.5-7b"},
        "lora": {"dynamic_lora_loading_path": "/adapters"},
    }
    assert parse("reference", written) == from_reference


def test_the_policy_in_the_comments_has_every_key_and_the_defaults() -> None:
    lines = [line.partition("#")[2] for line in REFERENCE.read_text().splitlines() if line.lstrip().startswith("#")]
    begin = next(n for n, line in enumerate(lines) if line.strip() == "prometheus:")
    inside = itertools.takewhile(lambda line: line.startswith(" " * 7), lines[begin + 1 :])
    block = load_written("\n".join(inside))
    known = PrometheusBlock(query=block["query"], target=block["target"])
    assert list(block) == [key.name for key in keys_of(PrometheusBlock)]
    assert block == known.values()


def test_every_key_is_explained() -> None:
    lines = REFERENCE.read_text().splitlines()
    start = lines.index("    x-serve:")
    for number in range(start + 1, len(lines)):
        if re.match(r" {6,}\w+:", lines[number]) and lines[number].strip() != "path: /metrics":
            assert lines[number - 1].lstrip().startswith("#"), f"line {number + 1}: {lines[number].strip()}"


MODELS = (ServeBlock, AutoscaleBlock, PrometheusBlock, GpuBlock, YieldsBlock, BackpressureBlock, StartupBlock)


@pytest.mark.parametrize("model", [*MODELS, HealthBlock, MetricsBlock, LLMConfig, Lora])
def test_bounds_are_in_the_reference(model: type[KeyBlock | LLMConfig | Lora]) -> None:
    text = REFERENCE.read_text()
    checked = model_of(model) if issubclass(model, KeyBlock) else model
    for name, schema in checked.model_json_schema()["properties"].items():
        if "maximum" in schema and name != "max_queued_requests":
            assert f"{schema['minimum']:.10g} to {schema['maximum']:.10g}" in text, name
