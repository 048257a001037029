"""`python -m pierhead contract shop:shop`: writes the contracts that the application's image carries."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pierhead.classes.application import write
from pierhead.classes.compare import IMAGE_PATH
from pierhead.classes.target import bound_at


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    words = "write the contracts of all services of an application: a line of its image's Dockerfile"
    command: argparse.ArgumentParser = commands.add_parser("contract", help=words, description=words)
    command.add_argument("target", help="module:name, of a service's class or of what its bind() returned")
    command.add_argument("--write", metavar="FILE", default=IMAGE_PATH, help=f"default: {IMAGE_PATH}")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Write them. Raises NoService; exits with 1 where the file cannot be written."""
    bound = bound_at(arguments.target)
    try:
        write(bound, Path(arguments.write))
    except OSError as error:
        why = error.strerror or error
        sys.exit(f"{arguments.write} cannot be written: {why}; in a Dockerfile, put the line before USER")
