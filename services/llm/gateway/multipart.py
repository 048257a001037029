"""Short text fields of a multipart form, without a copy of the files in it. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from email.message import Message

from services.llm.gateway.errors import ApiError

MAX_HEAD_BYTES = 1024
MAX_FIELD_BYTES = 4096
"""Beyond these a part is none of those that are looked for."""
MAX_PARTS = 100
"""More are not looked at: a search takes time, and anybody may send a form."""

_NAME = re.compile(rb'content-disposition:[^\r\n]*[; ]name="([^"\r\n]*)"', re.IGNORECASE)


def form_fields(body: bytes, content_type: str, names: Collection[str]) -> dict[str, str]:
    """The fields of these names. Raises ApiError 400 for a form without a boundary."""
    head = Message()
    head["Content-Type"] = content_type
    boundary = head.get_boundary()
    if not boundary:
        raise ApiError(400, "Content-Type: multipart/form-data has no boundary", code="invalid_form")
    mark = b"--" + boundary.encode(errors="replace")
    found: dict[str, str] = {}
    begin = body.find(mark)
    for _ in range(MAX_PARTS):
        if begin < 0 or len(found) == len(names):
            break
        begin += len(mark)
        end = body.find(b"\r\n" + mark, begin)
        if end < 0:
            break
        blank = body.find(b"\r\n\r\n", begin, min(end, begin + MAX_HEAD_BYTES))
        name = _NAME.search(body, begin, blank) if blank >= 0 else None
        if name is not None and end - blank - 4 <= MAX_FIELD_BYTES:
            told = name.group(1).decode(errors="replace")
            if told in names:
                found[told] = body[blank + 4 : end].decode(errors="replace").strip()
        begin = end + 2
    return found
