"""`python -m simulator TRACE [SERVICE]`: what the autoscaler would do."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from controller.errors import ControllerError, InvalidRequest, UnknownService
from controller.files.compose import ComposeProject
from controller.files.parse import parse
from controller.model.spec import ServiceSpec

from . import distributions, traces
from .report import document, summarise, table
from .simulation import Setting, seeded, simulate

DEFAULT_BLOCK = "{autoscale: {min: 1, max: 8}}"
INVENTED = "simulated"
"""The service of an x-serve block that no compose file has."""
ENDINGS = (".png", ".svg", ".pdf")


class Options(argparse.Namespace):
    """The command line, as text and numbers that are not checked yet."""

    trace: str
    service: str
    x_serve: str
    service_time: str
    start_time: str
    concurrency: int | None
    begin: int | None
    failing_starts: float
    gpus: int | None
    seed: int
    plot: str
    output: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run; return the exit code."""
    try:
        _run(_parser().parse_args(arguments, namespace=Options()))
    except ControllerError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pierhead simulate",
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


def _run(options: Options) -> None:
    setting = _setting(options)
    _check_plot(options.plot)
    trace = traces.read_trace(options.trace, seeded(options.seed, "arrivals"))
    result = simulate(_service(options), trace, setting)
    summary = summarise(result)
    as_json = options.output == "json"
    sys.stdout.write(f"{json.dumps(document(result, summary), indent=2) if as_json else table(result, summary)}\n")
    if options.plot:
        from .plot import draw  # it needs matplotlib

        draw(result, summary, Path(options.plot))
        sys.stdout.write("" if as_json else f"drawn to {options.plot}\n")


def _setting(options: Options) -> Setting:
    for name, value, low, high in (
        ("concurrency", options.concurrency, 1, 1_000_000),
        ("begin", options.begin, 0, 1000),
        ("gpus", options.gpus, 0, 1000),
        ("failing-starts", options.failing_starts, 0.0, 1.0),
    ):
        if value is not None and not low <= value <= high:
            raise InvalidRequest(f"--{name}: expected a number from {low:g} to {high:g}, found {value:g}")
    return Setting(
        service_time=distributions.parse_distribution("--service-time", options.service_time),
        start_time=distributions.parse_distribution("--start-time", options.start_time),
        places=options.concurrency,
        begin=options.begin,
        failing_starts=options.failing_starts,
        gpus=options.gpus,
        seed=options.seed,
        policy_dir=ComposeProject.from_environment(os.environ).project_dir,
    )


def _check_plot(file: str) -> None:
    if not file:
        return
    if not file.endswith(ENDINGS):
        raise InvalidRequest(f'--plot: expected a file that ends in {", ".join(ENDINGS)}, found "{file}"')
    if not Path(file).parent.is_dir():
        raise InvalidRequest(f"--plot: {Path(file).parent} is not a directory")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest("--plot: matplotlib is not installed here; `uv sync --group plot` installs it")


def _service(options: Options) -> ServiceSpec:
    if options.service and options.x_serve:
        raise InvalidRequest("expected a service or --x-serve, found both; edit the compose file, or leave one out")
    if not options.service:
        config = {"services": {INVENTED: {"image": INVENTED, "scale": 0, "x-serve": _written(options)}}}
        services = parse("simulation", config).services
        return _autoscaled(services[INVENTED], "--x-serve")
    services = asyncio.run(ComposeProject.from_environment(os.environ).load()).services
    if options.service not in services:
        names = ", ".join(sorted(services)) or "none"
        raise UnknownService(f'there is no service "{options.service}" with an x-serve block; services: {names}')
    return _autoscaled(services[options.service], f"services.{options.service}.x-serve")


def _written(options: Options) -> Any:
    try:
        return yaml.safe_load(options.x_serve or DEFAULT_BLOCK)
    except yaml.YAMLError as error:
        raise InvalidRequest(f"--x-serve: expected YAML such as {DEFAULT_BLOCK}: {error}") from error


def _autoscaled(service: ServiceSpec, path: str) -> ServiceSpec:
    if service.autoscale is None:
        raise InvalidRequest(
            f"{path}: has no autoscale block, so the number of replicas stays {service.replicas}; write one "
            "(compose/reference.yaml), or leave the service out and try one with --x-serve"
        )
    return service


if __name__ == "__main__":
    sys.exit(main())
