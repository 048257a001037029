"""What the gateway reads of the headers that HAProxy puts into a request for its key."""

from __future__ import annotations

import pytest
from pierhead.llm.gateway.keys import KEY, MODELS, NO_KEY, checked_key


@pytest.mark.parametrize(
    ("models", "names", "allowed"),
    [
        (None, ("qwen",), True),
        ("*", ("qwen",), True),
        ("qwen*", ("qwen:support",), True),
        ("qwen:*", ("qwen",), False),
        ("big,qwen", ("default", "qwen"), True),
        ("Qwen", ("qwen",), False),
        ("", ("qwen",), False),
    ],
)
def test_what_a_key_is_for(models: str | None, names: tuple[str, ...], allowed: bool) -> None:
    key = checked_key({KEY: "a"} if models is None else {KEY: "a", MODELS: models})
    assert (key.name, key.may_use(names)) == ("a", allowed)


def test_without_a_key_everything_is_allowed() -> None:
    assert checked_key({MODELS: "big"}) is NO_KEY
    assert NO_KEY.may_use(("qwen",))
