"""Serves a service of an application, prints its contract, and writes the contracts that its image carries.

python -m pierhead serve shop:shop
python -m pierhead proto shop:Scorer
python -m pierhead contract shop:shop --write /usr/local/share/pierhead/contract.binpb
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pierhead.classes import contract_command
from pierhead.classes.proto_text import proto_text
from pierhead.classes.target import NoService, service_at
from pierhead.replica.process import serve


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands. Exits with 2 for a target that is none."""
    parser = argparse.ArgumentParser(
        prog="python -m pierhead", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (("serve", "serve the service that PIERHEAD_SERVICE names"), ("proto", "print the .proto")):
        command = commands.add_parser(name, help=words, description=words)
        command.add_argument("target", help="module:name, of a service's class or of what its bind() returned")
    contract_command.add(commands)
    given = parser.parse_args(arguments)
    try:
        if given.command == "contract":
            given.run(given)
            return
        found = service_at(given.target)
    except NoService as error:
        parser.error(str(error))
    if given.command == "serve":
        serve(found.bind() if isinstance(found, type) else found)
    else:
        cls = found if isinstance(found, type) else found.cls
        sys.stdout.write(proto_text(cls.__contract__.file.proto))


if __name__ == "__main__":
    main()
