"""Checks `x-serve.llm` against the rest of a service. LLMConfig defines its keys. Pure."""

from __future__ import annotations

from dataclasses import replace

from pierhead.llm_config import DATA_PARALLEL, LLMConfig
from pierhead.serve_block import ServeBlock

from ..model.spec import GpuRequest
from ..model.text import counted, shown
from .problems import Problems, at


def check_llm(path: str, block: ServeBlock, problems: Problems) -> None:
    """Add a problem for each setting that `llm` cannot be combined with. `path` is the block's path."""
    if block.llm is None:
        return
    _check_server(at(path, "llm"), block.llm, problems)
    if not block.is_managed:
        problems.add(
            at(path, "llm"),
            "needs an image that is built on Pierhead's runtime (managed: true), such as pierhead/llm-cuda; an "
            "unmodified server image gets its model from its own command, and a service with engine: openai connects "
            "it to the gateway",
        )
    if block.own_protocol != "grpc":
        problems.add(
            at(path, "llm"),
            'needs protocol "grpc" and this service has "http" (the default of a service with a route): clients reach '
            "it through the gateway; remove route and protocol",
        )


def model_names(llm: LLMConfig) -> tuple[str, ...]:
    """What clients call the model, and each adapter that replicas load at first."""
    model = llm.model_loading.model_id
    return model, *(f"{model}:{adapter}" for adapter in (llm.lora.adapters if llm.lora else ()))


def _check_server(path: str, llm: LLMConfig, problems: Problems) -> None:
    """The engine openai needs a server's address; the replica checks its other arguments."""
    if llm.engine != "openai":
        return
    url = llm.engine_kwargs.get("base_url")
    if not (isinstance(url, str) and url):
        found = shown(url) if "base_url" in llm.engine_kwargs else "nothing"
        problems.add(
            at(at(path, "engine_kwargs"), "base_url"),
            "expected the address of the server that the engine openai asks, such as "
            f'"http://sglang:30000/v1", found {found}',
        )


def llm_gpus(path: str, llm: LLMConfig, gpu: GpuRequest | None, problems: Problems) -> GpuRequest | None:
    """The GPUs of one replica: as many as the model is spread over, of the kind that it asks for.

    A model on one device needs no reservation: it may be meant for the CPU.
    """
    here = at(path, "llm")
    factors = ["tensor_parallel_size", "pipeline_parallel_size", *({DATA_PARALLEL} & llm.engine_kwargs.keys())]
    spread = f"{' x '.join(factors)} = {llm.gpus}"
    if gpu is None and llm.gpus > 1:
        problems.add(
            here,
            f"is spread over {llm.gpus} GPUs ({spread}) and the service asks for none; write "
            f"deploy.resources.reservations.devices: [{{driver: nvidia, count: {llm.gpus}, capabilities: [gpu]}}]",
        )
    elif gpu is None and llm.accelerator_type:
        problems.add(
            at(here, "accelerator_type"),
            "says which GPUs and the service asks for none; write deploy.resources.reservations.devices: "
            "[{driver: nvidia, count: 1, capabilities: [gpu]}]",
        )
    elif gpu is not None and gpu.count != llm.gpus:
        problems.add(
            here,
            f"is spread over {counted(llm.gpus, 'GPU')} ({spread}) and each replica asks for {gpu.count}; make the two "
            "equal",
        )
    return replace(gpu, kind=llm.accelerator_type or "") if gpu else None
