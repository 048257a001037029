"""Commands that request a change. Scale, deploy, rollback, abort and promote wait until it is carried out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from .. import completion, rows
from .. import output as out
from ..client import Client, segment, service_path
from ..errors import BadInput
from ..patience import wait
from ..wait import RolloutWait, ScaleWait, Verdict, judge_all
from .options import NoWait, Output, Service, Timeout

ROLLOUT_S = 1800.0
"""How long a replica may take to start: `startup.deadline_s` has the same default."""

Number = Annotated[str, typer.Argument(metavar="N", help="how many replicas, or auto")]
Some = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SERVICE]...", help="none named: all of them", autocompletion=completion.services),
]
Uuid = Annotated[str, typer.Argument(metavar="UUID", help="of a GPU, as `pierhead gpus` shows it")]
Reason = Annotated[str, typer.Argument(metavar="REASON", help="what is wrong with it")]
Serving = Annotated[bool, typer.Option("--serving", help="wait for ready replicas only: rollouts and drains may go on")]
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
    for command in (deploy, rollback, abort, promote, mark, unmark):
        app.command()(command)


def mark(uuid: Uuid, reason: Reason, output: Output = "text") -> None:
    """Place no further replica on a GPU, for the reason REASON; its present replicas stay."""
    _mark(uuid, reason, f"no replica is placed on GPU {uuid} until `pierhead unmark {uuid}`", output)


def unmark(uuid: Uuid, output: Output = "text") -> None:
    """Use a GPU again that the controller, or an operator, marked as faulty."""
    _mark(uuid, None, f"GPU {uuid} is used again", output)


def _mark(uuid: str, fault: str | None, words: str, output: str) -> None:
    as_json = out.is_json(output)
    answer = Client.from_environment().put(f"/api/v1/gpus/{segment(uuid)}", {"fault": fault})
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
    api, path = Client.from_environment(), service_path(service)
    answer = api.put(f"{path}/scale", {"replicas": "auto" if n == "auto" else int(n)})
    if "message" in answer and not as_json:
        out.say(f"{service}: {answer['message']}")
    target = answer.get("wanted") if n == "auto" else int(n)  # an autoscaler's target is not known in advance
    if target is None or no_wait:
        _end(None, answer, as_json=as_json)
        return
    scaled = ScaleWait(target)
    stays = f"The target stays {target}; `pierhead status` shows how it goes on."
    _end(wait(lambda: scaled.judge(api.get(path)), timeout, stays), answer, as_json=as_json)


def wait_ready(
    timeout: Timeout = 300.0, serving: Serving = False, quiet: Quiet = False, output: Output = "text"
) -> None:
    """Wait until every service has its replicas.

    After 5 s it also says what is in the way.

    Ends with 1 as soon as every missing replica has a reason that waiting does not change.
    """
    as_json, api, path = out.is_json(output), Client.from_environment(), "/api/v1/services"
    stays = "`pierhead status` shows how it goes on."
    verdict = wait(lambda: judge_all(api.get(path), serving=serving), timeout, stays, quiet=quiet)
    _end(verdict, {}, as_json=as_json)


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
    as_json, api = out.is_json(output), Client.from_environment()
    before = _services(api)
    answer = api.post(
        "/api/v1/deploy", {**({"services": services} if services else {}), **({"now": True} if now else {})}
    )
    if not as_json:
        for name, sentence in answer["services"].items():
            out.say(f"{name}: {sentence}")
    names = sorted(answer["services"])
    _see_through(api, RolloutWait(names, before), answer, names, None if no_wait else timeout, as_json=as_json)


def rollback(
    service: Service, to: Version = "", timeout: Timeout = ROLLOUT_S, no_wait: NoWait = False, output: Output = "text"
) -> None:
    """Go back to the version before, or to another one."""
    _redirect("rollback", service, {"to": to} if to else {}, timeout, no_wait, output)


def abort(service: Service, timeout: Timeout = ROLLOUT_S, no_wait: NoWait = False, output: Output = "text") -> None:
    """End a rollout: back to where it came from."""
    _redirect("abort", service, {}, timeout, no_wait, output)


def promote(service: Service, timeout: Timeout = ROLLOUT_S, no_wait: NoWait = False, output: Output = "text") -> None:
    """End the watch over a rollout's first batch: the rest follows."""
    _redirect("promote", service, {}, timeout, no_wait, output)


def _redirect(verb: str, service: str, body: Mapping[str, str], timeout_s: float, no_wait: bool, output: str) -> None:
    as_json, api = out.is_json(output), Client.from_environment()
    before = _services(api)
    answer = api.post(service_path(service, verb), body)
    if answer.get("message") and not as_json:
        out.say(f"{service}: {answer['message']}")
    rollout = RolloutWait([service], before, reverting=verb != "promote")
    _see_through(api, rollout, answer, [service], None if no_wait else timeout_s, as_json=as_json)


def _see_through(
    api: Client,
    rollout: RolloutWait,
    answer: Mapping[str, Any],
    services: Sequence[str],
    timeout_s: float | None,
    *,
    as_json: bool,
) -> None:
    """Wait for the end of the rollouts and print it. `timeout_s` None: do not wait."""
    if timeout_s is None:
        _end(None, answer, as_json=as_json)
        return
    stays = "The rollout goes on without you; `pierhead status` shows how."
    verdict = wait(lambda: rollout.judge(_services(api)), timeout_s, stays)
    if as_json:
        shown = {
            row["name"]: {
                "state": row["state"],
                "version": rows.version(row),
                "ready": row["ready"],
                "wanted": row["wanted"],
            }
            for row in _services(api)["services"]
            if row["name"] in services
        }
        answer = {**answer, "services": shown}
    _end(verdict, answer, as_json=as_json)


def _services(api: Client) -> Any:
    return api.get("/api/v1/services")


def _end(verdict: Verdict | None, answer: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the result of the wait; `verdict` is None where the command did not wait."""
    if as_json:
        waited = {"done": verdict.done, "message": verdict.message} if verdict else {}
        out.print_json({**answer, **waited})
    elif verdict:
        out.say(verdict.message)
