from __future__ import annotations

import json

from services.echo.completion import CompletionStream


def chunk(event: bytes) -> object:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2, "an event of several lines would be several data fields"
    return json.loads(event.removeprefix(b"data: "))


def test_text_of_any_kind_stays_within_its_event() -> None:
    events = CompletionStream("cmpl-\x00", 1, "echo")
    for text in ("", "a\nb\r\n\n", '"\\', "\x00", "grüezi \u2028 \N{SNOWMAN}", "data: [DONE]\n\n"):
        found = chunk(events.event(text, last=False))
        assert isinstance(found, dict)
        assert found["choices"][0]["text"] == text
