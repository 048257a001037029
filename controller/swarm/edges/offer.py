"""What an edge and the controller say to each other about routes, and what the edge makes of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlencode

from ...routing import haproxy_text as text

PATH = "/routes"
PORT = 8102
WAIT_S = 20.0
"""How long a controller without news waits before it answers."""
EPOCH_HEADER = "pierhead-epoch"
LONGEST_WHY = 500


@dataclass(frozen=True, slots=True)
class Known:
    """What an edge knows when it asks."""

    hash: str = ""
    """Of the routes that HAProxy runs."""
    epoch: int = 0
    """The newest epoch of a controller."""
    refused: str = ""
    """Hash of the routes that HAProxy refused last, and why."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class EdgeOffer:
    """A controller's answer; `config` = "": nothing else than what the edge has."""

    epoch: int
    config: str = ""


Verdict = Literal["older", "nothing", "load"]


def judge(known: Known, offer: EdgeOffer) -> Verdict:
    """What to do with an answer."""
    if offer.epoch < known.epoch:
        return "older"
    wanted = text.hash_of(offer.config)
    return "load" if wanted and wanted not in (known.hash, known.refused) else "nothing"


def question(edge: str, known: Known) -> str:
    """The path and query that ask for routes."""
    asked = {"edge": edge, "hash": known.hash, "epoch": known.epoch, "refused": known.refused}
    return f"{PATH}?{urlencode(asked | {'why': known.why[:LONGEST_WHY]})}"
