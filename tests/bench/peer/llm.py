"""The peer's language model: Ray Serve LLM's own OpenAI application, over the engine in llm_engine.py."""

from __future__ import annotations

import json
import os

from ray.serve.llm import LLMConfig, build_openai_app

_config = json.loads(os.environ["PEER_LLM_CONFIG"])

application = build_openai_app(
    {
        "llm_configs": [
            LLMConfig(
                model_loading_config={"model_id": _config["model_loading"]["model_id"], "model_source": "none"},
                deployment_config={"num_replicas": 1, "max_ongoing_requests": 4096},
                placement_group_config={"bundles": [{"CPU": 1}]},
                runtime_env={
                    "env_vars": {name: os.environ[name] for name in ("PEER_LLM_CONFIG", "RAYLLM_VLLM_ENGINE_CLS")}
                },
                log_engine_metrics=False,
            )
        ]
    }
)
