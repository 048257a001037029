"""`pierhead silence`: which alerts are not sent for a while."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import completion, feeds, tables
from .. import output as out
from ..errors import BadInput
from .options import Output, connect

Of = Annotated[
    str,
    typer.Argument(
        metavar="[SERVICE]", help="whose alerts  [default: those of all]", autocompletion=completion.services
    ),
]
Alert = Annotated[str, typer.Option("--alert", metavar="NAME", help="this alert alone, such as ErrorRate")]
For = Annotated[str, typer.Option("--for", metavar="TIME", help="how long: 30m, 2h, 1d")]
Why = Annotated[str, typer.Option("--why", metavar="WORDS", help="for those who ask why no alert came")]
End = Annotated[str, typer.Option("--end", metavar="ID", help="send alerts again that this silence holds back")]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(silence)


def silence(
    service: Of = "", alert: Alert = "", for_: For = "", why: Why = "", end: End = "", output: Output = "text"
) -> None:
    """Do not send the alerts of a service, or one alert, for a while. Without options: list the silences.

    They are seen in the console and by `pierhead status` all the same.

    Example: pierhead silence web --alert ErrorRate --for 2h --why "a planned load test"
    """
    as_json, is_wanted = out.is_json(output), bool(service or alert)
    if end and (is_wanted or for_ or why):
        raise BadInput("--end ID ends a silence: expected nothing else with it")
    if not is_wanted and (for_ or why):
        raise BadInput("expected SERVICE, --alert NAME or both: what is to be silenced")
    if end:
        _end(end, as_json=as_json)
    elif is_wanted:
        _make(service, alert, for_, why, as_json=as_json)
    else:
        _list(as_json=as_json)


def _end(identity: str, *, as_json: bool) -> None:
    ended = connect().end_silence(identity)
    if as_json:
        out.print_json(ended)
    else:
        out.say(f"{ended.id} has ended: its alerts are sent again.")


def _list(*, as_json: bool) -> None:
    found, console = connect().silences(), out.console()
    if as_json:
        out.print_json(found)
    else:
        out.show(tables.silences(found, out.width(console)), console)


def _make(service: str, alert: str, for_: str, why: str, *, as_json: bool) -> None:
    from ...status.records.changes import MakeSilence

    for_s = feeds.duration_s(for_)
    if not for_s:
        raise BadInput(f"--for: expected a duration such as 30m, 2h or 1d, found {for_!r}")
    if not why.strip():
        raise BadInput('--why: expected the reason, such as --why "a planned load test", found nothing')
    made = connect().silence(MakeSilence(service, alert, for_s, why))
    if as_json:
        out.print_json(made)
    else:
        out.say(
            f"{tables.silenced(made.about)} is not sent for {for_}. `pierhead silence --end {made.about.id}` ends that."
        )
