"""Commands about who may ask the API, and who has asked."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import output as out
from ..errors import BadInput
from .follow import Newest, Since, events
from .options import Follow, OfService, Output

Name = Annotated[str, typer.Argument(metavar="NAME", help="whose it is: letters, digits and ._-")]
RoleName = Annotated[
    str,
    typer.Option("--role", metavar="ROLE", help="read, scale, deploy or admin: each allows what those before it do"),
]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (audit, token):
        app.command()(command)


def token(name: Name, role: RoleName = "read") -> None:
    """Make a token for the API, and print it once; the stack knows its hash."""
    from ...api_tokens import NAME, ROLES, made

    wanted = next((one for one in ROLES if one == role), None)
    if wanted is None:
        raise BadInput(f'--role: expected {", ".join(ROLES)}, found "{role}"')
    if not NAME.fullmatch(name):
        raise BadInput(f'NAME: expected 1 to 40 letters, digits and ._-, found "{name}"')
    made_token, entry = made(name, wanted)
    out.say(made_token)
    out.complain(
        "Add this to PIERHEAD_API_TOKENS in .env, where PIERHEAD_API_TOKEN is set as well, with a comma behind earlier "
        "ones, and repeat `pierhead up`. The token's owner sends `Authorization: Bearer <token>`, or sets "
        f"PIERHEAD_API_TOKEN for the command.\n{entry}"
    )


def audit(
    follow: Follow = False, n: Newest = 50, service: OfService = "", since: Since = "", output: Output = "text"
) -> None:
    """Show who asked for which change, when and from where: the events of the kind asked."""
    events(follow, n, service, ["asked"], since, output)
