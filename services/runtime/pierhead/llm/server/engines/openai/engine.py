"""The engine for any unmodified server with OpenAI's API: SGLang, llama.cpp, vllm-openai, ..., a sidecar or remote.

Requests are sent with the server's own name of the model, answers come back unchanged: events of a stream are passed on
as soon as they are whole, and only the last ones are parsed. Closing an answer's iterator closes the
connection, which is how such servers learn of an abort.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import aiohttp
from pierhead import Unavailable
from pierhead.llm.objects import ErrorResponse, OpenAIAnswer, OpenAIRequest
from pierhead.llm.openai_error import LLMRequestError
from pierhead.llm.server.engine import Answers, EngineStats, LLMEngine, ModelDescription, checked_kwargs
from pierhead.llm.server.engines.openai.answers import (
    answers_of,
    cards_of,
    decodes_in,
    message_of,
    read_body,
    short,
    without_ours,
)
from pierhead.llm.server.engines.openai.arguments import PATHS, OpenAIArguments
from pierhead.llm.server.errors import LLMStartError, NotSupported, UpstreamError, unknown_model, unknown_path
from pierhead.llm.server.events import Account
from pierhead.tasks import end_tasks

log = logging.getLogger(__name__)

LARGEST_METRICS = 4 * 1024 * 1024
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
WATCH_EVERY_S = 5.0
CLOSED_WITHIN_S = 0.2
"""A kept connection that the server had closed is noticed by then: its reset takes one way to the server and back. A
server that breaks off later may have begun the request, and would do the same work again.
"""
LISTED_S = 5.0
"""For how long an adapter that the server has listed counts as there, so that not each request for it costs another."""
METRICS_LAST_S = 30.0
"""Older metrics of the server are not shown."""
_KEPT_S = 4.0
"""Keep-alive time: servers close an idle connection after five seconds, and it must not be used at that moment."""
_JSON = "application/json"
_ONE_TOKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
    "embeddings": ("/v1/embeddings", {"input": "Hi"}),
}


class OpenAIEngine(LLMEngine):
    """engine_kwargs: see OpenAIArguments.

    Adapters are loaded as vLLM's server takes them (`--enable-lora`, VLLM_ALLOW_RUNTIME_LORA_UPDATING=true), under the
    name that clients use, `<model>:<adapter>`, and from a directory that the server must see at the same path as the
    replica. An adapter that the server has lost through a restart is loaded again on demand.
    """

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config)
        self._arguments = checked_kwargs(OpenAIArguments, "openai", self.config.engine_kwargs)
        self._model = self._arguments.model or self.config.model_loading.model_id
        self._session: aiohttp.ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None
        self._max_model_len = self._arguments.max_model_len or 0
        self._running = 0
        self._tokens = 0
        self._metrics, self._metrics_at = b"", 0.0
        self._decodes: list[bytes] | None = None
        """As last read; None = not read yet."""
        self._adapters: dict[str, str] = {}
        """Loaded adapters, and where their files are."""
        self._listed: tuple[float, Collection[str]] = (-math.inf, ())
        """When the server was asked for its models last, and their names."""

    # ---- its life

    async def start(self) -> None:
        """Wait for the server, and check that it serves the model."""
        arguments = self._arguments
        self._session = aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity", **self._authorization()},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S),  # the replica bounds its requests
            cookie_jar=aiohttp.DummyCookieJar(),  # one client's are not for the others
            trace_configs=[_notes_a_kept_connection()],
            timeout=aiohttp.ClientTimeout(sock_connect=arguments.connect_timeout_s, sock_read=arguments.read_timeout_s),
        )
        await self._wait_for_it()
        await self._look_at_models()
        self._watch = asyncio.create_task(self._keep_watch(), name=f"watches {arguments.base_url}")

    def _authorization(self) -> dict[str, str]:
        key, variable = self._arguments.api_key, self._arguments.api_key_env
        if variable is not None:
            key = os.environ.get(variable, "").strip()
            if not key:
                raise LLMStartError(
                    f"engine_kwargs.api_key_env: the variable {variable} is not set in the replica; set it in the "
                    "service's environment"
                )
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def _wait_for_it(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time() + self._arguments.start_timeout_s
        while True:
            self.report(f"waiting for {self._arguments.base_url}", None, 1.0)
            try:
                await self.check_health()
            except Unavailable as error:
                if loop.time() >= last:
                    raise LLMStartError(
                        f"{error.message} (for engine_kwargs.start_timeout_s = {self._arguments.start_timeout_s:g} "
                        "seconds); start the server, or correct engine_kwargs.base_url or health_path"
                    ) from error
                await asyncio.sleep(min(1.0, max(last - loop.time(), 0.01)))
            else:
                return

    async def _look_at_models(self) -> None:
        """Raises LLMStartError where the server has a list of models, and this one is not on it."""
        status, body = await self._small("GET", "/v1/models")
        if status in (401, 403):
            raise LLMStartError(
                f"{self._arguments.base_url} refuses the key ({status}): set engine_kwargs.api_key_env to the variable "
                "that holds the right one"
            )
        cards = cards_of(body)
        if not cards:
            return  # it has no list: the first token shows whether it serves the model
        if self._model not in cards:
            raise LLMStartError(
                f'{self._arguments.base_url} does not serve "{self._model}" but {", ".join(sorted(cards))[:500]}; set '
                "engine_kwargs.model to one of them"
            )
        length = cards[self._model].get("max_model_len")
        if isinstance(length, int) and not self._max_model_len:
            self._max_model_len = length

    async def _cards(self) -> dict[str, dict[str, Any]]:
        """The server's models by name; empty if it has no such list."""
        cards = cards_of((await self._small("GET", "/v1/models"))[1])
        self._listed = time.monotonic(), frozenset(cards)
        return cards

    async def shutdown(self) -> None:
        """Close every connection: running requests fail here, and are aborted at the server."""
        watch, self._watch = self._watch, None
        if watch is not None:
            await end_tasks(watch)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def check_health(self) -> None:
        """Raises Unavailable unless the server's health_path answers 200, and the error that ended `_keep_watch`."""
        if self._watch is not None and self._watch.done():
            self._watch.result()
        path = self._arguments.health_path
        status, body = await self._small("GET", path)
        if status in (401, 403):
            return  # it answers; requests show whether it takes the key
        if status != 200:
            raise Unavailable(f"{self._arguments.base_url}{path} answers {status}: {short(body)}")

    async def generate_one_token(self) -> None:
        """See LLMEngine.generate_one_token: one request as clients send them."""
        path, body = _ONE_TOKEN[self._arguments.one_token]
        wire = json.dumps({"model": self._model, **body}).encode()
        answers = self._ask(path, wire, _JSON, Account(hide_usage=False), OpenAIAnswer)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                if isinstance(answer, ErrorResponse):
                    raise UpstreamError(
                        f"{self._arguments.base_url}{path} answers a request for one token with {answer.status}: "
                        f"{short(answer.to_bytes())}; engine_kwargs.one_token says what it is asked for"
                    )
        self._tokens += 1  # also where the server does not count tokens: it is alive

    # ---- requests

    def chat(self, request: OpenAIRequest) -> Answers:
        """See LLMEngine.chat and LLMEngine.completions."""

        def ask(asked: OpenAIRequest) -> Answers:
            hide = asked.stream is True and _ask_for_usage(asked)
            account, model = Account(hide_usage=hide), str(request.model)
            return self._ask(path, asked.to_bytes(), _JSON, account, asked._answer, ends=True, model=model)

        path = type(request)._path  # whatever path it was sent to
        return self._with_adapter(request, ask)

    completions = chat

    async def pass_through(self, request: OpenAIRequest) -> Answers:
        """The server's answer to a request of `PATHS` and engine_kwargs.more_paths, unchanged."""
        path, content_type = request.path, request.content_type or _JSON
        if path not in PATHS.union(self._arguments.more_paths) or not request.has_body:
            raise unknown_path(path)

        def ask(asked: OpenAIRequest) -> Answers:
            account, model = Account(hide_usage=False), str(request.model) if is_json else ""
            return self._ask(path, asked.to_bytes(), content_type, account, asked._answer, model=model)

        is_json = content_type.partition(";")[0].strip() == _JSON
        answers = self._with_adapter(request, ask) if is_json else ask(request)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                yield answer

    embeddings = pass_through

    async def _with_adapter(self, request: OpenAIRequest, ask: Callable[[OpenAIRequest], Answers]) -> Answers:
        """The answer of `ask` to the request by the server's name of the model; if the server lacks that, and it is a
        loaded adapter, reload it and ask again. Raises LLMRequestError."""
        asked = self._own(request)
        adapter = str(asked.model).removeprefix(self._model).removeprefix(":")
        path = self._adapters.get(adapter)
        # Some servers answer whatever the model's name is.
        if adapter and path is None and not self._was_listed(adapter) and await self._lacks(adapter):
            raise unknown_model(str(request.model), self.config.model_loading.model_id)
        async with contextlib.aclosing(ask(asked)) as answers:
            async for answer in answers:
                is_lost = path is not None and isinstance(answer, ErrorResponse) and answer.status == 404
                if is_lost and await self._lacks(adapter):
                    break  # else the server has the adapter, and the 404 is about something else
                yield answer
            else:
                return
        log.warning("%s has lost the adapter %s; it is loaded again", self._arguments.base_url, adapter)
        await self._put(adapter, path or "")
        async with contextlib.aclosing(ask(asked)) as answers:
            async for answer in answers:
                yield answer

    async def _lacks(self, adapter: str) -> bool:
        """Whether the server lists models, and this adapter is not one of them."""
        return not self._is_among(adapter, await self._cards())

    def _was_listed(self, adapter: str) -> bool:
        """Whether the server had it, or no list, at most LISTED_S ago."""
        at, names = self._listed
        return time.monotonic() - at < LISTED_S and self._is_among(adapter, names)

    def _is_among(self, adapter: str, names: Collection[str]) -> bool:
        """Whether a list of models has the adapter, or is empty. vLLM has it by the name that `_put` gives it, SGLang
        by its own."""
        return not names or self._adapter_name(adapter) in names or adapter in names

    def _own(self, request: OpenAIRequest) -> OpenAIRequest:
        """The request as the server is asked it. Raises LLMRequestError."""
        asked, own = str(request.model or ""), self.config.model_loading.model_id
        base, colon, adapter = asked.partition(":")
        if base != own:
            raise unknown_model(asked, own)
        return request.model_copy(update={"model": self._model + colon + adapter})

    async def _ask(
        self, path: str, wire: bytes, content_type: str, account: Account, kind: type[OpenAIAnswer], *,
        ends: bool = False, model: str = "",
    ) -> Answers:  # fmt: skip
        """One request. `ends`: a stream of it is whole only with its [DONE]; `model`: its name in the answer.

        Raises Unavailable, UpstreamError. Clients read them: only the log has the server's address.
        """
        where = f"{self._arguments.base_url}{path}"
        before = 0
        self._running += 1
        try:
            async with await self._request(
                "POST" if wire else "GET",
                where,
                data=wire or None,
                headers={"Content-Type": content_type} if wire else None,
                allow_redirects=False,
            ) as response:
                try:
                    async for answer in answers_of(response, account, kind, ends=ends, model=model):
                        self._tokens += account.tokens - before
                        before = account.tokens
                        yield answer
                finally:
                    if not response.content.at_eof():
                        response.close()
            self._tokens += account.usage.prompt_tokens
        except UpstreamError as error:
            log.warning("%s: %s", where, error.message)
            raise UpstreamError(f"the server behind this model: {error.message}") from error
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            what = type(error).__name__
            log.warning("%s cannot be asked, or stopped: %s: %s", where, what, error)
            raise Unavailable(f"the server behind this model cannot be asked, or stopped: {what}") from error
        finally:
            self._running -= 1

    async def _small(self, method: str, path: str, body: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body of an answer that is not a model's. Raises Unavailable, UpstreamError."""
        where = f"{self._arguments.base_url}{path}"
        limit_s = self._arguments.health_timeout_s if method == "GET" else None  # loading an adapter takes its time
        try:
            async with (
                asyncio.timeout(limit_s),
                await self._request(method, where, json=body, allow_redirects=method == "GET") as response,
            ):
                return response.status, await read_body(response, LARGEST_METRICS)
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{where} does not answer: {type(error).__name__}: {error}".rstrip(": ")) from error

    async def _request(self, method: str, where: str, **options: Any) -> aiohttp.ClientResponse:
        """The server's answer, from its headers on. Servers close connections without saying so (llama.cpp after each
        stream): a request that meets this on a kept one is sent again. aiohttp does so for GET alone."""
        while True:
            connection, asked_at = SimpleNamespace(is_kept=False), time.monotonic()
            try:
                return await self._open.request(method, where, trace_request_ctx=connection, **options)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # Each attempt takes one of the kept ones away.
                if not connection.is_kept or time.monotonic() - asked_at > CLOSED_WITHIN_S:
                    raise

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise Unavailable("the engine openai is not running: it was not started yet, or it was shut down")
        return self._session

    # ---- adapters

    async def load_adapter(self, adapter: str, path: str) -> None:
        """See LLMEngine.load_adapter. Raises NotSupported for a server that has none."""
        await self._put(adapter, path)
        self._adapters[adapter] = path

    async def unload_adapter(self, adapter: str) -> None:
        """See LLMEngine.unload_adapter. An adapter that the server does not have counts as unloaded."""
        self._adapters.pop(adapter, None)
        status, body = await self._small("POST", UNLOAD, {"lora_name": self._adapter_name(adapter)})
        if status != 200 and not (status in (400, 404) and message_of(body)):
            raise self._no_adapters(status, body)

    async def _put(self, adapter: str, path: str) -> None:
        name = self._adapter_name(adapter)
        wanted = {"lora_name": name, "lora_path": path}
        status, body = await self._small("POST", LOAD, wanted)
        if status == 400 and name in (there := await self._cards()):  # the server keeps it when a replica is replaced
            if there[name].get("root") in (None, path):
                return
            await self._small("POST", UNLOAD, {"lora_name": name})
            status, body = await self._small("POST", LOAD, wanted)
        if status == 200:
            return
        if status >= 500 or not message_of(body):
            raise self._no_adapters(status, body)
        raise LLMRequestError(
            f'the adapter "{adapter}" at {path}, which {self._arguments.base_url} must see at the same path, cannot be '
            f"loaded: {message_of(body)}"
        )

    def _no_adapters(self, status: int, body: bytes) -> Exception:
        where = self._arguments.base_url
        if status in (404, 405):
            return NotSupported(
                f"{where} takes no LoRA adapters while it runs ({status}); vLLM does with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=true in its environment"
            )
        return UpstreamError(f"{where} answers {status} to the change of an adapter: {short(body)}")

    def _adapter_name(self, adapter: str) -> str:
        return f"{self._model}:{adapter}"

    # ---- its numbers

    def describe(self) -> ModelDescription:
        """See LLMEngine.describe."""
        return ModelDescription(max_model_len=self._max_model_len, adapters=tuple(sorted(self._adapters)))

    def load(self) -> EngineStats:
        """This replica's own requests; other load of the server is unknown."""
        return EngineStats(running=self._running, tokens=self._tokens)

    def expose(self) -> bytes:
        """The server's own metrics, a few seconds old, without the process metrics."""
        fresh = time.monotonic() - self._metrics_at < METRICS_LAST_S
        return self._metrics if fresh else b""

    async def _keep_watch(self) -> None:
        """Fetch the metrics, and check whether a silent server still generates: an answer without streaming shows no
        token until its end. If the check fails, the token count does not grow, and the watchdog acts."""
        tokens = -1
        checking: asyncio.Task[None] | None = None
        try:
            while True:
                if self._arguments.metrics_path is not None:
                    await self._fetch_metrics(self._arguments.metrics_path)
                if checking is not None and checking.done():
                    checking.result()
                    checking = None
                if self._running and self._tokens == tokens and checking is None:
                    checking = asyncio.create_task(self._check_for_life())
                tokens = self._tokens
                # Several checks before silence counts as a stall: a stalled replica is replaced at once.
                await asyncio.sleep(min(WATCH_EVERY_S, self.config.stall_timeout_s / 4))
        finally:
            if checking is not None:
                await end_tasks(checking)

    async def _check_for_life(self) -> None:
        """Waits with the others where all places of the server are taken; then its metrics may show that it lives."""
        try:
            await self.generate_one_token()
        except (Unavailable, UpstreamError) as error:
            log.warning("no sign of life: %s", error)

    async def _fetch_metrics(self, path: str) -> None:
        try:
            status, text = await self._small("GET", path)
        except (Unavailable, UpstreamError) as error:
            log.debug("metrics: %s", error)  # the last page expires
            return
        if status == 200:
            self._metrics, self._metrics_at = without_ours(text), time.monotonic()
            before, self._decodes = self._decodes, decodes_in(text)
            self._tokens += before is not None and self._decodes != before


def _notes_a_kept_connection() -> aiohttp.TraceConfig:
    """Sets `is_kept` of a request's trace_request_ctx where no new connection was made for it."""

    async def note(
        _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceConnectionReuseconnParams
    ) -> None:
        context.trace_request_ctx.is_kept = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(note)
    return config


def _ask_for_usage(request: OpenAIRequest) -> bool:
    """Make a stream end with its usage. Returns whether the client did not ask for it."""
    options = request.to_dict().get("stream_options") or {}
    if not isinstance(options, dict) or options.get("include_usage"):
        return False
    request.stream_options = {**options, "include_usage": True}
    return True
