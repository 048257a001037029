"""OpenAI's requests and answers as objects, which are parsed when a member is first read.

    request = ChatCompletionRequest(model="qwen", messages=[{"role": "user", "content": "Hi"}])
    request = ChatCompletionRequest.from_bytes(body)        # not parsed
    request.messages[0]["content"]                          # parsed now
    request.to_bytes()                                      # the bytes as they came, if nothing was changed

Members of a request are plain JSON values. Members of an answer have attributes as well:
`answer.choices[0].message.content`. Nothing is checked but that a request is a JSON object: engines check the rest.
Needs no pydantic.
"""

from __future__ import annotations

import copy
import inspect
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any, ClassVar, Self

from pierhead.errors import PierheadError
from pierhead.llm.openai_error import LLMRequestError, kind_of

_NOT_THERE: Any = object()


class MissingMember(LLMRequestError, AttributeError):
    """A request lacks a member that its API requires: OpenAI's error with status 400 where nobody catches it."""


@dataclass(slots=True)
class Usage:
    """What a request used, where the engine counts it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt's tokens: how many the engine had in its prefix cache."""
    finish_reason: str = ""
    """Of several choices, the first one's."""


class StreamEvents(str):
    """One or more whole server-sent events: `data: {...}` with the blank line behind each."""

    __slots__ = ("tokens", "usage")

    tokens: int
    """Tokens generated since the StreamEvents before these."""
    usage: Usage | None
    """The whole request's, in its last StreamEvents."""

    def __new__(cls, text: str, tokens: int = 0, usage: Usage | None = None) -> Self:
        """Text of one or more whole events."""
        made = str.__new__(cls, text)
        made.tokens = tokens
        made.usage = usage
        return made

    def __getnewargs__(self) -> tuple[str, int, Usage | None]:  # type: ignore[override]  # str's own has the text only
        return str(self), self.tokens, self.usage

    @classmethod
    def from_bytes(cls, data: bytes, tokens: int = 0, usage: Usage | None = None) -> Self:
        """The events that a server sent, whatever bytes it sent."""
        return cls(data.decode("utf-8", "surrogateescape"), tokens, usage)


@dataclass(slots=True)
class RawAnswer:
    """A part of an answer that is not OpenAI's JSON: audio, or what an engine's own server said."""

    data: bytes
    content_type: str = ""
    """Of the whole answer, in its first part."""
    status: int = 200
    tokens: int = 0
    usage: Usage | None = None


class AnswerPart(dict[str, Any]):
    """A JSON object inside an answer: its members are items and attributes. OpenAI's optional ones are None."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in _OPTIONAL:
            return None
        raise AttributeError(f"there is no member {name} among {', '.join(self) or 'none'}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = _parts(value)

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """The members as plain JSON values."""
        dumped: dict[str, Any] = _plain(dict(self), exclude_none)
        return dumped


_OPTIONAL = frozenset(
    (
        "annotations", "audio", "bytes", "cached_tokens", "completion_tokens_details", "content", "finish_reason",
        "function_call", "logprobs", "name", "prompt_logprobs", "prompt_tokens_details", "reasoning",
        "reasoning_content", "reasoning_tokens", "refusal", "role", "stop_reason", "token_ids", "tool_calls",
        "top_logprobs",
    )
)  # fmt: skip
"""Members of the objects in an answer that OpenAI's API, or vLLM's, leaves out."""


class OpenAIObject:
    """Made by keyword, by `model_validate`, or `from_bytes`. The class names the members that its API defines: one that
    is absent is its default; one without a default is required. Any other may be set and read as well."""

    _defaults: ClassVar[dict[str, Any]] = {}
    _required: ClassVar[frozenset[str]] = frozenset()

    _members: dict[str, Any]
    """All members; while `_unread` is there, those that take the place of what it holds."""
    _unread: bytes | None = None
    _data: bytes | None = None
    """Bytes that say the same as the members; None = not known."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        own = [name for name in inspect.get_annotations(cls) if not name.startswith("_")]
        defaults = {name: cls.__dict__[name] for name in own if name in cls.__dict__}
        cls._defaults = cls._defaults | defaults
        cls._required = (cls._required | set(own)) - set(cls._defaults)
        for name in defaults:
            delattr(cls, name)  # so that `__getattr__` is asked

    def __init__(self, /, **members: Any) -> None:
        self._members = members

    @classmethod
    def from_bytes(cls, data: bytes, /, **instead: Any) -> Self:
        """The object in these bytes of JSON, which are not parsed yet. `instead`: members that take the place of its
        own. Bytes that are no JSON object raise where a member is read."""
        made = cls.__new__(cls)
        made.__dict__.update(_members=instead, _unread=data, _data=None if instead else data)
        return made

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """The object of these members: a mapping, or an object of this or of pydantic's kind."""
        if isinstance(value, cls):
            return value
        return cls(**(value if isinstance(value, Mapping) else value.model_dump()))

    @classmethod
    def model_validate_json(cls, data: bytes | str) -> Self:
        """As `from_bytes`, parsed at once."""
        made = cls.from_bytes(data.encode() if isinstance(data, str) else data)
        made._read()
        return made

    def to_bytes(self) -> bytes:
        """As JSON: the bytes as they came, if nothing was set since and no list or object was read. Raises
        LLMRequestError, for an answer PierheadError, for members that JSON cannot hold."""
        if self._data is None:
            self._read()
        if self._data is not None:
            return self._data
        try:
            return json.dumps(self._members, default=_dumped, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise self._unwritable(f"cannot be written as JSON: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The members that are set. The lists and objects in it are the request's own: they are not to be changed."""
        return dict(self._read())

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """The members that are set, as plain JSON values; defaults are not among them."""
        dumped: dict[str, Any] = _plain(self._read(), exclude_none)
        return dumped

    def model_dump_json(self, *, exclude_none: bool = False, **_: Any) -> str:
        """The members that are set, as JSON."""
        return json.dumps(self.model_dump(exclude_none=exclude_none))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, with these members in the place of its own. Lists and objects are shared unless `deep`."""
        made = copy.copy(self)
        if deep:
            made._members = copy.deepcopy(made._members)
        for name, value in (update or {}).items():
            setattr(made, name, value)
        return made

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, _members=dict(self._members))
        return made

    @property
    def model_fields_set(self) -> set[str]:
        """The names of the members that are set."""
        return set(self._read())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python's own questions
            raise AttributeError(name)
        members = self._members if name in self._members else self._read()
        value = members.get(name, _NOT_THERE)
        if isinstance(value, list | dict):  # the caller may change it
            self._read()
            self._data = None
        elif value is _NOT_THERE:
            value = self._default(name)
        return value

    def _default(self, name: str) -> Any:
        if name in self._required:
            raise self._missing(name)
        if name not in self._defaults:
            raise AttributeError(f"{type(self).__name__} has no member {name}")
        return self._defaults[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self._members[name] = value
            self._data = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenAIObject) and type(self) is type(other) and self._read() == other._read()

    __hash__ = None  # type: ignore[assignment]  # its members change

    def __repr__(self) -> str:
        if self._unread is not None:
            return f"{type(self).__name__}(<{len(self._unread)} bytes, not parsed>)"
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._members.items())})"

    def _read(self) -> dict[str, Any]:
        """All members, parsed now if they were not."""
        if self._unread is not None:
            found = self._parse(self._unread)
            members = found | self._members
            if members == found:
                self._data = self._unread
            self._members, self._unread = members, None
        return self._members

    def _parse(self, data: bytes) -> dict[str, Any]:
        return json_object(data, "the request's body")

    def _missing(self, name: str) -> AttributeError:
        return AttributeError(f"{type(self).__name__} has no {name}")

    def _unwritable(self, why: str) -> PierheadError:
        return LLMRequestError(f"the request {why}", code="invalid_json")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """For web frameworks: a parameter of this type is the request's body."""
        from pydantic_core import core_schema

        dumped = core_schema.plain_serializer_function_ser_schema(cls.model_dump)
        body = core_schema.dict_schema(core_schema.str_schema())
        return core_schema.union_schema(
            [
                core_schema.is_instance_schema(cls),
                core_schema.no_info_after_validator_function(cls.model_validate, body),
            ],
            serialization=dumped,
        )


def json_object(data: bytes | str, what: str) -> dict[str, Any]:
    """The members of a JSON object. Raises LLMRequestError that says what else was found in `what`."""
    try:
        found = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise LLMRequestError(f"{what} is not JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise LLMRequestError(f"{what}: expected a JSON object, found {kind_of(found)}", code="invalid_type")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _dumped(value: Any) -> Any:
    """An object within one that is written as JSON: of this kind, or of pydantic's."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _plain(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each, exclude_none) for name, each in value.items() if not (exclude_none and each is None)}
    if isinstance(value, list | tuple):
        return [_plain(each, exclude_none) for each in value]
    return _plain(value.model_dump(), exclude_none) if hasattr(value, "model_dump") else value


# -------------------------------------------------------------------------------------------------------------- answers


class OpenAIAnswer(OpenAIObject):
    """An answer. One that is made by keyword gets the members that identify it."""

    _prefix: ClassVar[str] = ""
    """Of its id; "" = it has none of these members."""
    _usage: Usage | None = None

    def __init__(self, /, **members: Any) -> None:
        made: dict[str, Any] = {}
        if self._prefix:
            made = {"id": f"{self._prefix}-{uuid.uuid4().hex}", "object": self._defaults["object"]}
            made["created"] = int(time.time())
        super().__init__(**{name: _parts(value) for name, value in (made | members).items()})

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value if name.startswith("_") else _parts(value))

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data, object_hook=AnswerPart)
        except (ValueError, RecursionError) as error:
            raise PierheadError(f"the engine's answer is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise PierheadError(f"the engine's answer: expected a JSON object, found {kind_of(found)}")
        return dict(found)

    def _unwritable(self, why: str) -> PierheadError:
        return PierheadError(f"the engine's answer {why}")

    def counted(self, usage: Usage) -> Self:
        """This answer, with what its request used: nobody need parse it to find that."""
        self._usage = usage
        return self

    def accounting(self) -> Usage:
        """What its request used, as far as it says so."""
        if self._usage is None:
            self._usage = usage_of(self._read())
        return self._usage


def _parts(value: Any) -> Any:
    """A value of an answer, the objects in it with attributes."""
    if isinstance(value, dict):
        return (
            value if isinstance(value, AnswerPart) else AnswerPart((name, _parts(each)) for name, each in value.items())
        )
    if isinstance(value, list | tuple):
        return [_parts(each) for each in value]
    return _parts(value.model_dump()) if hasattr(value, "model_dump") else value


def usage_of(members: Mapping[str, Any]) -> Usage:
    """What an answer, or an event of one, says that its request used."""
    used = Usage()
    usage, choices = usage_in(members), members.get("choices")
    if usage is not None:
        details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
        # Of Anthropic's API, whose input_tokens are the rest of the prompt.
        cached, written = _count(usage, "cache_read_input_tokens"), _count(usage, "cache_creation_input_tokens")
        made = _count(usage, "completion_tokens", "output_tokens")
        prompt = _count(usage, "prompt_tokens") or _count(usage, "input_tokens") + cached + written
        used.prompt_tokens = prompt or max(0, _count(usage, "total_tokens") - made)  # of rerankers
        used.completion_tokens = made
        used.cached_tokens = _count(details, "cached_tokens") if isinstance(details, dict) else cached
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("finish_reason") and choice.get("index", 0) == 0:
            used.finish_reason = str(choice["finish_reason"])
    return used


def usage_in(members: Mapping[str, Any]) -> dict[str, Any] | None:
    """The usage in an answer, or in an event of one, which may have it in its `response` or `message`."""
    for holder in (members, members.get("response"), members.get("message")):
        if isinstance(holder, Mapping) and isinstance(usage := holder.get("usage"), dict):
            return usage
    return None


def _count(members: Mapping[str, Any], *names: str) -> int:
    """The first of these members that is a number of tokens."""
    found = (members.get(name) for name in names)
    return next((each for each in found if isinstance(each, int) and 0 <= each < 2**32), 0)


class ChatCompletionResponse(OpenAIAnswer):
    """A whole chat completion."""

    _prefix = "chatcmpl"

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Any]
    usage: Any = None
    service_tier: str | None = None
    system_fingerprint: str | None = None
    prompt_logprobs: Any = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: Any = None


class ChatCompletionStreamResponse(ChatCompletionResponse):
    """One event of a chat completion that streams. As text: f"data: {response.model_dump_json()}" and a blank line."""

    object: str = "chat.completion.chunk"


class CompletionResponse(ChatCompletionResponse):
    """A whole completion."""

    _prefix = "cmpl"

    object: str = "text_completion"


class CompletionStreamResponse(CompletionResponse):
    """One event of a completion that streams."""


class EmbeddingResponse(OpenAIAnswer):
    """Embeddings."""

    _prefix = "embd"

    id: str | None = None
    object: str = "list"
    created: int | None = None
    model: str | None = None
    data: list[Any]
    usage: Any = None


class ScoreResponse(EmbeddingResponse):
    """Scores."""

    _prefix = "score"


class TokenizeResponse(OpenAIAnswer):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(OpenAIAnswer):
    """The text of tokens."""

    prompt: str


class TranscriptionResponse(OpenAIAnswer):
    """A text that was said."""

    text: str
    usage: Any = None


class TranscriptionStreamResponse(ChatCompletionStreamResponse):
    """One event of a transcription that streams."""

    _prefix = "trsc"

    object: str = "transcription.chunk"


class ErrorInfo(AnswerPart):
    """What OpenAI's error object says: `message`, `type`, `param`, `code`."""

    def __init__(self, /, **members: Any) -> None:
        super().__init__({"type": "invalid_request_error", "param": None, "code": None} | members)


class ErrorResponse(OpenAIAnswer):
    """An error in the place of an answer: {"error": {"message", "type", "param", "code"}}."""

    _status: int | None = None

    error: Any

    @classmethod
    def of(
        cls, status: int, message: str, *, kind: str, code: str | int | None = None, param: str | None = None
    ) -> Self:
        """An error with this HTTP status."""
        info = {"message": message, "type": kind, "param": param, "code": code}
        return cls(error=info).with_status(status)

    @classmethod
    def to(cls, error: LLMRequestError) -> Self:
        """The answer to a refused request."""
        kind = "invalid_request_error"
        return cls.of(error.http_status, error.message, kind=kind, code=error.error_code, param=error.param)

    def with_status(self, status: int) -> Self:
        """This error, with this HTTP status."""
        self._status = status
        return self

    @property
    def status(self) -> int:
        """The HTTP status that was set. Else the error's `code`, if that is a status.

        Else 400 for an error of the request, and 500 for another type.
        """
        if self._status is not None:
            return self._status
        error = self._read().get("error")
        info: Mapping[str, Any] = error if isinstance(error, dict) else {}
        code = info.get("code")
        if isinstance(code, int) and 400 <= code < 600:
            return code
        return 400 if info.get("type") == "invalid_request_error" else 500


# ------------------------------------------------------------------------------------------------------------- requests


class OpenAIRequest(OpenAIObject):
    """A request to any path of the API."""

    _path: str = ""
    _content_type: str = ""
    _answer: ClassVar[type[OpenAIAnswer]] = OpenAIAnswer
    """The class of a whole answer to it."""

    model: str | None = None
    request_id: str | None = None
    user: str | None = None

    @property
    def path(self) -> str:
        """The path that the client asked for: "/v1/chat/completions"."""
        return self._path

    @property
    def content_type(self) -> str:
        """Of the body; "" = application/json."""
        return self._content_type

    @property
    def has_body(self) -> bool:
        """Whether it has one: a request without is a GET."""
        return self._data != b""

    def sent_to(self, path: str, content_type: str = "") -> Self:
        """This request, with another path than its class's. A body that is not JSON, or that is empty, stays as it is,
        whatever members take the place of its own."""
        self._path, self._content_type = path or self._path, content_type
        if not self._unread or content_type.partition(";")[0].strip() not in ("", "application/json"):
            self._data = self._unread
        return self

    def _missing(self, name: str) -> AttributeError:
        return MissingMember(f"{name}: expected a value, found none", code="missing_required_parameter", param=name)


class _Generating(OpenAIRequest):
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    echo: bool = False
    add_special_tokens: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None


class ChatCompletionRequest(_Generating):
    """/v1/chat/completions"""

    _path = "/v1/chat/completions"
    _answer = ChatCompletionResponse

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Generating):
    """/v1/completions"""

    _path = "/v1/completions"
    _answer = CompletionResponse

    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class EmbeddingRequest(OpenAIRequest):
    """/v1/embeddings: `input`, or `messages` where the engine embeds conversations."""

    _path = "/v1/embeddings"
    _answer = EmbeddingResponse

    encoding_format: str = "float"
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0


class EmbeddingCompletionRequest(EmbeddingRequest):
    """With `input`."""

    input: str | list[str] | list[int] | list[list[int]]


class EmbeddingChatRequest(EmbeddingRequest):
    """With `messages`."""

    messages: list[dict[str, Any]]


class ScoreRequest(OpenAIRequest):
    """/v1/score"""

    _path = "/v1/score"
    _answer = ScoreResponse

    text_1: str | list[str]
    text_2: str | list[str]
    truncate_prompt_tokens: int | None = None
    priority: int = 0


class TokenizeRequest(OpenAIRequest):
    """/tokenize: `prompt`, or `messages`."""

    _path = "/tokenize"
    _answer = TokenizeResponse

    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeCompletionRequest(TokenizeRequest):
    """With `prompt`."""

    prompt: str


class TokenizeChatRequest(TokenizeRequest):
    """With `messages`."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(OpenAIRequest):
    """/detokenize"""

    _path = "/detokenize"
    _answer = DetokenizeResponse

    tokens: list[int]


class TranscriptionRequest(OpenAIRequest):
    """/v1/audio/transcriptions. A form's fields are members; `file` is then bytes."""

    _path = "/v1/audio/transcriptions"
    _answer = TranscriptionResponse

    file: Any
    language: str | None = None
    prompt: str = ""
    response_format: str = "json"
    temperature: float = 0.0
    stream: bool = False

    def _parse(self, data: bytes) -> dict[str, Any]:
        if not self.content_type.startswith("multipart/form-data"):
            return super()._parse(data)
        return _form_fields(data, self.content_type)


def _form_fields(data: bytes, content_type: str) -> dict[str, Any]:
    head = f"Content-Type: {content_type}\r\n\r\n".encode("latin-1", "replace")
    fields: dict[str, Any] = {}
    for part in BytesParser(policy=HTTP).parsebytes(head + data).iter_parts():
        value = part.get_payload(decode=True)
        name = part.get_param("name", header="content-disposition")
        if isinstance(name, str) and isinstance(value, bytes):
            fields[name] = value if part.get_filename() else value.decode(errors="replace")
    return fields
