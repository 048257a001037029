"""Ray Serve LLM's names: an application that was written for `ray.serve.llm` runs by changing its import.

    from pierhead.rayserve.llm import LLMConfig, build_openai_app

Needs the extras `rayserve` and `llm`, and FastAPI for the ingress.
"""

from typing import Any

from pierhead.llm.server.engine import LLMEngine
from pierhead.rayserve.llm import openai_api_models, protocols
from pierhead.rayserve.llm.builders import (
    build_dp_deployment,
    build_dp_openai_app,
    build_llm_deployment,
    build_openai_app,
    build_pd_openai_app,
)
from pierhead.rayserve.llm.config import (
    CloudMirrorConfig,
    InputModality,
    LLMConfig,
    LLMServingArgs,
    LoraConfig,
    ModelLoadingConfig,
)
from pierhead.rayserve.llm.deployment import LLMServer
from pierhead.rayserve.llm.protocols import DeploymentProtocol, LLMServerProtocol

__all__ = [
    "CloudMirrorConfig",
    "DeploymentProtocol",
    "InputModality",
    "LLMConfig",
    "LLMEngine",
    "LLMRouter",
    "LLMServer",
    "LLMServerProtocol",
    "LLMServingArgs",
    "LoraConfig",
    "ModelLoadingConfig",
    "OpenAiIngress",
    "build_dp_deployment",
    "build_dp_openai_app",
    "build_llm_deployment",
    "build_openai_app",
    "build_pd_openai_app",
    "make_fastapi_ingress",
    "openai_api_models",
    "protocols",
]


def __getattr__(name: str) -> Any:
    if name in ("LLMRouter", "OpenAiIngress", "make_fastapi_ingress"):  # these need FastAPI
        from pierhead.rayserve.llm import ingress

        return getattr(ingress, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
