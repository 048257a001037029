"""vLLM's errors as OpenAI has them. Pure; made for vLLM 0.32: test_llm_vllm_errors.py has its own messages.

| vLLM's type and number | message | type | code |
|---|---|---|---|
| BadRequestError 400 | This model's maximum context length ... | invalid_request_error | context_length_exceeded |
| Bad Request 400 | a page of findings; one sentence of it | same | invalid_type, invalid_value, missing_... |
| NotFoundError 404 | The model `x` does not exist ... | same | model_not_found |
| any from 500 on | | server_error | null |
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

MOST_CHARACTERS = 800
"""Of a message."""

DIED = "vLLM's engine has died; the replica is replaced, and its log says why"

_DEATH = "EngineCore encountered an issue"
"""How vLLM's EngineDeadError begins."""

_CONTEXT = re.compile(
    r"maximum context length|max_model_len|maximum model length|longer than the maximum", re.IGNORECASE
)
_TAIL = re.compile(r"\s*\(parameter=[^()]*(?:\([^()]*\)[^()]*)*\)\s*$")
_FINDINGS = re.compile(r"\d+ validation errors?:\n")
_WORKER = re.compile(r"(?:Call to \w+ method failed: )?Worker failed with error '(.*)', please check .*", re.DOTALL)
_UNION_MEMBER = re.compile(r"[A-Z]\w*")
_TYPES = ("_type", "_parsing", "_type_error")


@dataclass(frozen=True, slots=True)
class OpenAIError:
    """The members of OpenAI's error object."""

    message: str
    kind: str
    code: str | None
    param: str | None


def openai_error(status: int, message: str, param: str | None = None) -> OpenAIError:
    """The error as OpenAI would return it. `status`, `message` and `param` are vLLM's."""
    if status >= 500:
        return OpenAIError(one_line(message), "server_error", None, param)
    param = parameter(param) if param else None
    findings = _FINDINGS.match(message)
    if findings is not None:
        return _of_findings(message[findings.end() :], param)
    text = one_line(_TAIL.sub("", message))
    if status == 404:
        return OpenAIError(text, "invalid_request_error", "model_not_found" if param == "model" else "not_found", param)
    if _CONTEXT.search(text):
        return OpenAIError(text, "invalid_request_error", "context_length_exceeded", param)
    return OpenAIError(text, "invalid_request_error", "invalid_value", param)


def is_death(message: str) -> bool:
    """Whether an error of vLLM says that the whole engine has died: no request is at fault."""
    return message.startswith(_DEATH)


def reason(message: str) -> str:
    """The cause in a message of vLLM, without its place in vLLM's code."""
    return one_line(_WORKER.sub(r"\1", message))


def one_line(text: str) -> str:
    """The text in one line of limited length."""
    text = " ".join(text.split())
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


def parameter(location: str) -> str | None:
    """A member as OpenAI spells it: "body.messages.0.ChatCompletionUserMessageParam.role" -> "messages[0].role"."""
    spelt = ""
    for part in location.removeprefix("body").strip(".").split("."):
        if part.isdigit():
            spelt += f"[{part}]"
        elif part and not _UNION_MEMBER.fullmatch(part):
            spelt += f".{part}"
    return spelt.strip(".") or None


def _of_findings(page: str, param: str | None) -> OpenAIError:
    """The error for the first finding's member, with every finding about it."""
    found = [finding for line in page.splitlines() if (finding := _finding(line.strip()))]
    if not found:
        return OpenAIError(one_line(page), "invalid_request_error", "invalid_value", param)
    where = parameter(str(found[0].get("loc", "")))
    same = [finding for finding in found if parameter(str(finding.get("loc", ""))) == where]
    said = dict.fromkeys(str(each.get("msg", "")).removeprefix("Value error, ") for each in same)
    text = " or: ".join(list(said)[:3])
    kinds = {str(each.get("type", "")) for each in same}
    missing = "missing" in kinds
    if not missing and "input" in found[0]:
        text += f", found {_shown(found[0]['input'])}"
    wrong_type = all(kind.endswith(_TYPES) for kind in kinds)
    code = "missing_required_parameter" if missing else "invalid_type" if wrong_type else "invalid_value"
    return OpenAIError(one_line(f"{where}: {text}" if where else text), "invalid_request_error", code, where or param)


def _finding(line: str) -> dict[str, Any] | None:
    try:
        found = ast.literal_eval(line)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # cut off, or of objects that have no literal
        members = re.findall(r"'(type|loc|msg)': (?:'([^']*)'|\"([^\"]*)\")", line)
        found = {name: single or double for name, single, double in members}
    return found if isinstance(found, dict) and "msg" in found else None


def _shown(value: object) -> str:
    text = str(value)
    if text.startswith("<") and text.endswith("items>"):  # vLLM's stand-in for what is too large to show
        return "an object" if text.startswith("<dict") else "an array"
    return repr(text if len(text) <= 60 else text[:57] + "...")
