"""The seed's custom server: preprocessing before `super().chat`."""

from custom_engine import config_of
from pierhead.rayserve.llm import LLMServer, build_openai_app


class CustomLLMServer(LLMServer):
    """Custom server with additional features."""

    def preprocess(self, request):
        return request.model_copy(update={"messages": [*request.messages, {"role": "user", "content": "added words"}]})

    async def chat(self, request, raw_request=None):
        # Add custom preprocessing
        modified_request = self.preprocess(request)

        # Call parent implementation
        async for chunk in super().chat(modified_request, raw_request):
            yield chunk


app = build_openai_app({"llm_configs": [config_of("small", server_cls=CustomLLMServer)]})
