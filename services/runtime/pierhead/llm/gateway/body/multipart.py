"""Reads short text fields of a multipart form, without copying its files. Pure.

The gateway checks access by the model that it reads here, and the engine parses the form again. So a form that two
parsers may read differently (a field twice, a part without an end, two boundaries, quotes within quotes) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from email.message import Message
from typing import NamedTuple

from pierhead.llm.gateway.errors import ApiError

MAX_HEAD_BYTES = 1024
MAX_FIELD_BYTES = 4096
"""Of a field that is looked for."""
MAX_PARTS = 100
"""Most parts of a form: searching them takes time, and any client may send a form."""

_HEADER = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]+):([^\x00\r\n]*)")

_DISPOSITION = re.compile(
    rb'form-data((?:[ \t]*;[ \t]*[A-Za-z]+\*?=(?:"(?:[^"\\]|\\[^"])*"|[^\s";,]+))*)[ \t]*;?', re.IGNORECASE
)
"""A quote behind a backslash ends a name for some readers and not for others."""

_IN_PARTS = re.compile(r";\s*boundary\*", re.IGNORECASE)
"""As RFC 2231 has it, and not every reader."""

_PARAMETER = re.compile(rb';[ \t]*([A-Za-z]+\*?)=(?:"((?:[^"\\]|\\[^"])*)"|([^\s";,]+))')


class FormField(NamedTuple):
    """A field that was found."""

    text: str
    begin: int
    """Where its bytes begin in the body."""
    end: int


def form_fields(body: bytes, content_type: str, names: Collection[str]) -> dict[str, FormField]:
    """The fields of these names. Raises ApiError 400 for a malformed or ambiguous form."""
    mark = b"--" + _boundary(content_type)
    found: dict[str, FormField] = {}
    for head, begin, end in _parts(body, mark):
        name, is_file = _name(head)
        if name not in names:
            continue
        if name in found or is_file:
            raise _refused(f"the field {name} stands there {'as a file' if is_file else 'twice'}", name)
        if end - begin > MAX_FIELD_BYTES:
            raise _refused(f"the field {name} has more than {MAX_FIELD_BYTES} bytes", name)
        text = body[begin:end].decode(errors="replace").strip()
        found[name] = FormField(text, begin, end)
    return found


def _boundary(content_type: str) -> bytes:
    if not (content_type.isascii() and content_type.isprintable()):
        raise _refused("the header Content-Type has characters that are not ASCII")
    head = Message()
    head["Content-Type"] = content_type
    boundaries = [value for name, value in head.get_params() or () if name.lower() == "boundary"]
    if not any(boundaries):
        raise _refused("the header Content-Type has no boundary")
    if len(boundaries) > 1 or _IN_PARTS.search(content_type):  # some parsers use the first, others the last
        raise _refused("the header Content-Type has more than one boundary, or one in parts")
    return str(boundaries[0]).rstrip().encode(errors="replace")


def _parts(body: bytes, mark: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Each part's head, and where its content begins and ends."""
    if not body.startswith(mark):
        raise _refused("it does not begin with its boundary")
    at = len(mark)
    for _ in range(MAX_PARTS):
        if body.startswith(b"--", at):
            if len(body) > at + 4 or body[at + 2 :].strip():
                raise _refused("something comes after its end")
            return
        following = body.find(mark, at)
        if following < 0:
            raise _refused("a part of it has no end")
        end = following - 2
        if not (body.startswith(b"\r\n", at) and body.startswith(b"\r\n", end)):
            raise _refused("a boundary in it is not a line by itself")
        blank = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
        if not at < blank <= end - 4:
            raise _refused("a part of it has no head, or a long one")
        yield body[at + 2 : blank], blank + 4, end
        at = following + len(mark)
    raise _refused(f"it has more than {MAX_PARTS} parts")


def _name(head: bytes) -> tuple[str, bool]:
    """The name of a part, and whether it is a file."""
    dispositions = []
    for line in head.split(b"\r\n"):
        header = _HEADER.fullmatch(line)
        if header is None:
            raise _refused("a line in a part's head is not one header")
        if header[1].lower() == b"content-disposition":
            dispositions.append(header[2].strip(b" \t"))
    found = _DISPOSITION.fullmatch(dispositions[0]) if len(dispositions) == 1 else None
    if found is None:
        raise _refused('a part of it does not have one header such as Content-Disposition: form-data; name="model"')
    parameters = [(name.lower(), quoted or plain) for name, quoted, plain in _PARAMETER.findall(found[1])]
    names = [value for name, value in parameters if name in (b"name", b"name*")]
    if len(names) != 1 or b"name*" in dict(parameters):
        raise _refused("a part of it does not have one name")
    return names[0].decode(errors="replace"), len(parameters) > 1


def _refused(why: str, param: str | None = None) -> ApiError:
    message = f"multipart/form-data: {why}; send each field once, `model` among them, as OpenAI's clients do"
    return ApiError(400, message, code="invalid_form", param=param)
