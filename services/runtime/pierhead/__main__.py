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
        bound = bound_at(given.target)
    except ValueError as error:
        parser.error(str(error))
    if given.command == "serve":
        serve(bound)
    else:
        sys.stdout.write(proto_text(bound.cls.__contract__.file.proto))


def bound_at(target: str) -> Bound:
    """The application at `module:name`; of a class, the one that its `bind()` returns. Raises ValueError."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name, None) if module and name else None
    if isinstance(found, type) and issubclass(found, Service):
        return Bound(found, (), {})
    if isinstance(found, Bound):
        return found
    raise ValueError(f"{target}: expected module:name of a Service, or of what its bind() returned, found {found!r}")


if __name__ == "__main__":
    main()
