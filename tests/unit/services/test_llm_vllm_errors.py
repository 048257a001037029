"""vLLM 0.32's own messages, as it gave them, and what OpenAI's clients read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from services.llm.server.engines.vllm.errors import MOST_CHARACTERS, openai_error, parameter, reason

INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("message", "param", "said", "code", "where"),
    [
        (
            "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input "
            "tokens. (parameter=input_tokens, value=2049)",
            "input_tokens",
            "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input "
            "tokens.",
            "context_length_exceeded",
            "input_tokens",
        ),
        (
            "max_tokens=100000 cannot be greater than max_model_len=2048. (parameter=max_tokens, value=100000)",
            "max_tokens",
            "max_tokens=100000 cannot be greater than max_model_len=2048.",
            "context_length_exceeded",
            "max_tokens",
        ),
        (
            'Grammar error: at 1(8): invalid regex "([" (in regex): regex parse error:\n    ([\n     ^\nerror: unclosed',
            None,
            'Grammar error: at 1(8): invalid regex "([" (in regex): regex parse error: ([ ^ error: unclosed',
            "invalid_value",
            None,
        ),
        (
            "token_id(s) [99999999] in logit_bias contain out-of-vocab token ids. (parameter=logit_bias, value=[999])",
            "logit_bias",
            "token_id(s) [99999999] in logit_bias contain out-of-vocab token ids.",
            "invalid_value",
            "logit_bias",
        ),
        (
            "1 validation error:\n  {'type': 'float_parsing', 'loc': 'body.temperature', 'msg': 'Input should be a "
            "valid number', 'input': 'hot'}",
            "body.temperature",
            "temperature: Input should be a valid number, found 'hot'",
            "invalid_type",
            "temperature",
        ),
        (
            "2 validation errors:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input should be a valid "
            "string', 'input': '<dict of 1 items>'}\n  {'type': 'list_type', 'loc': 'body.stop', 'msg': 'Input should "
            "be a valid list', 'input': '<dict of 1 items>'}",
            "body.stop",
            "stop: Input should be a valid string or: Input should be a valid list, found an object",
            "invalid_type",
            "stop",
        ),
        (
            "11 validation errors:\n  {'type': 'missing', 'loc': 'body.messages.0.ChatCompletionUserMessageParam.role', "
            "'msg': 'Field required', 'input': '<dict of 1 items>'}\n  {'type': 'missing', 'loc': "
            "'body.messages.0.ChatCompletionToolMessageParam.tool_call_id', 'msg': 'Field required'}\n  ...and 1 more",
            "body.messages.0.ChatCompletionUserMessageParam.role",
            "messages[0].role: Field required",
            "missing_required_parameter",
            "messages[0].role",
        ),
        (
            "1 validation error:\n  {'type': 'less_than_equal', 'loc': 'body.seed', 'msg': 'Input should be less than "
            "or equal to 9', 'input': '10', 'ctx': {'le': 9}}",
            "body.seed",
            "seed: Input should be less than or equal to 9, found '10'",
            "invalid_value",
            "seed",
        ),
        (
            "1 validation error:\n  {'type': 'value_error', 'loc': 'body', 'msg': 'Value error, it is wrong', 'input': "
            "'<dict of 2 items>', 'ctx': {'error': ValueError('it is...[truncated]",
            "body",
            "it is wrong",
            "invalid_value",
            None,
        ),
    ],
    ids=["prompt", "max_tokens", "grammar", "member", "type", "union", "missing", "bound", "cut off"],
)
def test_what_is_wrong_with_a_request(message: str, param: str | None, said: str, code: str, where: str | None) -> None:
    told = openai_error(400, message, param)
    assert (told.message, told.kind, told.code, told.param) == (said, INVALID, code, where)


def test_what_is_not_there() -> None:
    told = openai_error(404, "The model `another` does not exist. Valid aliases: served.", "model")
    assert (told.kind, told.code, told.param) == (INVALID, "model_not_found", "model")
    assert openai_error(404, "There is no such response").code == "not_found"


def test_failures_of_the_engine_are_the_servers() -> None:
    told = openai_error(500, "EngineCore encountered an issue.\nSee stack trace (above) for the root cause.")
    assert (told.kind, told.code) == ("server_error", None)
    assert "\n" not in told.message


def test_why_an_adapter_is_refused() -> None:
    message = (
        "Call to add_lora method failed: Worker failed with error 'LoRA rank 512 is greater than max_lora_rank 16.', "
        "please check the stack trace above for the root cause"
    )
    assert reason(message) == "LoRA rank 512 is greater than max_lora_rank 16."
    assert reason("No adapter found for <path>") == "No adapter found for <path>"


def test_members_are_spelt_as_openai_does() -> None:
    assert parameter("body.tools.0.function") == "tools[0].function"
    assert parameter("model") == "model"
    assert parameter("body") is None


@given(some.integers(400, 599), some.text(), some.none() | some.text())
def test_whatever_it_says_is_one_line(status: int, message: str, param: str | None) -> None:
    for text in (message, f"1 validation error:\n{message}", f"2 validation errors:\n  {{{message!r}: 1, 'msg': 2}}"):
        told = openai_error(status, text, param)
        assert "\n" not in told.message
        assert len(told.message) <= MOST_CHARACTERS
