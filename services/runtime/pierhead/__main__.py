"""Serves a service of an application, and prints its contract.

python -m pierhead serve shop:shop
python -m pierhead proto shop:Scorer
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from pierhead.classes.proto_text import proto_text
from pierhead.classes.service import Bound, Service
from pierhead.replica.process import serve


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the two commands. Exits with 2 for a target that is none."""
    parser = argparse.ArgumentParser(
        prog="python -m pierhead", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (("serve", "serve the service that PIERHEAD_SERVICE names"), ("proto", "print the .proto")):
        command = commands.add_parser(name, help=words, description=words)
        command.add_argument("target", help="module:name, of a service's class or of what its bind() returned")
    given = parser.parse_args(arguments)
    try:
        found = service_at(given.target)
    except NoService as error:
        parser.error(str(error))
    if given.command == "serve":
        serve(found.bind() if isinstance(found, type) else found)
    else:
        cls = found if isinstance(found, type) else found.cls
        sys.stdout.write(proto_text(cls.__contract__.file.proto))


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
