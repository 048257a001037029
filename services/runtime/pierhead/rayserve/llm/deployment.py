"""The servers of Ray Serve LLM: Pierhead's own LLM server, with Ray Serve's options."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable
from typing import Any, ClassVar, Self

from pierhead import llm_config as own
from pierhead.llm import objects
from pierhead.llm.gateway.body.prompt_text import prompts
from pierhead.llm.gateway.models.prefill import decode_overrides, prefill_overrides
from pierhead.llm.server import llm_server
from pierhead.llm.server.service import object_of
from pierhead.llm_app import REQUEST_TIMEOUT_S
from pierhead.rayserve.handle import DeploymentHandle
from pierhead.rayserve.llm.compose import compose_parts
from pierhead.rayserve.llm.config import LLMConfig, of_x_serve, parts_of


class LLMServer(llm_server.LLMServer):
    """One model's engine. `await LLMServer(config)`, as a deployment, has started it."""

    __rayserve_compose__ = staticmethod(compose_parts)
    __rayserve_x_serve__: ClassVar = {"request_timeout_s": REQUEST_TIMEOUT_S}

    async def __init__(self, llm_config: LLMConfig, **more: Any) -> None:  # type: ignore[misc]
        """The process gets the `env_vars` of `runtime_env`. Raises LLMStartError; see its base."""
        os.environ.update(parts_of(llm_config).environment)
        await super().__init__(llm_config, **more)

    @classmethod
    def of_x_serve(cls, config: own.LLMConfig) -> Awaitable[Self]:
        """See its base. The constructor gets Ray Serve LLM's config."""
        return super().of_x_serve(of_x_serve(config))

    async def __rayserve_end__(self) -> None:
        """The replica's end."""
        await self.shutdown()


class DPServer(LLMServer):
    """An engine of several ranks, all of them in one replica."""


class PDPrefillServer(LLMServer):
    """Reads prompts for a PDDecodeServer."""


class PDDecodeServer(LLMServer):
    """Lets `prefill_server` read the prompt, and generates with what that has read."""

    async def __init__(  # type: ignore[misc]
        self, llm_config: LLMConfig, *, prefill_server: DeploymentHandle[Any], **more: Any
    ) -> None:
        self._prefill = prefill_server.options(stream=True)
        await super().__init__(llm_config, **more)

    async def chat(self, request: Any, raw_request: Any = None) -> AsyncIterator[Any]:
        """See LLMServerProtocol."""
        async for each in self._decode("chat", super().chat, request, raw_request):
            yield each

    async def completions(self, request: Any, raw_request: Any = None) -> AsyncIterator[Any]:
        """See LLMServerProtocol."""
        async for each in self._decode("completions", super().completions, request, raw_request):
            yield each

    async def _decode(self, method: str, decode: Any, request: Any, raw_request: Any) -> AsyncIterator[Any]:
        """What the prefill server answers on an error, else what `decode` yields."""
        if (request.n or 1) == 1 and prompts(request.to_dict()) == 1:  # the transferred state is that of one sequence
            read = await self._read(method, request, raw_request)
            if isinstance(read, objects.ErrorResponse):
                yield read
                return
            request = request.model_copy(update=read)
        async for each in decode(request, raw_request):
            yield each

    async def _read(self, method: str, request: Any, raw_request: Any) -> Any:
        """The members that the prefill server adds to the request, or an ErrorResponse."""
        ask = objects.json_object(prefill_overrides(request.model_fields_set), "prefill_overrides")
        prefill = getattr(self._prefill, method).remote(request.model_copy(update=ask), raw_request)
        answers = [each async for each in prefill]
        if not answers:
            found = "nothing"
        elif isinstance(answers[0], str | list):
            found = "a stream"
        elif len(answers) > 1:
            found = f"{len(answers)} answers"
        else:
            answer = object_of(answers[0])
            if isinstance(answer, objects.ErrorResponse):
                return answer
            try:
                more = decode_overrides(answer.to_bytes())
                return objects.json_object(more, "decode_overrides") if more else {}
            except ValueError as error:
                found = str(error)
        return objects.ErrorResponse.of(
            502,
            f"{request.path}: the prefill server {self._prefill.deployment_name} answered with {found}: expected one "
            "whole answer; its engine must do what the request's `stream`, which is false, says",
            kind="server_error",
            code="internal",
        )
