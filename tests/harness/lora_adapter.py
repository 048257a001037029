"""A small LoRA adapter of random numbers, which changes the answers of a model on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 4
STRENGTH = 0.5
"""Standard deviation of the numbers: enough that a greedy answer differs."""


def write_adapter(place: Path, model: Path, seed: int = 0) -> Path:
    """Write the adapter of a Llama-like model's query and value projections to `place`, as PEFT does."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    widths = {"q_proj": hidden, "v_proj": hidden // heads * config["num_key_value_heads"]}
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, width in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = random.normal(0, STRENGTH, (RANK, hidden)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = random.normal(0, STRENGTH, (width, RANK)).astype(np.float32)
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model), "bias": "none", "r": RANK,
        "lora_alpha": RANK, "lora_dropout": 0.0, "target_modules": sorted(widths), "modules_to_save": None,
    }  # fmt: skip
    (place / "adapter_config.json").write_text(json.dumps(settings))
    return place
