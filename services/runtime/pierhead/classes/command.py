"""`python -m pierhead proto shop:Scorer`: the contract of a service's class as a `.proto`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pierhead.classes.proto_text import proto_text
from pierhead.classes.target import service_at


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    words = "print the .proto of a service"
    command: argparse.ArgumentParser = commands.add_parser("proto", help=words, description=words)
    command.add_argument("target", help="module:name, of a service's class or of what its bind() returned")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print it. Raises NoService."""
    found = service_at(arguments.target)
    cls = found if isinstance(found, type) else found.cls
    sys.stdout.write(proto_text(cls.__contract__.file.proto))
