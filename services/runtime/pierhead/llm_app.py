"""Compose services from LLMConfigs: one for each model, and the gateway that clients talk to.

    qwen = LLMConfig(model_loading=ModelLoading(model_id="qwen", model_source="Qwen/Qwen2.5-7B-Instruct"))
    document = llm_app({"llm-qwen": llm_service(qwen, gpus=True)})
    Path("compose/apps/qwen.yaml").write_text(yaml.safe_dump(document, sort_keys=False))

The result is plain data, which may be changed before it is written. `pierhead llm build` does the same from a
shell. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pierhead.llm_config import LLMConfig

WITHOUT_VLLM = ("mock", "openai")
"""Engines whose replicas need no vLLM in their image, and so no GPU."""
CACHE = "llm-cache"
"""The volume of weights and compiled kernels, shared by all replicas of all models."""
MAX_ONGOING_REQUESTS = 256
"""vLLM's default for concurrent requests (max_num_seqs). Further requests wait in the gateway, which may choose another
replica."""
REQUEST_TIMEOUT_S = 600.0
"""Time for a long answer of a slow model; the default of Ray Serve LLM's clients, too."""

SHARED_MEMORY = {"size": "1MiB"}
"""Of gateway and models: with it a replica writes its streams to the clients itself. None of the memory is used."""

TAG = "${PIERHEAD_TAG:-latest}"
"""Of the images, as the clone names them."""

Document = dict[str, Any]


def llm_service(
    config: LLMConfig,
    *,
    gpus: bool = True,
    replicas: int = 1,
    autoscale: Mapping[str, Any] | None = None,
    policy: str = "prefix",
    image: str | None = None,
    tag: str = TAG,
) -> Document:
    """One model's service.

    - gpus: whether each replica reserves the GPUs that the model is spread over; False for CPUs and mocks.
    - replicas, autoscale: how many; `autoscale` (x-serve.autoscale's keys) wins.
    - policy: how the gateway chooses a replica for a request; see x-serve.router.
    - image: an existing image; None = Pierhead's own for the engine and the device, with this tag, which `pierhead up`
      builds. All models with the same engine and device share it.
    """
    how_many: Document = {"autoscale": dict(autoscale)} if autoscale is not None else {"replicas": replicas}
    device = "none" if config.engine in WITHOUT_VLLM else "cuda" if gpus else "cpu"
    service: Document = {
        "image": image or f"pierhead/llm-{device}:{tag}",
        "scale": 0,
        "environment": {"HF_TOKEN": "${HF_TOKEN:-}"},
        "volumes": [f"{CACHE}:/cache"],
    }
    if gpus:
        devices = [{"driver": "nvidia", "count": config.gpus, "capabilities": ["gpu"]}]
        service["deploy"] = {"resources": {"reservations": {"devices": devices}}}
    # The processes of one engine exchange tensors in /dev/shm.
    service["shm_size"] = "16gb" if config.gpus > 1 else "2gb"
    service["x-serve"] = _as_it_is({
        **how_many,
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "request_timeout_s": REQUEST_TIMEOUT_S,
        "router": {"policy": policy},
        "shared_memory": dict(SHARED_MEMORY),
        "llm": config.model_dump(mode="json", exclude_defaults=True),
    })  # fmt: skip
    return service


def llm_gateway(
    models: Mapping[str, str | Mapping[str, str]], *, replicas: int = 1, image: str | None = None, tag: str = TAG
) -> Document:
    """The gateway's service; `image` and `tag` as for `llm_service`. `models` maps models to services; see its
    PIERHEAD_LLM_MODELS. Each service's models have a variable of their own: Compose merges the gateways of several
    files into one with all models.
    """
    variables: dict[str, dict[str, str | Mapping[str, str]]] = {}
    for model, entry in models.items():
        service = entry if isinstance(entry, str) else entry.get("service", "")  # "" = aliases
        suffix = f"_OF_{re.sub('[^A-Za-z0-9]', '_', service).upper()}" if service else ""
        variables.setdefault(f"PIERHEAD_LLM_MODELS{suffix}", {})[model] = entry
    return {
        "image": image or f"pierhead/llm-gateway:{tag}",
        "scale": 0,
        "environment": {variable: json.dumps(entries) for variable, entries in variables.items()},
        "x-serve": {
            "replicas": replicas,
            "route": "/",
            "max_ongoing_requests": 4096,
            "request_timeout_s": REQUEST_TIMEOUT_S,
            "shared_memory": dict(SHARED_MEMORY),
        },
    }


def llm_app(
    services: Mapping[str, Document], *, gateway: str = "llm-gateway", gateways: int = 1, tag: str = TAG
) -> Document:
    """A compose document: these services by name, and a gateway for all of their models.

    Raises ValueError when two of them serve a model of the same name, or one has the gateway's name.
    """
    if gateway in services:
        raise ValueError(f'service "{gateway}": expected another name, as the gateway of the app has this one')
    models: dict[str, str] = {}
    for name, service in services.items():
        model_id = service["x-serve"]["llm"]["model_loading"]["model_id"]
        if model_id in models:
            raise ValueError(
                f'model "{model_id}": expected one service for each model, found {models[model_id]} and {name}; '
                "give one of them another model_id, or raise replicas of the other"
            )
        models[model_id] = name
    ours = llm_gateway(models, replicas=gateways, tag=tag) | {"depends_on": sorted(services)}
    return {"services": {gateway: ours, **services}, "volumes": {CACHE: {}}}


def _as_it_is(value: Any) -> Any:
    """The value with "$" doubled: in a compose file a single one begins a variable."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {key: _as_it_is(inner) for key, inner in value.items()}
    return [_as_it_is(inner) for inner in value] if isinstance(value, list) else value
