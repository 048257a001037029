"""`python -m tests.environments.random_models TOKENIZER DIRECTORY [NAME...]`, with vLLM's Python: small models.

Random weights and smollm2's tokenizer, 20 MB each. What they say has no meaning, but it is the same for the same
prompt, and what a model sees and hears changes its probabilities.

    text    Llama, with two heads of keys: two ranks may have one each
    vision  BLIP-2. vLLM's other vision models import torchvision, of which PyPI has no build for this PyTorch
    audio   Qwen2-Audio
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

IMAGE, IMAGE_TOKENS = "<image>", 4
"""BLIP-2's processor puts the tokens of images before the text itself."""
SOUND, SOUND_MARKS = "<|AUDIO|>", ("<|audio_bos|>", "<|audio_eos|>")
SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 1024}
TEMPLATE = """\
{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}OTHER{% endif %}\
{% endfor %}{% endif %}
{% endfor %}"""


def make(tokenizer_of: str, directory: Path, *names: str) -> None:
    import torch

    for name in names:
        torch.manual_seed(0)
        MAKE[name](tokenizer_of, directory / name)


def _tokenizer(tokenizer_of: str, *more: str) -> tuple[Any, dict[str, int]]:
    """With more tokens, and what the settings of a language model say of it."""
    import transformers as hf

    found = hf.AutoTokenizer.from_pretrained(tokenizer_of)
    found.add_special_tokens({"additional_special_tokens": list(more)})
    end = found.eos_token_id
    return found, {"vocab_size": len(found), "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


def _make_text(tokenizer_of: str, directory: Path) -> None:
    import transformers as hf

    tokenizer, words = _tokenizer(tokenizer_of)
    hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **SIZE, **words)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _make_vision(tokenizer_of: str, directory: Path) -> None:
    import transformers as hf

    tokenizer, words = _tokenizer(tokenizer_of, IMAGE)
    config = hf.Blip2Config(
        vision_config=hf.Blip2VisionConfig(intermediate_size=128, image_size=28, patch_size=14, **SIZE).to_dict(),
        qformer_config=hf.Blip2QFormerConfig(intermediate_size=128, encoder_hidden_size=64, **SIZE).to_dict(),
        text_config=hf.OPTConfig(
            ffn_dim=128, word_embed_proj_dim=64, max_position_embeddings=512, **SIZE, **words
        ).to_dict(),
        num_query_tokens=IMAGE_TOKENS, image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
    )  # fmt: skip
    hf.Blip2ForConditionalGeneration(config).save_pretrained(directory)
    images = hf.BlipImageProcessorPil(size={"height": 28, "width": 28})
    hf.Blip2Processor(images, tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("OTHER", ""))


def _make_audio(tokenizer_of: str, directory: Path) -> None:
    import transformers as hf
    from safetensors.torch import load_file, save_file

    tokenizer, words = _tokenizer(tokenizer_of, SOUND, *SOUND_MARKS)
    config = hf.Qwen2AudioConfig(
        audio_config=hf.Qwen2AudioEncoderConfig(
            d_model=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=128
        ).to_dict(),
        text_config=hf.Qwen2Config(**TEXT, **SIZE, **words).to_dict(),
        audio_token_index=tokenizer.convert_tokens_to_ids(SOUND),
    )  # fmt: skip
    hf.Qwen2AudioForConditionalGeneration(config).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    named = {name.replace("model.model.", "model."): each for name, each in weights.items()}  # as vLLM looks for them
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    hf.Qwen2AudioProcessor(hf.WhisperFeatureExtractor(feature_size=128), tokenizer).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("OTHER", SOUND.join(SOUND_MARKS)))


MAKE = {"text": _make_text, "vision": _make_vision, "audio": _make_audio}

if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
