"""Ray Serve LLM's names: an application that was written for `ray.serve.llm` runs by changing its import.

Needs the extras `rayserve` and `llm`.
"""

from pierhead.rayserve.llm.config import (
    CloudMirrorConfig,
    InputModality,
    LLMConfig,
    LLMServingArgs,
    LoraConfig,
    ModelLoadingConfig,
)

__all__ = ["CloudMirrorConfig", "InputModality", "LLMConfig", "LLMServingArgs", "LoraConfig", "ModelLoadingConfig"]
