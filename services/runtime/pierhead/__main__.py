"""Serves a service of an application, prints its contract, and writes the contracts that its image carries.

python -m pierhead serve shop:shop
python -m pierhead proto shop:Scorer
python -m pierhead contract shop:shop --write /usr/local/share/pierhead/contract.binpb
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pierhead.classes.application import write
from pierhead.classes.compare import IMAGE_PATH
from pierhead.classes.proto_text import proto_text
from pierhead.classes.service import Bound, Service
from pierhead.replica.process import serve


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands. Exits with 2 for a target that is none, and with 1 for a file that cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m pierhead", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (
        ("serve", "serve the service that PIERHEAD_SERVICE names"),
        ("proto", "print the .proto"),
        ("contract", "write the contracts of all services of the application: a line of the image's Dockerfile"),
    ):
        command = commands.add_parser(name, help=words, description=words)
        command.add_argument("target", help="module:name, of a service's class or of what its bind() returned")
        if name == "contract":
            command.add_argument("--write", metavar="FILE", default=IMAGE_PATH, help=f"default: {IMAGE_PATH}")
    given = parser.parse_args(arguments)
    try:
        found = service_at(given.target)
    except NoService as error:
        parser.error(str(error))
    if given.command == "serve":
        serve(found.bind() if isinstance(found, type) else found)
    elif given.command == "contract":
        _write(found.bind() if isinstance(found, type) else found, given.write)
    else:
        cls = found if isinstance(found, type) else found.cls
        sys.stdout.write(proto_text(cls.__contract__.file.proto))


def _write(found: Any, path: str) -> None:
    try:
        write(found, Path(path))
    except OSError as error:
        sys.exit(f"{path} cannot be written: {error.strerror or error}; in a Dockerfile, put the line before USER")


class NoService(Exception):
    """A target that is no service."""


def service_at(target: str) -> type[Service] | Bound:
    """The class, or what its `bind()` returned, at `module:name`. Raises NoService."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name, None) if module and name else None
    if isinstance(found, Bound) or (isinstance(found, type) and issubclass(found, Service)):
        return found
    raise NoService(f"{target}: expected module:name of a Service, or of what its bind() returned, found {found!r}")


if __name__ == "__main__":
    main()
