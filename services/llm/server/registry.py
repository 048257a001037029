"""Engines by name. Modules are imported when their engine is asked for: vLLM's takes seconds and gigabytes."""

from __future__ import annotations

ENGINES = {
    "mock": "services.llm.server.engines.mock_engine:MockEngine",
    "openai": "services.llm.server.engines.openai_engine:OpenAIEngine",
    "vllm": "services.llm.server.engines.vllm_engine:VLLMEngine",
}
