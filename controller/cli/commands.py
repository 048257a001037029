"""The commands. They talk to the REST API, inside the controller's container or, with PIERHEAD_API_URL (and
PIERHEAD_API_TOKEN for changes), from anywhere. Exit codes: 0 done, 1 failed, 2 bad input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

from controller.cli import tables
from controller.cli.client import ApiError, BadInputError, Client, SilentError, segment
from controller.cli.wait import ScaleWait, TargetMovedError, Verdict, judge_all, new_lines

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8100"
MOST_REPLICAS = 1000
POLL_S = 0.3
FOLLOW_S = 1.0
GIVE_UP_SILENT_S = 20.0
"""A controller that is being restarted answers again well within this."""
HOPELESS_LOOKS = 2
"""The first may be from just before something became free."""
WIDTH_WITHOUT_TERMINAL = 200
FOLLOWED_LINES = 1000

app = typer.Typer(
    name="pierhead",
    help="Shows what Pierhead's controller does, and sets how many replicas a service has.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Output = Annotated[str, typer.Option("--output", "-o", help="text or json")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.0, help="seconds to wait at most")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="go on with what comes next")]


def main() -> NoReturn:
    """Run the command line; never returns."""
    try:
        app()
    except ApiError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    sys.exit(0)


@app.command()
def status(output: Output = "text") -> None:
    """Show services, replicas and GPUs."""
    as_json = _is_json(output)
    document = _client().get("/api/v1/services")
    if as_json:
        _print_json(document)
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)
    for renderable in tables.status(document):
        console.print(renderable)


# "-1" must reach the check of N, which has one message for every wrong number, rather than be an unknown option.
@app.command(context_settings={"ignore_unknown_options": True})
def scale(service: str, n: str, timeout: Timeout = 300.0) -> None:
    """Set a service's number of replicas, and wait until the world agrees; "auto" takes the number back."""
    if n != "auto" and not (n.isascii() and n.isdigit() and len(n) < 10 and int(n) <= MOST_REPLICAS):
        raise BadInputError(f"N: expected an integer from 0 to {MOST_REPLICAS}, or auto, found {n!r}")
    api, path = _client(), f"/api/v1/services/{segment(service)}"
    told = api.put(f"{path}/scale", {"replicas": "auto" if n == "auto" else int(n)})
    if "message" in told:
        sys.stdout.write(f"{service}: {told['message']}\n")
    if n == "auto":
        return
    wait = ScaleWait(int(n))
    _wait(lambda: wait.judge(api.get(path)), timeout, f"The target stays {n}; `pierhead status` shows how it goes on.")


@app.command("wait-ready")
def wait_ready(timeout: Timeout = 300.0) -> None:
    """Wait until every service has the replicas it wants."""
    api = _client()
    _wait(lambda: judge_all(api.get("/api/v1/services")), timeout, "`pierhead status` shows how it goes on.")


@app.command()
def plan(output: Output = "text") -> None:
    """Show what the controller would do now, and why."""
    as_json = _is_json(output)
    document = _client().get("/api/v1/plan")
    if as_json:
        _print_json(document)
    else:
        sys.stdout.write(f"{document['text']}\n")


@app.command()
def events(
    follow: Follow = False,
    n: Annotated[int, typer.Option("-n", min=1, max=1000, help="how many of the newest")] = 50,
    service: Annotated[str, typer.Option("--service", help="of one service only")] = "",
    output: Output = "text",
) -> None:
    """Show what happened, newest last, with causes."""
    as_json, api = _is_json(output), _client()
    only = {"service": service} if service else {}
    query = {"limit": str(n), **only}
    page = api.get("/api/v1/events", query)
    while True:
        _print_events(page["events"], as_json=as_json)
        if not follow:
            return
        query = {"since": str(page["next"]), "wait": "25", **only}
        page = _patiently(partial(api.get, "/api/v1/events", query))


@app.command()
def logs(
    service: str,
    follow: Follow = False,
    n: Annotated[int, typer.Option("-n", min=1, max=10_000, help="how many lines of each replica")] = 100,
) -> None:
    """Show the last log lines of a service's replicas."""
    api, path = _client(), f"/api/v1/services/{segment(service)}/logs"
    tail = str(max(n, FOLLOWED_LINES) if follow else n)
    document = api.get(path, {"tail": tail})
    shown = {replica["name"]: replica["lines"] for replica in document["replicas"]}
    for name, lines in shown.items():
        _print_lines(name, lines[-n:])
    while follow:
        time.sleep(FOLLOW_S)
        document = _patiently(lambda: api.get(path, {"tail": tail}))
        for replica in document["replicas"]:
            _print_lines(replica["name"], new_lines(shown.get(replica["name"], []), replica["lines"]))
            shown[replica["name"]] = replica["lines"]


@app.command()
def mark(uuid: str, reason: str) -> None:
    """Place no replica on a GPU any more, because of what REASON says; those that are there stay."""
    _client().put(f"/api/v1/gpus/{segment(uuid)}", {"fault": reason})
    sys.stdout.write(f"no replica is placed on GPU {uuid} until `pierhead unmark {uuid}`\n")


@app.command()
def unmark(uuid: str) -> None:
    """Use a GPU again that the controller, or somebody, found faulty."""
    _client().put(f"/api/v1/gpus/{segment(uuid)}", {"fault": None})
    sys.stdout.write(f"GPU {uuid} is used again\n")


# ------------------------------------------------------------------------------------------------------------- waiting


def _wait(look: Callable[[], Verdict], timeout_s: float, stays: str) -> None:
    """Look until the verdict is final, showing what is waited for. Raises ApiError for any end but the wanted one."""
    progress = tables.Progress(Console(stderr=True, highlight=False))
    try:
        with progress:
            verdict = _look_until_final(look, timeout_s, progress)
    except KeyboardInterrupt:
        raise ApiError(f"Not waiting any more. {stays}") from None
    except TargetMovedError as error:
        raise ApiError(str(error)) from None
    if verdict.done:
        sys.stdout.write(f"{verdict.message}\n")
    elif verdict.hopeless:
        raise (BadInputError if verdict.exit_code == BadInputError.exit_code else ApiError)(
            f"{verdict.message}\n{stays}"
        )
    else:
        raise ApiError(f"not there after {timeout_s:g} s: {verdict.message}\n{stays}")


def _look_until_final(look: Callable[[], Verdict], timeout_s: float, progress: tables.Progress) -> Verdict:
    deadline = time.monotonic() + timeout_s
    hopeless_looks = 0
    while True:
        verdict = _patiently(look)
        progress.show(verdict.message)
        hopeless_looks = hopeless_looks + 1 if verdict.hopeless else 0
        late = time.monotonic() >= deadline
        if verdict.done or hopeless_looks >= HOPELESS_LOOKS or late:
            return verdict
        time.sleep(POLL_S)


def _patiently(ask: Callable[[], T]) -> T:
    """Ask again for a while where nobody answers: the controller may just be being restarted."""
    deadline = time.monotonic() + GIVE_UP_SILENT_S
    while True:
        try:
            return ask()
        except SilentError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(POLL_S)


# --------------------------------------------------------------------------------------------------- input and output


def _client() -> Client:
    return Client(os.environ.get("PIERHEAD_API_URL") or DEFAULT_URL, os.environ.get("PIERHEAD_API_TOKEN"))


def _is_json(output: str) -> bool:
    if output not in ("text", "json"):
        raise BadInputError(f"--output: expected text or json, found {output!r}")
    return output == "json"


def _print_json(document: object) -> None:
    sys.stdout.write(f"{json.dumps(document, indent=2)}\n")


def _print_events(listed: list[Mapping[str, Any]], *, as_json: bool) -> None:
    for event in listed:
        sys.stdout.write(f"{json.dumps(event) if as_json else tables.event_line(event)}\n")
    sys.stdout.flush()


def _print_lines(replica: str, lines: list[str]) -> None:
    sys.stdout.writelines(f"{replica} | {line}\n" for line in lines)
    sys.stdout.flush()
