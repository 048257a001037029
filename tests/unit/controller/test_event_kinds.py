"""Every kind of event that is recorded anywhere is one that can be asked for, and the other way round."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from controller.model.actions import KINDS, Action, action_name

CONTROLLER = Path(__file__).resolve().parents[3] / "controller"
RECORDERS = {"record", "Note", "PemKind"}


def written_kinds() -> Iterator[str]:
    """The first argument of everything that makes an event: a literal, or the beginning and end of an f-string."""
    for path in CONTROLLER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if not isinstance(node, ast.Call) or name not in RECORDERS or not node.args:
                continue
            match node.args[0]:
                case ast.Constant(value=str(kind)):
                    yield kind
                case ast.JoinedStr(values=[ast.FormattedValue(), ast.Constant(value=str(end))]):
                    yield from (f"{edge}{end}" for edge in ("haproxy", "engine"))


def test_kinds_are_those_that_are_recorded() -> None:
    assert set(written_kinds()) | {action_name(action) for action in Action.__subclasses__()} == KINDS
