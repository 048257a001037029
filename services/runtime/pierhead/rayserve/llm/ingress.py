"""The ingress of one or more models, with OpenAI's API, on FastAPI: for `serve.run`, and for classes derived from it.

The stack's gateway takes its place in containers, unless it is derived from. It reads and refuses requests as the
gateway does, by the gateway's own functions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, ClassVar, Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pierhead.edge.edge import hidden, is_internal
from pierhead.environment import Environment
from pierhead.errors import PierheadError
from pierhead.llm import objects
from pierhead.llm.gateway.body.body import read_body
from pierhead.llm.gateway.endpoints import POSTS
from pierhead.llm.gateway.errors import EVENTS, JSON, SERVER, ApiError, no_model, unknown_model, wrong_form
from pierhead.llm.gateway.settings import media_hosts
from pierhead.llm.openai_error import LLMRequestError
from pierhead.llm_app import REQUEST_TIMEOUT_S
from pierhead.raised import is_answerable
from pierhead.rayserve.deployment import ingress
from pierhead.rayserve.exceptions import BackPressureError, DeploymentUnavailableError
from pierhead.rayserve.handle import DeploymentHandle
from pierhead.rayserve.llm.compose import GATEWAY, compose_parts
from pierhead.rayserve.llm.config import GATEWAY_MAX_ONGOING_REQUESTS, LLMConfig
from pierhead.rayserve.llm.protocols import RawRequestInfo
from pierhead.rayserve.responses import words_of

logger = logging.getLogger("ray.serve")


class OpenAiIngress:
    """Passes requests on to the deployment of their model."""

    __rayserve_compose__ = staticmethod(compose_parts)
    __rayserve_x_serve__: ClassVar = {"request_timeout_s": REQUEST_TIMEOUT_S}

    def __init__(
        self,
        llm_deployments: Mapping[str, DeploymentHandle[Any]],
        model_cards: Mapping[str, Any],
        *,
        lora_paths: Mapping[str, str] | None = None,
    ) -> None:
        """All by the models' names; `lora_paths`: of models with adapters. Raises ValueError for a model in one of the
        first two alone.
        """
        if set(llm_deployments) != set(model_cards):
            raise ValueError(
                f"llm_deployments and model_cards must have the same model IDs. Got llm_deployments="
                f"{sorted(llm_deployments)}, model_cards={sorted(model_cards)}."
            )
        self.llm_deployments = dict(llm_deployments)
        self.model_cards = dict(model_cards)
        self.lora_paths = dict(lora_paths or {})

    @classmethod
    def get_deployment_options(cls, llm_configs: list[LLMConfig] | None = None) -> dict[str, Any]:
        """Options for `@serve.deployment`."""
        return {"max_ongoing_requests": GATEWAY_MAX_ONGOING_REQUESTS}

    async def check_health(self) -> None:
        """It is well: models may still load."""

    # ---- models

    async def models(self) -> Any:
        """/v1/models: each with its adapters behind it, where a replica says which there are."""
        found = []
        for name, card in self.model_cards.items():
            found.append(card)
            found += [{**card, "id": each, "root": each, "parent": name} for each in await self._adapters_of(name)]
        return {"object": "list", "data": found}

    async def _adapters_of(self, model: str) -> list[str]:
        if model not in self.lora_paths:
            return []
        try:
            described = await self.llm_deployments[model].describe.remote()
        except (BackPressureError, DeploymentUnavailableError, PierheadError) as error:
            logger.warning("the adapters of %s are not known: %s", model, error)
            return []
        return [f"{model}:{adapter}" for adapter in described.adapters]

    async def model(self, model_id: str) -> Any:
        """A model's or an adapter's entry, None for an unknown one."""
        listed = (await self.models())["data"]
        return next((each for each in listed if each["id"] == model_id), None)

    async def model_data(self, model: str) -> Any:
        """/v1/models/{model}. Raises ApiError for one that is not there."""
        card = await self.model(model)
        if card is None:
            raise unknown_model(model)
        return card

    # ---- requests

    async def chat(self, body: objects.ChatCompletionRequest, request: Request) -> Response:
        """/v1/chat/completions"""
        return await self.respond("chat", body, request)

    async def completions(self, body: objects.CompletionRequest, request: Request) -> Response:
        """/v1/completions"""
        return await self.respond("completions", body, request)

    async def embeddings(self, body: objects.EmbeddingRequest, request: Request) -> Response:
        """/v1/embeddings"""
        return await self.respond("embeddings", body, request)

    async def transcriptions(self, body: objects.TranscriptionRequest, request: Request) -> Response:
        """/v1/audio/transcriptions"""
        return await self.respond("transcriptions", body, request)

    async def score(self, body: objects.ScoreRequest, request: Request) -> Response:
        """/v1/score"""
        return await self.respond("score", body, request)

    async def tokenize(self, body: objects.TokenizeRequest, request: Request) -> Response:
        """/tokenize"""
        return await self.respond("tokenize", body, request)

    async def detokenize(self, body: objects.DetokenizeRequest, request: Request) -> Response:
        """/detokenize"""
        return await self.respond("detokenize", body, request)

    def handle_of(self, model: str | None, session_id: str = "") -> DeploymentHandle[Any]:
        """A handle, for streams, to the model's deployment; None = the only one. Replicas that hold the adapter are
        preferred. Raises ApiError.
        """
        if not model:
            if len(self.llm_deployments) > 1:
                raise no_model(list(self.llm_deployments))
            model = next(iter(self.llm_deployments))
        base, colon, adapter = model.partition(":")
        if base not in self.llm_deployments or (colon and base not in self.lora_paths):
            raise unknown_model(model)
        return self.llm_deployments[base].options(stream=True, multiplexed_model_id=adapter, session_id=session_id)

    async def respond(self, method: str, body: objects.OpenAIRequest, request: Request) -> Response:
        """Call a method of the model's deployment, and answer with what it yields. Raises ApiError."""
        handle = self.handle_of(body.model, request.headers.get("x-session-id", ""))
        answers = aiter(getattr(handle, method).remote(body, RawRequestInfo.from_starlette_request(request)))
        try:
            first = await anext(answers)
        except BaseException as error:
            if not is_answerable(error):
                raise
            raise api_error_of(error) from error
        if isinstance(first, objects.RawAnswer):
            return StreamingResponse(_raw(first, answers), first.status, media_type=first.content_type or JSON)
        if isinstance(first, objects.ErrorResponse):
            return Response(first.to_bytes(), first.status, media_type=JSON)
        asked = getattr(body, "stream", None) is True
        streams = _is_stream(first, asked)
        if streams != asked and method in ("chat", "completions"):
            where = f"{body.path}: the deployment {handle.deployment_name}"
            raise wrong_form(where, EVENTS if streams else JSON, stream=asked)
        if streams:
            return StreamingResponse(_events(first, answers), media_type=EVENTS)
        return Response(json_of(first), media_type=JSON)


LLMRouter = OpenAiIngress


def _is_stream(first: Any, asked: bool) -> bool:
    """Whether an answer is streamed, by the first of it. It is as asked where that does not say: a dict of a whole
    completion is like one of a stream.
    """
    name = str(first.get("object")) if isinstance(first, Mapping) else type(first).__name__
    if isinstance(first, str | list) or name.endswith((".chunk", "StreamResponse")):
        return True
    return asked and not name.endswith(("chat.completion", "Response"))


def json_of(answer: Any) -> bytes:
    """An answer, or an event of one, as JSON: an object of ours or of pydantic's, or a dict."""
    if isinstance(answer, objects.OpenAIObject):
        return answer.to_bytes()
    return json.dumps(answer if isinstance(answer, Mapping) else answer.model_dump()).encode()


async def _raw(first: objects.RawAnswer, more: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    yield first.data
    async for each in more:
        yield each.data


async def _events(first: Any, more: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """Server-sent events of what a deployment yields: texts, lists of them, objects. An error is the last one."""
    event = _event(first)
    try:
        yield event
        async for each in more:
            event = _event(each)
            yield event
            if isinstance(each, objects.ErrorResponse):
                return
    except BaseException as error:
        if type(error) is GeneratorExit or not is_answerable(error):
            raise
        logger.warning("a stream failed", exc_info=error)
        yield b"data: " + api_error_of(error).body + b"\n\n"
        return
    if not event.rstrip().endswith(b"data: [DONE]"):
        yield b"data: [DONE]\n\n"


def _event(item: Any) -> bytes:
    if isinstance(item, str):
        return item.encode("utf-8", "surrogateescape")
    if isinstance(item, list):
        return b"".join(map(_event, item))
    return b"data: " + json_of(item) + b"\n\n"


def api_error_of(error: BaseException) -> ApiError:
    """OpenAI's error for what a call of a deployment raises."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, ApiError):
        return cause
    if isinstance(cause, LLMRequestError):
        code = None if cause.error_code is None else str(cause.error_code)
        return ApiError(cause.http_status, cause.message, code=code, param=cause.param)
    if isinstance(cause, BackPressureError | DeploymentUnavailableError):
        text, status, headers = words_of(cause)
        code = "backpressure" if isinstance(cause, BackPressureError) else "no_replica"
        more = {name.decode(): value.decode() for name, value in headers}
        return ApiError(status, text, kind=SERVER, code=code, headers=more)
    if isinstance(cause, PierheadError):
        if is_internal(cause):
            cause = hidden(cause, cause, "a call of a model")
        return ApiError(cause.http_status, cause.message, kind=SERVER, code="internal")
    if isinstance(cause, StopAsyncIteration):
        return ApiError(500, "the model's answer is empty; look at its log", kind=SERVER, code="internal")
    return ApiError(500, "Internal Server Error", kind=SERVER, code="internal")


# ---- routes

Route = Callable[[FastAPI], Callable[[Any], Any]]
"""Given an application, a decorator of the method that answers."""

_OBJECTS: Final[Mapping[str, type[objects.OpenAIRequest]]] = {
    "completions": objects.CompletionRequest,
    "chat": objects.ChatCompletionRequest,
    "embeddings": objects.EmbeddingRequest,
    "transcriptions": objects.TranscriptionRequest,
    "score": objects.ScoreRequest,
    "tokenize": objects.TokenizeRequest,
    "detokenize": objects.DetokenizeRequest,
}


def _route_of(name: str, kind: type[objects.OpenAIRequest]) -> Route:
    """The gateway's paths for a method. What is no request of OpenAI's is refused as the gateway does."""
    paths = [path for path, each in POSTS.items() if each.rpc.lower() == name] or [kind._path]
    has_messages = any(each.messages for path, each in POSTS.items() if path in paths)

    def at(app: FastAPI) -> Callable[[Any], Any]:
        hosts = app.state.media_hosts

        def decorate(method: Any) -> Any:
            async def endpoint(self: Any, request: Request) -> Response:
                data, content_type = await request.body(), request.headers.get("content-type", "")
                parts = read_body(data, content_type, messages=has_messages, media_hosts=hosts)
                body = kind.from_bytes(parts.body_for(data, parts.model or ""))
                own_type = "" if parts.members else content_type
                response: Response = await getattr(self, name)(body.sent_to(kind._path, own_type), request)
                return response

            endpoint.__qualname__ = method.__qualname__  # by which it is known for a method
            for path in paths:
                app.post(path, response_model=None)(endpoint)
            return method

        return decorate

    return at


DEFAULT_ENDPOINTS: Final[Mapping[str, Route]] = {
    "models": lambda app: app.get("/v1/models"),
    "model_data": lambda app: app.get("/v1/models/{model:path}"),
    **{name: _route_of(name, kind) for name, kind in _OBJECTS.items()},
}
"""The methods of OpenAiIngress, and where each of them is."""


async def _refuse(_: Request, error: Any) -> Response:
    return Response(error.body, error.status, error.headers, media_type=JSON)


def make_fastapi_ingress(
    cls: type[Any], *, endpoint_map: Mapping[str, Route] | None = None, app: FastAPI | None = None
) -> type[Any]:
    """A class for `serve.deployment`, whose methods answer where `endpoint_map` says; default: OpenAI's API."""
    own = cls is OpenAiIngress and endpoint_map is None and app is None
    app = app or FastAPI()
    app.add_exception_handler(ApiError, _refuse)
    environment = Environment()
    app.state.media_hosts = media_hosts(environment)
    environment.check()
    methods = {
        name: route(app)(getattr(cls, name))
        for name, route in (DEFAULT_ENDPOINTS if endpoint_map is None else endpoint_map).items()
    }
    made = type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__, "__qualname__": cls.__qualname__})
    setattr(made, GATEWAY, own)
    served: type[Any] = ingress(app)(made)
    return served
