"""The commands that import an application.

python -m pierhead dev shop:shop       serves it here, and again at every save
python -m pierhead build shop:shop     prints its compose file
python -m pierhead serve shop:shop     serves one of its services: what its image runs
python -m pierhead proto shop:Scorer   prints the contract of a service
python -m pierhead contract shop:shop --write FILE   writes the contracts that its image carries
python -m pierhead import-ray serve_config.yaml      translates a file of Ray Serve's
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pierhead.classes import command as proto
from pierhead.classes import contract_command as contract
from pierhead.classes.target import NoService
from pierhead.dev import build
from pierhead.dev import command as dev
from pierhead.rayserve import import_ray
from pierhead.replica import command as serve

COMMANDS = (dev, build, serve, proto, contract, import_ray)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands. Exits with 2 for a target that is none."""
    parser = argparse.ArgumentParser(
        prog="python -m pierhead", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for each in COMMANDS:
        each.add(commands)
    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except NoService as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
