"""Sends a request to the stack's edge, as a client does, and the answer to a page, as it comes.

Nothing but the edge is ever asked: its address is the controller's, a path begins with a slash, and bodies.py has
refused what else could lead away. Keys of clients are passed on, and kept and logged nowhere.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
from aiohttp import web
from google.protobuf.message import DecodeError
from multidict import CIMultiDict
from yarl import URL

from ..errors import InvalidRequest, TooMany
from ..model.spec import ServiceSpec
from ..status.methods import RpcForm, rpc_form
from ..status.records.answers import TryEnd, TryHead, TryPart
from ..status.records.changes import Try
from ..status.records.document import as_json
from .event_stream import send_events

MOST_CALLS = 16
"""At a time."""
MOST_BYTES = 1024 * 1024
"""Of an answer's body; the rest is not read."""


@dataclass(frozen=True, slots=True)
class EdgeAddress:
    """Where HAProxy takes requests, as the controller reaches it."""

    http: str = "http://haproxy:8000"
    grpc: str = "haproxy:9000"
    """"" = over TLS alone, which gRPC does not speak to a name that is in no certificate."""


PLAIN, OVER_TLS = EdgeAddress(), EdgeAddress("https://haproxy:8443", "")


class _Received:
    """What is known of an answer so far."""

    def __init__(self, request_id: str) -> None:
        self._began = time.monotonic()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.request_id, self.size, self.status, self.problem = request_id, 0, "", ""

    def head(self, status: str, headers: list[tuple[str, str]]) -> TryPart:
        return TryPart(self.request_id, TryHead(status, tuple(headers), time.monotonic() - self._began))

    def piece(self, data: bytes) -> TryPart:
        """The next piece, or what of it there is room for."""
        kept = data[: max(0, MOST_BYTES - self.size)]
        self.size += len(data)
        if self.size > MOST_BYTES:
            self.problem = f"only the first {MOST_BYTES >> 20} MiB of the body were read"
        return TryPart(self.request_id, text=self._decoder.decode(kept))

    def end(self) -> TryPart:
        total_s = time.monotonic() - self._began
        end = TryEnd(total_s, min(self.size, MOST_BYTES), self.status, self.problem)
        return TryPart(self.request_id, text=self._decoder.decode(b"", final=True), end=end)


class EdgeCalls:
    """The calls under way."""

    def __init__(self, address: EdgeAddress, closing: asyncio.Event) -> None:
        """`closing`: the controller ends, and all calls with it."""
        self._address = address
        self._closing = closing
        self._running = 0

    def begin(self, spec: ServiceSpec, wanted: Try, contract: bytes) -> AsyncGenerator[TryPart, None]:
        """A call to a service, which `stream` sends. `contract`: a replica's, b"" = none.

        Raises InvalidRequest for what is no path or method of this service, TooMany.
        """
        if self._running >= MOST_CALLS:
            raise TooMany(f"{MOST_CALLS} requests are being tried already; stop one, and repeat")
        if wanted.method != "gRPC":
            _check_path(spec, wanted.path)
            return self._parts(spec, wanted, None)
        if not self._address.grpc:
            raise InvalidRequest("method: this stack takes gRPC over TLS alone; use a gRPC client such as grpcurl")
        if wanted.path.split("/")[1] not in spec.grpc_services:
            raise InvalidRequest(f"path: HAProxy has no such gRPC service of {spec.name} (x-serve.grpc_services)")
        return self._parts(spec, wanted, (form := rpc_form(contract, wanted.path), form.request(_json(wanted.body))))

    async def _parts(
        self, spec: ServiceSpec, wanted: Try, rpc: tuple[RpcForm, bytes] | None
    ) -> AsyncGenerator[TryPart, None]:
        answer, ended = _Received(str(uuid.uuid4())), f"it had not ended after {wanted.timeout_s:g} s"
        try:
            yield TryPart(answer.request_id)
            parts = self._rpc(spec, wanted, *rpc, answer) if rpc else self._http(spec, wanted, answer)
            async with aclosing(parts):
                async for part in parts:
                    yield part
        except TimeoutError:
            answer.problem = ended
        except grpc.aio.AioRpcError as error:
            answer.status, answer.problem = error.code().name, error.details() or ""
        except aiohttp.ClientPayloadError:
            answer.problem = "the answer broke off"
        except (aiohttp.ClientError, OSError, ValueError, DecodeError) as error:
            answer.problem = f"no answer of HAProxy that can be read: {str(error) or type(error).__name__}"
        yield answer.end()

    async def _http(self, spec: ServiceSpec, wanted: Try, answer: _Received) -> AsyncGenerator[TryPart, None]:
        headers = CIMultiDict({"Accept": "*/*", "Accept-Encoding": "identity", **_authorization(wanted)})
        if wanted.body:
            headers["Content-Type"] = "application/json"
        headers.update(wanted.headers)
        headers["X-Request-Id"] = answer.request_id
        headers.setdefault("traceparent", _traceparent(answer.request_id))
        if spec.host:
            headers["Host"] = spec.host.replace("*", "try", 1)
        session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=wanted.timeout_s),
            # Its certificate is for the clients' name of it, and the way to it is the stack's own network.
            connector=aiohttp.TCPConnector(ssl=False, force_close=True),
        )
        url, data = URL(self._address.http + wanted.path, encoded=True), wanted.body.encode(errors="replace") or None
        async with (
            session,
            session.request(wanted.method, url, headers=headers, data=data, allow_redirects=False) as response,
        ):
            yield answer.head(f"{response.status} {response.reason or ''}".rstrip(), list(response.headers.items()))
            async for data in response.content.iter_any():
                yield answer.piece(data)
                if answer.problem:
                    return

    async def _rpc(
        self, spec: ServiceSpec, wanted: Try, form: RpcForm, message: bytes, answer: _Received
    ) -> AsyncGenerator[TryPart, None]:
        chosen = {"application": spec.application or spec.name, "x-request-id": answer.request_id}
        traced = {"traceparent": _traceparent(answer.request_id)}
        given = {name.lower(): value for name, value in {**traced, **_authorization(wanted), **wanted.headers}.items()}
        options = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", MOST_BYTES))
        async with grpc.aio.insecure_channel(self._address.grpc, options=options) as channel:
            call: Any = channel.unary_stream(wanted.path)  # on the wire a single reply is a stream of one
            replies = call(message, timeout=wanted.timeout_s, metadata=tuple({**given, **chosen}.items()))
            metadata = await replies.initial_metadata() or ()
            if metadata or not replies.done():  # done, and nothing came: no connection
                yield answer.head("", [(str(name), str(value)) for name, value in metadata])
            async for reply in replies:
                yield answer.piece(f"{form.reply(reply)}\n".encode())
                if answer.problem:
                    return
            answer.status = (await replies.code()).name

    async def stream(self, request: web.Request, parts: AsyncGenerator[TryPart, None]) -> web.StreamResponse:
        """Answer with the parts of a call, until it ends, the page goes, or the controller ends."""
        self._running += 1
        try:
            return await send_events(request, _events(parts), self._closing)
        finally:
            self._running -= 1


async def _events(parts: AsyncGenerator[TryPart, None]) -> AsyncGenerator[str, None]:
    async with aclosing(parts):
        async for part in parts:
            yield f"data: {json.dumps(part, default=as_json)}\n\n"


def _traceparent(request_id: str) -> str:
    """Has the replicas keep the request's trace, however fast it is. The id is a UUID, with as many digits."""
    return f"00-{uuid.UUID(request_id).hex}-{uuid.uuid4().hex[:16]}-01"


def _authorization(wanted: Try) -> dict[str, str]:
    return {"authorization": f"Bearer {wanted.key}"} if wanted.key else {}


def _check_path(spec: ServiceSpec, path: str) -> None:
    if spec.route is None:
        raise InvalidRequest(f"path: {spec.name} has no route (x-serve.route), so HAProxy sends it no HTTP requests")
    plain = path.partition("?")[0]
    if spec.route != "/" and plain != spec.route and not plain.startswith(f"{spec.route}/"):
        raise InvalidRequest(f"path: expected one below {spec.route}, the route of {spec.name}, found {path[:200]!r}")


def _json(text: str) -> object:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"body: expected a message as JSON: {error}") from None
