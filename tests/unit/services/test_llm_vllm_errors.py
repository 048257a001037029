"""vLLM 0.32's own messages, the long ones shortened, and what OpenAI's clients read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some
from pierhead.llm.server.engines.vllm.errors import MOST_CHARACTERS, is_death, openai_error, reason

INVALID = "invalid_request_error"


def findings(*lines: str) -> str:
    """A page of findings as vLLM writes it."""
    return "\n  ".join([f"{len(lines)} validation error{'s' * (len(lines) > 1)}:", *lines])


WRONG: dict[str, tuple[str, str, str | None, str, str | None]] = {
    "prompt": (
        "This model's maximum context length is 2048 tokens. Reduce the prompt. (parameter=input_tokens, value=49)",
        "This model's maximum context length is 2048 tokens. Reduce the prompt.",
        *("input_tokens", "context_length_exceeded", "input_tokens"),
    ),
    "max_tokens": (
        "max_tokens=100000 cannot be greater than max_model_len=2048. (parameter=max_tokens, value=100000)",
        "max_tokens=100000 cannot be greater than max_model_len=2048.",
        *("max_tokens", "context_length_exceeded", "max_tokens"),
    ),
    "grammar": (
        'Grammar error: invalid regex "([" (in regex): regex parse error:\n    ([\n     ^\nerror: unclosed class',
        'Grammar error: invalid regex "([" (in regex): regex parse error: ([ ^ error: unclosed class',
        *(None, "invalid_value", None),
    ),
    "member": (
        "token_id(s) [99999999] in logit_bias contain out-of-vocab token ids. (parameter=logit_bias, value=[999])",
        "token_id(s) [99999999] in logit_bias contain out-of-vocab token ids.",
        *("logit_bias", "invalid_value", "logit_bias"),
    ),
    "type": (
        findings("{'type': 'float_parsing', 'loc': 'body.temperature', 'msg': 'Not a number', 'input': 'hot'}"),
        "temperature: Not a number, found 'hot'",
        *("body.temperature", "invalid_type", "temperature"),
    ),
    "union": (
        findings(
            "{'type': 'string_type', 'loc': 'body.stop', 'msg': 'Not a string', 'input': '<dict of 1 items>'}",
            "{'type': 'list_type', 'loc': 'body.stop', 'msg': 'Not a list', 'input': '<dict of 1 items>'}",
        ),
        "stop: Not a string or: Not a list, found an object",
        *("body.stop", "invalid_type", "stop"),
    ),
    "missing": (
        findings(
            "{'type': 'missing', 'loc': 'body.messages.0.ChatCompletionUserMessageParam.role', 'msg': 'Required'}",
            "{'type': 'missing', 'loc': 'body.messages.0.ChatCompletionToolMessageParam.id', 'msg': 'Required'}",
            "...and 1 more errors",
        ),
        "messages[0].role: Required",
        *("body.messages.0.ChatCompletionUserMessageParam.role", "missing_required_parameter", "messages[0].role"),
    ),
    "cut off": (
        findings("{'type': 'value_error', 'loc': 'body', 'msg': 'Value error, it is wrong', 'ctx': ...[truncated]"),
        "it is wrong",
        *("body", "invalid_value", None),
    ),
}


@pytest.mark.parametrize(("message", "said", "param", "code", "where"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_request(message: str, said: str, param: str | None, code: str, where: str | None) -> None:
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


@given(some.integers(400, 599), some.text(), some.none() | some.text())
def test_whatever_it_says_is_one_line(status: int, message: str, param: str | None) -> None:
    for text in (message, f"1 validation error:\n{message}", f"2 validation errors:\n  {{{message!r}: 1, 'msg': 2}}"):
        told = openai_error(status, text, param)
        assert "\n" not in told.message
        assert len(told.message) <= MOST_CHARACTERS


def test_an_engine_that_died_is_no_fault_of_a_request() -> None:
    assert is_death("EngineCore encountered an issue. See stack trace (above) for the root cause.")
    assert not is_death("CUDA error in one request")
