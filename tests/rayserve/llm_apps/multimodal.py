"""The seed's builder of multimodal models."""

from pierhead.rayserve.deployment import Application
from pierhead.rayserve.llm import InputModality, LLMConfig, build_llm_deployment


def build_multimodal_deployment(model_config: dict, **kwargs) -> Application:
    """Builder for multimodal models."""
    llm_config = LLMConfig(
        model_loading_config={
            "input_modality": InputModality.MULTIMODAL,
            **model_config,
        },
        engine_kwargs={
            "task": "multimodal",
        },
        llm_engine="custom_engine:MyCustomEngine",
    )
    return build_llm_deployment(llm_config, **kwargs)


app = build_multimodal_deployment({"model_id": "small"}, name_prefix="Multimodal:")
