"""HTTP/2 frames by hand, for clients that no library makes: requests that stay half open."""

from __future__ import annotations

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What a client sends first, with settings that change nothing."""

_DATA, _HEADERS, _RST_STREAM = 0, 1, 3
_END_STREAM, _END_HEADERS = 1, 4


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def head(stream: int, fields: dict[str, str], *, ends: bool = False) -> bytes:
    """The head of a request; streams of a client are odd numbers that grow. Names and values: at most 126 bytes."""
    block = b"".join(
        b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in fields.items()
    )
    return _frame(_HEADERS, _END_HEADERS | (_END_STREAM if ends else 0), stream, block)


def data(stream: int, content: bytes) -> bytes:
    """A part of its body, at most 16 kB, that does not end it."""
    return _frame(_DATA, 0, stream, content)


def reset(stream: int) -> bytes:
    """The client no longer wants the answer."""
    return _frame(_RST_STREAM, 0, stream, b"\0\0\0\x08")
