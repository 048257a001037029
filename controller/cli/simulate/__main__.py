"""`python -m controller.cli.simulate TRACE [SERVICE]`: what the autoscaler would do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...errors import ControllerError
from . import distributions, traces
from .command import DEFAULT_BLOCK, Options, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return run(Options(**vars(options)))
    except ControllerError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m controller.cli.simulate",
        description="Runs the controller's autoscaling against a trace of requests, in simulated time.",
        epilog=traces.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a shape such as step:10x,rate=20, or a file *.csv (see below)")
    add("service", metavar="SERVICE", nargs="?", default="", help="a service of the compose files")
    add("--x-serve", default="", metavar="YAML", help=f"a block in place of a service; {DEFAULT_BLOCK} without either")
    add("--service-time", default="exp:0.1", metavar="TIME", help=f"work of one request: {distributions.FORMS}")
    add("--start-time", default="10", metavar="TIME", help="from the decision until a replica is ready; the same forms")
    add("--concurrency", type=int, metavar="N", help="requests a replica works on at a time (max_ongoing_requests)")
    add("--begin", type=int, metavar="N", help="replicas that are ready at the beginning (autoscale.initial)")
    add("--failing-starts", type=float, default=0.0, metavar="P", help="part of the starts that fail, 0 to 1")
    add("--gpus", type=int, metavar="N", help="GPUs of the machine (as many as are needed)")
    add("--seed", type=int, default=0, metavar="N", help="another seed, other chances (0)")
    add("--plot", default="", metavar="FILE", help="draw to this file, .png, .svg or .pdf; needs matplotlib")
    add("--output", "-o", choices=("table", "json"), default="table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
