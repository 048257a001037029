"""`python -m pierhead serve shop:shop`: what the image of an application runs."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

from pierhead.classes.target import bound_at
from pierhead.replica.process import serve


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    words = "serve the service that PIERHEAD_SERVICE names"
    command: argparse.ArgumentParser = commands.add_parser("serve", help=words, description=words)
    command.add_argument("target", help="module:name, of a service's class or of what its bind() returned")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Serve until a stop signal. Raises NoService."""
    # The first process of a container ignores SIGTERM until it handles it; an import or a constructor may take seconds.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    serve(bound_at(arguments.target))
