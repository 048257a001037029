"""`pierhead keys ...`: who may call the services that ask for a key (x-serve.auth: key), and how much."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import completion, tables
from .. import output as out
from ..errors import CommandError
from .options import Output, connect

Name = Annotated[str, typer.Argument(metavar="NAME", help="whose key it is; it is seen in logs and metrics")]
Known = Annotated[
    str, typer.Argument(metavar="NAME", help="as `pierhead keys list` shows it", autocompletion=completion.keys)
]
Services = Annotated[
    list[str] | None,
    typer.Option(
        "--service",
        metavar="SERVICE",
        help="one that it opens; repeatable  [default: every one]",
        autocompletion=completion.services,
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="MODEL", help='a language model, or "qwen*"; repeatable  [default: all]'),
]
PerMinute = Annotated[int, typer.Option("--per-minute", metavar="N", min=0, help="requests  [default: no limit]")]
Tokens = Annotated[
    int, typer.Option("--tokens-per-minute", metavar="N", min=0, help="of language models  [default: no limit]")
]
Concurrent = Annotated[
    int, typer.Option("--concurrent", metavar="N", min=0, help="requests at a time  [default: no limit]")
]
Days = Annotated[int, typer.Option("--days", metavar="N", min=0, help="how long it is in force  [default: for ever]")]

_LATE = "HAProxy has not taken the change yet: it gets it as soon as it answers; `pierhead status` says what it does."

group = typer.Typer(name="keys", help="Make, list and revoke the keys of clients.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    group.command("create")(create)
    group.command("list")(show)
    group.command("revoke")(revoke)
    app.add_typer(group, name="keys")


def create(
    name: Name,
    service: Services = None,
    model: Models = None,
    per_minute: PerMinute = 0,
    tokens_per_minute: Tokens = 0,
    concurrent: Concurrent = 0,
    days: Days = 0,
    output: Output = "text",
) -> None:
    """Make a key and print it, once: the stack knows its hash.

    Example: pierhead keys create team-a --service web --per-minute 600 --days 90
    """
    from ...status.records.changes import MakeKey

    as_json = out.is_json(output)
    services, models = tuple(service or ()), tuple(model or ())
    made = connect().make_key(MakeKey(name, services, models, per_minute, tokens_per_minute, concurrent, days))
    if as_json:
        out.print_json(made)
        return
    out.say(made.key)
    out.complain(
        f"{name} sends `Authorization: Bearer KEY`, or `x-api-key: KEY`. It opens {_opens(made.about.services)}, where "
        f"`x-serve.auth: key` asks for one.{'' if made.in_force else f' {_LATE}'}"
    )


def show(output: Output = "text") -> None:
    """Show the keys: what each opens, and its limits."""
    as_json = out.is_json(output)
    keys = connect().keys()
    if as_json:
        out.print_json(keys)
        return
    console = out.console()
    out.show(tables.keys(keys, out.width(console)), console)


def revoke(name: Known, output: Output = "text") -> None:
    """Revoke a key: within a second it opens nothing any more. Requests in progress end as they would."""
    as_json = out.is_json(output)
    revoked = connect().revoke_key(name)
    if as_json:
        out.print_json(revoked)
    elif revoked.in_force:
        out.say(f"{revoked.name} opens nothing any more.")
    if not revoked.in_force:
        raise CommandError(f"{revoked.name} is revoked, and may still open what it did. {_LATE}")


def _opens(services: tuple[str, ...]) -> str:
    return ", ".join(services) or "every service"
