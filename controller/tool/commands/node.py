"""`pierhead node ...`: has replicas leave a node, uses it again, sets its labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .. import completion
from .. import output as out
from ..errors import BadInput
from ..patience import wait
from ..wait import DrainWait
from .options import NoWait, Output, Timeout, connect

if TYPE_CHECKING:
    from ...status.records.changes import NodeAsked

DRAIN_S = 1800.0

Name = Annotated[
    str, typer.Argument(metavar="NODE", help="as `pierhead nodes` lists it", autocompletion=completion.nodes)
]
Force = Annotated[bool, typer.Option("--force", help="also end replicas for which no other node has room")]
Labels = Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="KEY- removes a label")]

group = typer.Typer(name="node", help="Drain nodes, use them again, label them.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (drain, activate, label):
        group.command()(command)
    app.add_typer(group, name="node")


def drain(
    node: Name, force: Force = False, timeout: Timeout = DRAIN_S, no_wait: NoWait = False, output: Output = "text"
) -> None:
    """Move a node's replicas elsewhere, new ones first, and then drain it in the engine.

    Waits until nothing is left there. What finds no room elsewhere stays and serves; this ends with 1 then.
    """
    as_json, api = out.is_json(output), connect()
    answer = _ask(api.drain(node, force=force), as_json=as_json)
    if no_wait:
        _end(answer, "", as_json=as_json)
        return
    stays = f"The drain continues; `pierhead nodes` shows the progress, `pierhead node activate {node}` ends it."
    waiting = DrainWait(answer.node)
    verdict = wait(lambda: waiting.judge(api.nodes()), timeout, stays)
    _end(answer, verdict.message, as_json=as_json)


def activate(node: Name, output: Output = "text") -> None:
    """Use a node again that was drained."""
    as_json = out.is_json(output)
    answer = _ask(connect().activate(node), as_json=as_json)
    _end(answer, "", as_json=as_json)


def label(node: Name, labels: Labels, output: Output = "text") -> None:
    """Set the engine's labels of a node, which placement constraints name as node.labels.KEY."""
    as_json = out.is_json(output)
    _end(_ask(connect().label(node, dict(map(_label, labels))), as_json=as_json), "", as_json=as_json)


def _label(text: str) -> tuple[str, str | None]:
    key, equals, value = text.partition("=")
    if equals and value:
        return key, value
    if not equals and key.endswith("-") and key != "-":
        return key[:-1], None
    raise BadInput(f"KEY=VALUE: expected zone=a, or zone- to remove it, found {text!r}")


def _ask(answer: NodeAsked, *, as_json: bool) -> NodeAsked:
    if not as_json:
        out.say(answer.message)
    return answer


def _end(answer: NodeAsked, message: str, *, as_json: bool) -> None:
    """Print the end of a wait; the API's sentence was printed already."""
    if as_json:
        out.print_json(out.with_members(answer, done=True, message=message) if message else answer)
    elif message:
        out.say(message)
