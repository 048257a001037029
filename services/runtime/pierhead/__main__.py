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
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pierhead.classes.shapes import CannotTravel
from pierhead.classes.target import NoService, bound_at, service_at
from pierhead.interrupt import INTERRUPTED, leave_to_commands
from pierhead.tracebacks import user_traceback, where

MODULES = {"dev": "pierhead.dev.command", "build": "pierhead.dev.build", "import-ray": "pierhead.rayserve.import_ray"}
"""Commands in modules of their own, which have `add(commands)` and `run(arguments)`. Only the one that is typed is
imported: a replica, which is `serve`, does without the others' memory."""


def serve(arguments: argparse.Namespace) -> None:
    """Serve the service that PIERHEAD_SERVICE names, until a stop signal."""
    # The first process of a container ignores SIGTERM until it handles it; an import or a constructor may take seconds.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from pierhead.replica import process

    process.serve(bound_at(arguments.target))


def proto(arguments: argparse.Namespace) -> None:
    """Print the .proto of a service."""
    from pierhead.classes.proto_text import proto_text

    found = service_at(arguments.target)
    cls = found if isinstance(found, type) else found.cls
    sys.stdout.write(proto_text(cls.__contract__.file.proto))


def contract(arguments: argparse.Namespace) -> None:
    """Write the contracts of all services of an application; exits with 1 where the file cannot be written."""
    from pierhead.classes.application import write

    bound = bound_at(arguments.target)
    try:
        write(bound, Path(arguments.write))
    except OSError as error:
        why = error.strerror or error
        sys.exit(f"{arguments.write} cannot be written: {why}; in a Dockerfile, put the line before USER")


_OWN: dict[str, tuple[Callable[[argparse.Namespace], None], str]] = {
    "serve": (serve, "serve the service that PIERHEAD_SERVICE names"),
    "proto": (proto, "print the .proto of a service"),
    "contract": (contract, "write the contracts of all services of an application: a line of its image's Dockerfile"),
}


def _add(name: str, commands: Any) -> None:
    """Add a command to argparse's."""
    if name in MODULES:
        importlib.import_module(MODULES[name]).add(commands)
        return
    run, words = _OWN[name]
    command: argparse.ArgumentParser = commands.add_parser(name, help=words, description=words)
    command.add_argument("target", help="module:name, of a service's class or of what its bind() returned")
    if name == "contract":
        from pierhead.classes.compare import IMAGE_PATH

        command.add_argument("--write", metavar="FILE", default=IMAGE_PATH, help=f"default: {IMAGE_PATH}")
    command.set_defaults(run=run)


class _UsageParser(argparse.ArgumentParser):
    """Tells a usage error in one line, as the other commands of `pierhead` do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` explains it)\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Exits with 2 for a target that is none, 1 where its module raises, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:2] == ["import", "ray"]:  # as `pierhead import ray` passes it on
        words[:2] = ["import-ray"]
    elif words[:1] == ["import"]:
        words[:] = ["import-ray", "--help"] if "--help" in words else ["import-ray"]
    parser = _UsageParser(prog="pierhead", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    if words and words[0] in (*MODULES, *_OWN):
        _add(words[0], commands)
        parser.prog = f"pierhead {words[0]}"  # of what the command does not take
    else:
        for name in ("dev", "build", *_OWN, "import-ray"):
            _add(name, commands)
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
