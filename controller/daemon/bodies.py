"""The bodies of requests for changes, as records. Each function raises InvalidRequest for another body, with what was
expected and what was found. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args
from urllib.parse import unquote

from ..errors import InvalidRequest
from ..model.keys import MODEL, NAME
from ..model.spec import MOST_REPLICAS
from ..model.text import one_line
from ..status.records import changes
from ..storage.version import VERSION

LONGEST_FAULT = 500
LONGEST_MODELS, LONGEST_SERVICES = 500, 2_000
"""Services get the models in a header, for which HAProxy has 1,024 bytes in addition to a body."""
MOST_COUNTED = 1_000_000_000
"""HAProxy counts with 32 bits."""
MOST_DAYS = 36_500
MOST_SILENCE_S = 366 * 86_400
LEAST_OPERATION_S, LONGEST_OPERATION_S = 0.1, 3600
LONGEST_TRY, LONGEST_TRY_S = 1024 * 1024, 600
MOST_HEADERS, LONGEST_VALUE = 50, 8000
_PATH = re.compile(r"/[!\"$-~]{0,8000}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(rf"[\t -~]{{0,{LONGEST_VALUE}}}")
_OF_THE_EDGE = re.compile(
    r"host|connection|content-length|transfer-encoding|te|trailer|upgrade|keep-alive|expect|proxy-.*|grpc-.*|.*-bin"
    r"|forwarded|x[-_](forwarded|real)[-_].*",
    re.IGNORECASE,
)
"""Headers that say where a request goes, how it travels, or, where the controller is a trusted proxy, who sends it."""


def scale_in(body: bytes) -> changes.Scale:
    """Read {"replicas": 2} or {"replicas": "auto"}."""
    replicas = _document(body, '{"replicas": 2}', "replicas", is_required=True)["replicas"]
    is_number = isinstance(replicas, int) and not isinstance(replicas, bool) and 0 <= replicas <= MOST_REPLICAS
    if replicas != "auto" and not is_number:
        raise InvalidRequest(
            f'replicas: expected an integer from 0 to {MOST_REPLICAS}, or "auto", found {_shown(replicas)}'
        )
    return changes.Scale(replicas)


def deployment_in(body: bytes) -> changes.Deploy:
    """Read {"services": [...], "now": true}, or {}."""
    document = _document(body, '{"services": ["ranker"], "now": true} or {}', "services", "now")
    names, now = document.get("services"), _flag(document, "now")
    if names is None:
        return changes.Deploy(None, now)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"services: expected a list of names of services, found {_shown(names)}")
    return changes.Deploy(tuple(dict.fromkeys(names)), now)


def rollback_in(body: bytes) -> changes.Rollback:
    """Read {"to": version}, or {}."""
    version = _document(body, '{"to": "1a2b3c4d"} or {}', "to").get("to")
    if version is not None and not (isinstance(version, str) and version):
        raise InvalidRequest(f"to: expected a version such as 1a2b3c4d, found {_shown(version)}")
    return changes.Rollback(version)


def operation_in(body: bytes) -> changes.Operate:
    """Read {"operation": "sleep", "level": 1, "timeout_s": 300}."""
    example = '{"operation": "sleep", "level": 1, "timeout_s": 300}'
    document = _document(body, example, "operation", "level", "timeout_s", is_required=True)
    wanted, known = changes.Operate(**{"operation": None, **document}), get_args(changes.LLMOperation)
    level, timeout_s = wanted.level, wanted.timeout_s
    if wanted.operation not in known:
        raise InvalidRequest(f"operation: expected one of {', '.join(known)}, found {_shown(wanted.operation)}")
    if "level" in document and wanted.operation != "sleep":
        raise InvalidRequest(f"level: expected with sleep alone, found it with {wanted.operation}")
    if not isinstance(level, int) or isinstance(level, bool) or level not in (1, 2):
        raise InvalidRequest(f"level: expected 1 or 2, found {_shown(level)}")
    _bounded(timeout_s, LEAST_OPERATION_S, LONGEST_OPERATION_S)
    return wanted


def try_in(body: bytes) -> changes.Try:
    """Read {"method": "POST", "path": "/shop/buy", "body": "{}"}. No error shows the key, or a value of a header."""
    example = '{"method": "POST", "path": "/shop/buy", "headers": {}, "body": "{}", "key": "", "timeout_s": 60}'
    try:
        document = _document(body, example, *(each.name for each in fields(changes.Try)), is_required=True)
    except InvalidRequest:
        raise InvalidRequest(f"body: expected {example} and nothing else") from None
    wanted, known = changes.Try(**{"path": None, **document}), get_args(changes.TryMethod)
    if wanted.method not in known:
        raise InvalidRequest(f"method: expected one of {', '.join(known)}, found {_shown(wanted.method)}")
    if not isinstance(wanted.path, str) or not _PATH.fullmatch(wanted.path) or _leaves(wanted.path):
        raise InvalidRequest(
            f"path: expected one such as /shop/buy?x=1, percent-encoded, without . and .., found {_shown(wanted.path)}"
        )
    if not isinstance(wanted.headers, dict) or len(wanted.headers) > MOST_HEADERS:
        raise InvalidRequest(f"headers: expected at most {MOST_HEADERS} names, each with a text")
    for name, value in wanted.headers.items():
        if not _HEADER.fullmatch(name) or _OF_THE_EDGE.fullmatch(name):
            raise InvalidRequest(f"headers: expected names that a client chooses freely, found {_shown(name)}")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise InvalidRequest(f"headers.{name}: expected one line of ASCII, at most {LONGEST_VALUE} characters long")
    if not isinstance(wanted.key, str) or not _VALUE.fullmatch(wanted.key):
        raise InvalidRequest(f"key: expected one line of ASCII, at most {LONGEST_VALUE} characters long")
    if not isinstance(wanted.body, str) or len(wanted.body.encode(errors="replace")) > LONGEST_TRY:
        raise InvalidRequest(f"body: expected a text of at most {LONGEST_TRY} bytes")
    _bounded(wanted.timeout_s, LEAST_OPERATION_S, LONGEST_TRY_S)
    return wanted


def _leaves(path: str) -> bool:
    """Whether a part of a path is `.` or `..`, by which HAProxy and a service may understand another path."""
    return any(part in (".", "..") for part in re.split(r"[/\\]", unquote(path.partition("?")[0])))


def key_in(body: bytes) -> changes.MakeKey:
    """Read {"name": "team-a", "services": ["web"], "per_minute": 600}."""
    example = '{"name": "team-a", "services": ["web"], "per_minute": 600, "days": 90}'
    document = _document(body, example, *(each.name for each in fields(changes.MakeKey)), is_required=True)
    name = document.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(f"name: expected 1 to 63 letters, digits and ._@-, found {_shown(name)}")
    models = _texts(document, "models", LONGEST_MODELS)
    for model in models:
        if not MODEL.fullmatch(model):
            raise InvalidRequest(f"models: expected names or patterns such as qwen*, found {_shown(model)}")
    return changes.MakeKey(
        name=name,
        services=_texts(document, "services", LONGEST_SERVICES),
        models=models,
        per_minute=_whole(document, "per_minute"),
        tokens_per_minute=_whole(document, "tokens_per_minute"),
        concurrent=_whole(document, "concurrent"),
        days=_whole(document, "days", MOST_DAYS),
    )


def silence_in(body: bytes) -> changes.MakeSilence:
    """Read {"service": "web", "alert": "ErrorRate", "for_s": 7200, "why": "a planned load test"}."""
    example = '{"service": "web", "for_s": 7200, "why": "a planned load test"}'
    document = _document(body, example, *(each.name for each in fields(changes.MakeSilence)), is_required=True)
    service, alert, why = (document.get(key, "") for key in ("service", "alert", "why"))
    for key, text in {"service": service, "alert": alert}.items():
        if not isinstance(text, str):
            raise InvalidRequest(f"{key}: expected a name, found {_shown(text)}")
    if not service and not alert:
        raise InvalidRequest("body: expected a service, an alert or both, found neither")
    why = one_line(why) if isinstance(why, str) else why
    if not (isinstance(why, str) and 0 < len(why) <= LONGEST_FAULT):
        raise InvalidRequest(f"why: expected 1 to {LONGEST_FAULT} characters, found {_shown(why)}")
    for_s = document.get("for_s")
    if not isinstance(for_s, int) or isinstance(for_s, bool) or not 1 <= for_s <= MOST_SILENCE_S:
        raise InvalidRequest(f"for_s: expected whole seconds from 1 to {MOST_SILENCE_S}, found {_shown(for_s)}")
    return changes.MakeSilence(service, alert, for_s, why)


def restore_in(body: bytes) -> changes.Restore:
    """Read {"backup": {...}, "force": true}."""
    from pydantic import TypeAdapter, ValidationError  # imported when needed: it takes memory

    document = _document(body, '{"backup": {...}, "force": true}', "backup", "force", is_required=True)
    backup = document.get("backup")
    version = backup.get("version") if isinstance(backup, dict) else None
    if isinstance(version, int) and version > VERSION:  # what else it has is for that build to know
        raise InvalidRequest(
            f"backup.version: expected at most {VERSION}, found {version}: a newer build has made it; restore it there"
        )
    try:
        return TypeAdapter(changes.Restore).validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "body"
        raise InvalidRequest(f"{place}: expected what `pierhead backup` writes: {first['msg']}") from None


def mark_in(body: bytes) -> changes.Mark:
    """Read {"fault": text} or {"fault": null}."""
    document = _document(body, '{"fault": "Xid 79 in the kernel\'s log"} or {"fault": null}', "fault")
    found = document.get("fault", "")
    fault = one_line(found) if isinstance(found, str) else found
    if fault is not None and not (isinstance(fault, str) and 0 < len(fault) <= LONGEST_FAULT):
        raise InvalidRequest(f"fault: expected null or 1 to {LONGEST_FAULT} characters, found {_shown(found)}")
    return changes.Mark(fault)


def drain_in(body: bytes) -> changes.Drain:
    """Read {"force": true}, or {}."""
    return changes.Drain(_flag(_document(body, '{"force": true} or {}', "force"), "force"))


def labels_in(body: bytes) -> changes.Labels:
    """Read {"labels": {...}}."""
    labels = _document(body, '{"labels": {"zone": "a", "old": null}}', "labels", is_required=True)["labels"]
    if not isinstance(labels, dict) or not labels:
        raise InvalidRequest(f"labels: expected at least one, found {_shown(labels)}")
    for key, value in labels.items():
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f"labels.{key}: expected text or null, found {_shown(value)}")
    return changes.Labels(labels)


def nothing_in(body: bytes) -> changes.Nothing:
    """Read {} or no body."""
    _document(body, "{}")
    return changes.Nothing()


def _document(body: bytes, example: str, *keys: str, is_required: bool = False) -> Mapping[str, Any]:
    """Return a JSON object that has no other keys. No body counts as {} unless the key is required."""
    try:
        document = json.loads(body if is_required else body or b"{}")
    except (ValueError, RecursionError):
        raise InvalidRequest(f"body: expected JSON such as {example}, found something else") from None
    if not isinstance(document, dict) or not set(document) <= set(keys) or (is_required and not document):
        raise InvalidRequest(f"body: expected {example} and nothing else, found {_shown(document)}")
    return document


def _texts(document: Mapping[str, Any], key: str, longest: int) -> tuple[str, ...]:
    """Return a list of texts of at most `longest` characters in all, each of them once; raises InvalidRequest."""
    texts = document.get(key, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{key}: expected a list of names, found {_shown(texts)}")
    if len(",".join(texts)) > longest:
        raise InvalidRequest(f"{key}: expected at most {longest} characters in all, found {len(','.join(texts))}")
    return tuple(dict.fromkeys(texts))


def _whole(document: Mapping[str, Any], key: str, most: int = MOST_COUNTED) -> int:
    """Return a limit, 0 where there is none; raises InvalidRequest."""
    number = document.get(key, 0)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
        raise InvalidRequest(f"{key}: expected a whole number up to {most}, or 0 for no limit, found {_shown(number)}")
    return number


def _bounded(timeout_s: float, least: float, most: float) -> None:
    """Raise InvalidRequest for what is no number of seconds in these bounds."""
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not least <= timeout_s <= most:
        raise InvalidRequest(f"timeout_s: expected a number from {least} to {most}, found {_shown(timeout_s)}")


def _flag(document: Mapping[str, Any], key: str) -> bool:
    """Return a key's value, False where it is absent; raises InvalidRequest."""
    flag = document.get(key, False)
    if not isinstance(flag, bool):
        raise InvalidRequest(f"{key}: expected true or false, found {_shown(flag)}")
    return flag


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
