"""Where the ranker's parameters come from: a safetensors file, or a fixed seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from services.recsys.ranker.model import EMBEDDING_WIDTH, Dlrm

SEED: Final = 20_240_917
LOGIT_GAIN: Final = 2.0
LOGIT_BIAS: Final = 0.4


class WeightsError(Exception):
    """The weights file cannot be used; the message lists everything that is wrong with it."""


def load_weights(path: Path) -> Dlrm:
    """Make a model (on the CPU) from a safetensors file with exactly the tensors of `Dlrm.state_dict()`, float32.

    The file is mapped, not read: replicas on one host share its pages, and nothing is held twice.
    Raises WeightsError naming each tensor that is missing, unknown, or of another shape or type.
    """
    model = Dlrm()
    wanted = model.state_dict()
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            problems = _problems(wanted, {name: (s.get_dtype(), s.get_shape()) for name, s in found.items()})
            if problems:
                raise WeightsError(f"{path} does not hold this model's weights:\n" + "\n".join(problems))
            model.load_state_dict({name: file.get_tensor(name) for name in wanted}, assign=True)
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{path} cannot be read as a safetensors file: {error}. PIERHEAD_RANKER_WEIGHTS must name one inside the "
            "container (mount it with `volumes`); without that variable the ranker uses weights from a fixed seed."
        ) from error
    return model


def _problems(wanted: Mapping[str, Tensor], found: Mapping[str, tuple[str, list[int]]]) -> list[str]:
    """One sentence per tensor that is not as the model needs it."""
    problems = []
    for name, tensor in wanted.items():
        expected = f"F32 {list(tensor.shape)}"
        if name not in found:
            problems.append(f"{name}: expected {expected}, found nothing of that name")
        elif (has := f"{found[name][0]} {found[name][1]}") != expected:
            problems.append(f"{name}: expected {expected}, found {has}")
    problems.extend(f"{name}: expected no tensor of that name" for name in sorted(found.keys() - wanted.keys()))
    return problems


def seeded_weights(seed: int = SEED) -> Dlrm:
    """Make a model (on the CPU) from a seed: the same on every machine, scores spread over (0, 1).

    Only `uniform_` is used, because its values do not depend on the processor's vector width; bounds keep the
    variance of what flows through constant (He), so that the scores neither collapse to 0.5 nor saturate.
    """
    model = Dlrm()
    model.to_empty(device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    with torch.no_grad():
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        for layer in layers:
            bound = (6 / layer.in_features) ** 0.5
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.zero_()
        # What the variance argument leaves: with SEED logits of mean -0.2, deviation 0.85; after this 0 and 1.7.
        layers[-1].weight.mul_(LOGIT_GAIN)
        layers[-1].bias.fill_(LOGIT_BIAS)
        # A dot product of two such vectors has variance 64 * (bound^2 / 3)^2 = 1.
        bound = (3 / EMBEDDING_WIDTH**0.5) ** 0.5
        model.embeddings.uniform_(-bound, bound, generator=generator)
    return model
