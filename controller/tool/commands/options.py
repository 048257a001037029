"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .. import completion
from ..client import CHANGE_TIMEOUT_S, ControllerClient

if TYPE_CHECKING:
    from ..api import ControllerApi

EVENTS_KEPT = 1000
"""The events that the controller keeps, and the most that it sends at once."""

Output = Annotated[
    str, typer.Option("--output", "-o", metavar="FORM", help="text or json", autocompletion=completion.forms)
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="wait at most this long")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="print new entries as they come")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="ask for it and do not wait")]
Service = Annotated[
    str,
    typer.Argument(metavar="SERVICE", help="a service with an x-serve block", autocompletion=completion.services),
]
OfService = Annotated[
    str,
    typer.Option("--service", metavar="SERVICE", help="of one service only", autocompletion=completion.services),
]
OfReplica = Annotated[
    str,
    typer.Option("--replica", metavar="NAME", help="of this replica alone", autocompletion=completion.replicas),
]


def connect(change_timeout_s: float = CHANGE_TIMEOUT_S) -> ControllerApi:
    """The API at PIERHEAD_API_URL, else that of the controller in this container."""
    from ..api import ControllerApi  # imported when needed: with its records, which help and completion do not need

    return ControllerApi(ControllerClient.from_environment(change_timeout_s=change_timeout_s))
