"""The command behind `make simulate`: from options in text to a table, a document or a picture.

`run` is all that a command line has to wrap. It raises InvalidRequest (SpecError among them) for options and files that
cannot be used, and ControllerError when Compose cannot be run.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ...errors import InvalidRequest, UnknownService
from ...model.spec import ServiceSpec
from ...spec.compose import ComposeProject
from ...spec.parse import parse
from .distributions import parse_distribution
from .report import document, summarise, table
from .simulation import Setting, seeded, simulate
from .traces import read_trace

DEFAULT_BLOCK = "{autoscale: {min: 1, max: 8}}"
INVENTED = "simulated"
"""The service of an x-serve block that no compose file has."""
ENDINGS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; compose/reference.yaml and the README explain it."""

    trace: str
    service: str = ""
    """A service of the compose files; "" = one with `x_serve`."""
    x_serve: str = ""
    """An x-serve block as YAML, in place of a service of the files."""
    service_time: str = "exp:0.1"
    start_time: str = "10"
    concurrency: int | None = None
    """Requests that one replica works on at the same time; None = max_ongoing_requests."""
    begin: int | None = None
    failing_starts: float = 0.0
    gpus: int | None = None
    seed: int = 0
    plot: str = ""
    """A file to draw to; "" = none."""
    output: Literal["table", "json"] = "table"


def run(options: Options, say: Callable[[str], object] = print) -> int:
    """Simulate, and say what was found. Returns the exit code."""
    setting = _setting(options)
    _check_plot(options.plot)
    trace = read_trace(options.trace, seeded(options.seed, "arrivals"))
    result = simulate(_service(options), trace, setting)
    summary = summarise(result)
    if options.output == "json":
        say(json.dumps(document(result, summary), indent=2))
    else:
        say(table(result, summary))
    if options.plot:
        from .plot import draw  # only who draws needs matplotlib

        draw(result, summary, Path(options.plot))
        if options.output == "table":
            say(f"drawn to {options.plot}")
    return 0


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
        service_time=parse_distribution("--service-time", options.service_time),
        start_time=parse_distribution("--start-time", options.start_time),
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
