"""Commands that request a change. Scale and those of rollouts wait until it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .. import completion, rows
from .. import output as out
from ..errors import BadInput
from ..patience import wait
from ..wait import RolloutWait, ScaleWait, WaitVerdict, judge_all
from .options import NoWait, Output, Service, Timeout, connect

if TYPE_CHECKING:
    from ...status.records.changes import Asked, Deployed
    from ..api import ControllerApi

ROLLOUT_S = 1800.0
"""How long a replica may take to start: `startup.deadline_s` has the same default."""

Number = Annotated[str, typer.Argument(metavar="N", help="how many replicas, or auto")]
Some = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SERVICE]...", help="none named: all of them", autocompletion=completion.services),
]
Uuid = Annotated[str, typer.Argument(metavar="UUID", help="of a GPU, as `pierhead gpus` shows it")]
Reason = Annotated[str, typer.Argument(metavar="REASON", help="what is wrong with it")]
Serving = Annotated[
    bool, typer.Option("--serving", help="wait for ready replicas, and up to 60 s for rollouts that clients see")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="show only what is in the way, and how it ended")]
Now = Annotated[bool, typer.Option("--now", help="replace all replicas as soon as new ones are ready: no bake_s")]
Version = Annotated[
    str,
    typer.Option("--to", metavar="VERSION", help="one of `pierhead revisions`", autocompletion=completion.versions),
]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    # "-1" must reach the check of N, which has one message for every wrong number, rather than be an unknown option.
    app.command(context_settings={"ignore_unknown_options": True})(scale)
    app.command("wait-ready")(wait_ready)
    for command in (deploy, rollback, abort, promote, restart, mark, unmark):
        app.command()(command)


def mark(uuid: Uuid, reason: Reason, output: Output = "text") -> None:
    """Place no further replica on a GPU, for the reason REASON; its present replicas stay."""
    _mark(uuid, reason, f"no replica is placed on GPU {uuid} until `pierhead unmark {uuid}`", output)


def unmark(uuid: Uuid, output: Output = "text") -> None:
    """Use a GPU again that the controller, or an operator, marked as faulty."""
    _mark(uuid, None, f"GPU {uuid} is used again", output)


def _mark(uuid: str, fault: str | None, words: str, output: str) -> None:
    as_json = out.is_json(output)
    answer = connect().mark(uuid, fault)
    if as_json:
        out.print_json(answer)
    else:
        out.say(words)


def scale(
    service: Service, n: Number, timeout: Timeout = 300.0, no_wait: NoWait = False, output: Output = "text"
) -> None:
    """Set a service's number of replicas; "auto" removes it.

    Waits until that many replicas are ready. A number pauses the autoscaler, "auto" resumes it; without an autoscaler
    "auto" goes back to the number in the compose files.
    """
    as_json = out.is_json(output)
    if n != "auto" and not (n.isascii() and n.isdigit() and len(n) < 10):
        raise BadInput(f"N: expected an integer of at least 0, or auto, found {n!r}")
    api = connect()
    answer = api.scale(service, None if n == "auto" else int(n))
    if answer.message and not as_json:
        out.say(f"{service}: {answer.message}")
    target = answer.wanted if n == "auto" else int(n)  # an autoscaler's target is not known in advance
    if target is None or no_wait:
        _end(None, answer, as_json=as_json)
        return
    scaled = ScaleWait(target)
    stays = f"The target stays {target}; `pierhead status` shows the progress."
    _end(wait(lambda: scaled.judge(api.service(service)), timeout, stays), answer, as_json=as_json)


def wait_ready(
    timeout: Timeout = 300.0, serving: Serving = False, quiet: Quiet = False, output: Output = "text"
) -> None:
    """Wait until every service has its replicas.

    After 5 s it also says what is in the way.

    Ends with 1 as soon as every missing replica has a reason that waiting does not change.
    """
    as_json, api = out.is_json(output), connect()
    stays = "`pierhead status` shows the progress."
    verdict = wait(lambda: judge_all(api.services(), serving=serving), timeout, stays, quiet=quiet)
    _end(verdict, None, as_json=as_json)


def deploy(
    services: Some = None,
    now: Now = False,
    timeout: Timeout = ROLLOUT_S,
    no_wait: NoWait = False,
    output: Output = "text",
) -> None:
    """Roll out what files and images say now, and wait.

    A version that was rolled back before is tried again. Ends with 1 when a rollout ended in the old version.
    """
    as_json, api = out.is_json(output), connect()
    before = api.services()
    answer = api.deploy(services or (), now=now)
    if not as_json:
        for name, sentence in answer.services.items():
            out.say(f"{name}: {sentence}")
    names = sorted(answer.services)
    _see_through(api, RolloutWait(names, before), answer, names, None if no_wait else timeout, as_json=as_json)


def rollback(
    service: Service, to: Version = "", timeout: Timeout = ROLLOUT_S, no_wait: NoWait = False, output: Output = "text"
) -> None:
    """Go back to the version before, or to another one."""
    _redirect(service, lambda api: api.roll_back(service, to), timeout, no_wait, output)


def abort(service: Service, timeout: Timeout = ROLLOUT_S, no_wait: NoWait = False, output: Output = "text") -> None:
    """End a rollout: back to where it came from."""
    _redirect(service, lambda api: api.abort(service), timeout, no_wait, output)


def promote(service: Service, timeout: Timeout = ROLLOUT_S, no_wait: NoWait = False, output: Output = "text") -> None:
    """End the watch over a rollout's first batch: the rest follows."""
    _redirect(service, lambda api: api.promote(service), timeout, no_wait, output, reverting=False)


def restart(service: Service, timeout: Timeout = ROLLOUT_S, no_wait: NoWait = False, output: Output = "text") -> None:
    """Replace the replicas by others of the same version, as a rollout does, and wait."""
    _redirect(service, lambda api: api.restart(service), timeout, no_wait, output, reverting=False)


def _redirect(
    service: str,
    ask: Callable[[ControllerApi], Asked],
    timeout_s: float,
    no_wait: bool,
    output: str,
    *,
    reverting: bool = True,
) -> None:
    as_json, api = out.is_json(output), connect()
    before = api.services()
    answer = ask(api)
    if answer.message and not as_json:
        out.say(f"{service}: {answer.message}")
    rollout = RolloutWait([service], before, reverting=reverting)
    _see_through(api, rollout, answer, [service], None if no_wait else timeout_s, as_json=as_json)


def _see_through(
    api: ControllerApi,
    rollout: RolloutWait,
    answer: Asked | Deployed,
    services: Sequence[str],
    timeout_s: float | None,
    *,
    as_json: bool,
) -> None:
    """Wait for the end of the rollouts and print it. `timeout_s` None: do not wait."""
    if timeout_s is None:
        _end(None, answer, as_json=as_json)
        return
    stays = "The rollout continues; `pierhead status` shows the progress."
    verdict = wait(lambda: rollout.judge(api.services()), timeout_s, stays)
    shown = {
        row.name: {"state": row.state, "version": rows.version(row), "ready": row.ready, "wanted": row.wanted}
        for row in (api.services().services if as_json else ())
        if row.name in services
    }
    _end(verdict, answer, as_json=as_json, services=shown)


def _end(verdict: WaitVerdict | None, answer: object, *, as_json: bool, **more: object) -> None:
    """Print the result of the wait; `verdict` is None where the command did not wait, `answer` where it only waited."""
    if as_json:
        waited = {"done": verdict.done, "message": verdict.message} if verdict else {}
        out.print_json({**(out.with_members(answer) if answer else {}), **more, **waited})
    elif verdict:
        out.say(verdict.message)
