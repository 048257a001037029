"""The commands that import an application.

python -m pierhead dev shop:shop       serves it here, and again at every save; without a target, app:app
python -m pierhead build shop:shop     prints its compose file; without a target, app:app
python -m pierhead serve shop:shop     serves one of its services: what its image runs
python -m pierhead proto shop:Scorer   prints the contract of a service
python -m pierhead contract shop:shop --write FILE   writes the contracts that its image carries
python -m pierhead import-ray serve_config.yaml      translates a file of Ray Serve's
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from pierhead.classes.shapes import CannotTravel
from pierhead.classes.target import NoService
from pierhead.interrupt import INTERRUPTED, leave_to_commands
from pierhead.tracebacks import user_traceback, where

COMMANDS = {
    "dev": "pierhead.dev.command",
    "build": "pierhead.dev.build",
    "serve": "pierhead.replica.command",
    "proto": "pierhead.classes.command",
    "contract": "pierhead.classes.contract_command",
    "import-ray": "pierhead.rayserve.import_ray",
}
"""Each command's module, which has `add(commands)` and `run(arguments)`. Only the one that is typed is imported: a
replica, which is `serve`, does without the others' memory."""


class _UsageParser(argparse.ArgumentParser):
    """Tells a usage error in one line, as the other commands of `pierhead` do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` explains it)\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands. Exits with 2 for a target that is none, with 1 where its module raises,
    and with 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:2] == ["import", "ray"]:  # as `pierhead import ray` passes it on
        words[:2] = ["import-ray"]
    elif words[:1] == ["import"]:
        words[:] = ["import-ray", "--help"] if "--help" in words else ["import-ray"]
    parser = _UsageParser(prog="pierhead", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        importlib.import_module(COMMANDS[name]).add(commands)
    if words and words[0] in COMMANDS:
        parser.prog = f"pierhead {words[0]}"  # of what the command does not take
    given = parser.parse_args(words)
    leave_to_commands()
    try:
        given.run(given)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (NoService, CannotTravel) as error:
        sys.stderr.write(f"pierhead {given.command}: {error}\n")
        sys.exit(2)
    except Exception as error:
        sys.exit(f"{user_traceback(error)}\n{where(error)}")


if __name__ == "__main__":
    main()
