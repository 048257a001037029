"""The peer's language model: Ray Serve LLM's own OpenAI application, over the engine in llm_engine.py.

With direct streaming (the variable of systems.theirs) its LLM server is the ingress and answers clients itself.
"""

from __future__ import annotations

import json
import os

from ray.serve.llm import LLMConfig, build_openai_app

_PASSED_ON = ("PEER_LLM_CONFIG", "RAYLLM_VLLM_ENGINE_CLS", "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING")

_config = json.loads(os.environ["PEER_LLM_CONFIG"])

application = build_openai_app(
    {
        "llm_configs": [
            LLMConfig(
                model_loading_config={"model_id": _config["model_loading"]["model_id"], "model_source": "none"},
                deployment_config={"num_replicas": 1, "max_ongoing_requests": 4096},
                placement_group_config={"bundles": [{"CPU": 1}]},
                runtime_env={"env_vars": {name: os.environ[name] for name in _PASSED_ON}},
                experimental_configs={"stream_batching_interval_ms": 0},
                log_engine_metrics=False,
            )
        ]
    }
)
