"""The seed's builder, which YAML names as well, and the application of what it builds."""

from pierhead import rayserve as serve
from pierhead.rayserve import Application
from pierhead.rayserve.llm import LLMConfig, LLMServer


def my_build_function(llm_config: LLMConfig, **kwargs) -> Application:
    # Get default options from the class
    serve_options = LLMServer.get_deployment_options(llm_config)

    # Merge with user-provided options
    serve_options.update(kwargs)

    # Decorate and bind
    return serve.deployment(LLMServer).options(**serve_options).bind(llm_config)


llm_config = LLMConfig(
    model_loading_config=dict(
        model_id="qwen-0.5b",
        model_source="Qwen/Qwen2.5-0.5B-Instruct",
    ),
    llm_engine="custom_engine:MyCustomEngine",
    accelerator_type="A10G",
    deployment_config=dict(
        autoscaling_config=dict(
            min_replicas=1,
            max_replicas=2,
        )
    ),
)

app = my_build_function(llm_config)
