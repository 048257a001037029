"""When the command's waits are over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.status.records.services import Failure, Service
from controller.tool.wait import RolloutWait, ScaleWait, TargetMovedError, WaitVerdict, judge_all
from tests.unit.controller.cli_documents import AT, REJECTED, document, rolling, row, settled


def test_a_scale_waits_until_the_world_agrees() -> None:
    wait = ScaleWait(2)
    assert "not taken up" in wait.judge(row(wanted=4)).message
    verdict = wait.judge(row(ready=2, converged=False, message="2 draining"))
    assert (verdict.done, verdict.message) == (False, "web: 2 of 2 ready; 2 draining")
    assert wait.judge(row()).done
    assert wait.judge(row(converged=False, blocked="no GPU")).hopeless
    with pytest.raises(TargetMovedError, match="to 5"):
        wait.judge(row(wanted=5))


def test_a_target_that_is_overwritten_before_the_first_look_ends_the_wait_soon() -> None:
    wait, late = ScaleWait(2), ScaleWait(2)
    looks = [wait.judge(row(wanted=5, at=AT + number)) for number in (0, 0, 0, 1, 1)]
    assert not any(verdict.done or verdict.hopeless for verdict in looks), "they may be from before the request"
    with pytest.raises(TargetMovedError, match="web: another request set the target to 5"):
        wait.judge(row(wanted=5, at=AT + 2))
    assert not any(late.judge(row(wanted=5, at=at)).done for at in (AT, AT + 1))
    assert late.judge(row(at=AT + 2)).done, "ours was taken up late"


def test_everything_is_waited_for_before_the_hopeless_are_reported() -> None:
    blocked = row(name="ranker", converged=False, blocked="no GPU")
    starting = row(name="api", converged=False, message="1 starting")
    assert not judge_all(document(blocked, starting)).hopeless
    assert judge_all(document(blocked, row())).hopeless
    assert judge_all(document(row(), row(name="api"))).message == "2 services, 4 replicas, all ready"
    assert not judge_all(document(settled=False)).done
    assert judge_all(document(spec_problems=["x"])).exit_code == 2


@pytest.mark.parametrize("serving", [False, True])
def test_a_service_that_fails_again_and_again_is_not_waited_for(serving: bool) -> None:
    def failing(count: int, ready: int = 1) -> Service:
        failure = Failure(count, AT, "exit code 1")
        return row(ready=ready, converged=False, message="CRASH_LOOP: failed", failure=failure)

    assert not judge_all(document(failing(5), row(name="api")), serving=serving).hopeless
    assert not judge_all(document(failing(6), row(name="api", ready=1, converged=False)), serving=serving).hopeless
    assert not judge_all(document(failing(6, ready=2)), serving=serving).hopeless, "its failures are over"
    verdict = judge_all(document(failing(6), row(name="api")), serving=serving)
    assert (verdict.hopeless, verdict.done) == (True, False)
    assert verdict.message == "web: 1 of 2 ready; CRASH_LOOP: failed"
    assert verdict.next_step == "`pierhead why web` says what is in the way."
    assert [ScaleWait(2).judge(failing(count)).hopeless for count in (5, 6)] == [False, True]


def test_as_many_as_wanted_may_be_enough() -> None:
    busy = [row(converged=False, message="1 draining"), rolling("ranker", ready=2)]
    assert not judge_all(document(*busy)).done
    assert judge_all(document(*busy), serving=True).done
    assert not judge_all(document(*busy, row(name="api", ready=1, converged=False)), serving=True).done
    assert judge_all(document(row(ready=0, converged=False, blocked="no GPU")), serving=True).hopeless


def turned_down(**changes: Any) -> Service:
    """A service that serves with the version before the one that the files ask for."""
    rejected = replace(REJECTED, **changes.pop("rejected", {}))
    fields = {"version": "1a2b3c4d", "offered": "9f8e7d6c", "state": "DEPLOY_FAILED", "rejected": rejected}
    return settled(**{**fields, **changes})


@pytest.mark.parametrize("serving", [False, True])
def test_a_version_that_was_rolled_back_is_not_there_however_well_the_one_before_serves(serving: bool) -> None:
    verdict = judge_all(document(turned_down(), row(name="api")), serving=serving)
    assert (verdict.hopeless, verdict.done, verdict.ended) == (True, False, True)
    assert verdict.message == (
        "ranker: the files ask for version 9f8e7d6c, which was rolled back: its replicas failed 3 times; "
        "version 1a2b3c4d stays"
    )
    assert verdict.next_step == (
        "See `pierhead why ranker`; correct the files or the image, or try the same version again with "
        "`pierhead deploy ranker`."
    )
    starting = row(name="api", ready=1, converged=False)
    assert not judge_all(document(turned_down(), starting), serving=serving).hopeless, "the others are waited for"
    few = turned_down(ready=1, converged=False, message="1 starting")
    assert not judge_all(document(few), serving=serving).hopeless, "until what serves in its place is all there"


def test_a_version_that_was_refused_was_not_rolled_back() -> None:
    refused = {
        "is_refused": True,
        "reason": "shop.Ranker.rank(user): was removed; version 9f8e7d6c is incompatible with 1a2b3c4d",
    }
    verdict = judge_all(document(turned_down(rejected=refused)))
    assert verdict.hopeless
    assert (
        "the files ask for version 9f8e7d6c, which was refused: shop.Ranker.rank(user): was removed" in verdict.message
    )


def test_a_rollback_in_progress_ends_a_wait_for_serving_alone() -> None:
    way = rolling(phase="ROLLING_BACK").rollout
    assert way is not None
    back = turned_down(converged=False, state="UPDATING", rollout=way)
    verdict = judge_all(document(back), serving=True)
    assert verdict.hopeless
    assert "which is being rolled back: its replicas failed" in verdict.message
    assert not judge_all(document(back)).hopeless
    way = replace(way, from_="9f8e7d6c", to="1a2b3c4d")
    asked = turned_down(converged=False, state="UPDATING", rejected={"is_asked": True}, rollout=way)
    verdict = judge_all(document(asked), serving=True)
    assert (verdict.done, verdict.message) == (True, "1 services, 2 replicas, all ready"), "`deploy` would not wait"


@pytest.mark.parametrize(
    "changes",
    [{"rejected": {"is_asked": True}, "state": "HEALTHY"}, {"offered": "1a2b3c4d", "state": "HEALTHY"}],
    ids=["an operator asked for it", "the files ask for another version"],
)
def test_a_rejection_that_matters_no_more_fails_no_wait(changes: dict[str, Any]) -> None:
    assert judge_all(document(turned_down(**changes))).done
    assert judge_all(document(turned_down(**changes)), serving=True).done


def test_a_user_config_that_replicas_refuse_is_not_in_force() -> None:
    refused = settled(state="DEPLOY_FAILED", message="reconfigure raised ValueError: no such threshold")
    verdict = judge_all(document(refused), serving=True)
    assert verdict.hopeless
    assert verdict.message.endswith(
        "its user_config is refused, the former one stays in force: reconfigure raised ValueError: no such threshold"
    )
    assert verdict.next_step == "See `pierhead why ranker`; correct it in the files."


def test_a_rollout_in_progress_is_named() -> None:
    def going(name: str) -> Service:
        return rolling(name, ready=2, offered="9f8e7d6c", phase="BAKING")

    verdict = judge_all(document(going("ranker"), row()), serving=True)
    assert verdict.done
    assert verdict.message == (
        "2 services, 4 replicas, all ready\nranker is still rolling out; run `pierhead deploy ranker` to wait"
    )
    assert judge_all(document(going("api"), going("ranker")), serving=True).message.endswith(
        "api, ranker are still rolling out; run `pierhead deploy api ranker` to wait"
    )
    watched = replace(going("ranker"), converged=True)
    assert judge_all(document(watched)).message.endswith("` to wait")


def test_what_clients_reach_serves_once_no_other_version_answers_them() -> None:
    def is_over(phase: str, began_s_ago: float = 10.0, **changes: Any) -> bool:
        rollout = rolling(phase=phase).rollout
        assert rollout is not None
        rollout = replace(rollout, begun_at=AT - began_s_ago)
        of_files = {"offered": rollout.to, "rollout": rollout}
        return judge_all(document(rolling("api", ready=2, **{**of_files, **changes}), row()), serving=True).done

    phases = ("WAITING", "STARTING", "BAKING", "ROLLING", "ROLLING_BACK", "SETTLING")
    assert [is_over(phase) for phase in phases] == [False] * 5 + [True]
    assert not is_over("BAKING", route=None, grpc_services=("shop.Api",))
    assert is_over("BAKING", route=None), "no client reaches it"
    assert is_over("BAKING", 60), "its bake_s is longer than an `up` waits"
    assert is_over("BAKING", offered="0a0b0c0d"), "an operator asked for this version"
    assert is_over("STARTING", blocked="no GPU"), "it is named in place of waited for"


@pytest.mark.parametrize("problems", [[], ["x"]])
def test_files_that_were_changed_a_moment_ago_are_read_first(problems: list[str]) -> None:
    for service in (row(), turned_down()):
        verdict = judge_all(document(service, files_current=False, spec_problems=problems), serving=True)
        assert (verdict.done, verdict.hopeless) == (False, False)
        assert verdict.message == "the controller reads the compose files"


@pytest.mark.parametrize("reachable", [False, None])
def test_what_was_there_before_the_engine_went_away_ends_no_wait(reachable: bool | None) -> None:
    unseen: dict[str, Any] = {"engine_reachable": reachable}
    rollout, old = RolloutWait(["ranker"], BEFORE), BEFORE.services[0]
    verdicts = [
        *(judge_all(document(row(), **unseen), serving=serving) for serving in (False, True)),
        judge_all(document(row(converged=False, blocked="no GPU"), **unseen)),
        ScaleWait(2).judge(row(**unseen)),
        *(rollout.judge(document(old, at=AT + number, **unseen)) for number in range(5)),
    ]
    for judged in verdicts:
        assert (judged.done, judged.hopeless) == (False, False)
        assert judged.message.startswith("the Docker Engine does not answer, ")
    assert judge_all(document(spec_problems=["x"], **unseen)).exit_code == 2, "the files are wrong all the same"
    seen = [rollout.judge(document(old, at=AT + number)).done for number in range(5, 8)]
    assert seen == [False, False, True]


# ------------------------------------------------------------------------------------------------------------ rollouts

BEFORE = document(settled(version="1a2b3c4d"))


def views(wait: RolloutWait, *rows: Service) -> list[WaitVerdict]:
    """What is said of views of one service, each a second later."""
    return [wait.judge(document(row, at=AT + number)) for number, row in enumerate(rows)]


def test_a_version_that_a_service_takes_in_its_sleep_was_not_tried() -> None:
    asleep = settled(ready=0, wanted=0, untried=True)
    last = views(RolloutWait(["ranker"], BEFORE), asleep, asleep, asleep)[-1]
    assert last.done
    assert last.message == (
        "ranker: 0 of 0 ready, version 9f8e7d6c, not tried yet, "
        "as no replica is wanted now: it will be when the service wakes"
    )


def test_an_update_between_two_phases_is_no_end() -> None:
    between = settled(state="UPDATING")
    last = views(RolloutWait(["ranker"], BEFORE), rolling(), between, between)[-1]
    assert (last.done, last.message) == (False, "ranker: 2 of 2 ready; UPDATING")


def test_views_from_before_the_request_are_no_end() -> None:
    old = BEFORE.services[0]
    assert [verdict.done for verdict in views(RolloutWait(["ranker"], BEFORE), old, old, old)] == [False, False, True]
    wait = RolloutWait(["ranker"], BEFORE)
    assert not any(wait.judge(BEFORE).done for _ in range(10)), "one view looked at often is one view"
    rejected = settled(version="1a2b3c4d", rejected=REJECTED)
    last = views(RolloutWait(["ranker"], document(rejected)), rejected, rejected, rejected)[-1]
    assert last.done, "the version was rejected before"
    assert RolloutWait([], document()).judge(document()).done, "there is nothing to roll out"


def test_callers_of_a_service_that_was_rolled_back_are_not_waited_for() -> None:
    before = document(*(settled(name, version="1a2b3c4d") for name in ("ranker", "web", "other")))
    back = settled(version="1a2b3c4d", rejected=REJECTED)
    web = rolling("web", phase="WAITING", message="the new version of ranker, which it calls, was rolled back")
    for asked in (["ranker", "web", "other"], ["web"]):
        wait = RolloutWait(asked, before)
        looks = [document(back, web, rolling("other"), at=AT)]
        looks += [document(back, web, settled("other"), at=AT + second) for second in (1, 1, 2, 3)]
        *first, last = [wait.judge(each) for each in looks]
        assert not any(verdict.done or verdict.hopeless for verdict in first), "others may begin in the next view"
        assert (last.hopeless, last.ended) == (True, True)
        assert last.message.endswith("web: the new version of ranker, which it calls, was rolled back")
    older = RolloutWait(["web"], document(back, settled("web")))
    assert not any(older.judge(document(back, web, at=AT + second)).hopeless for second in range(5)), "an image is read"


def test_a_rollback_is_done_whatever_is_still_rejected() -> None:
    before = document(settled(version="1a2b3c4d", state="DEPLOY_FAILED", rejected=REJECTED))
    old = settled(version="00000000", state="DEPLOY_FAILED", rejected=REJECTED)
    last = views(RolloutWait(["ranker"], before, reverting=True), rolling(), old)[-1]
    assert (last.done, last.message) == (True, "ranker: 2 of 2 ready, version 00000000")
    left = settled(version="1a2b3c4d", rejected=replace(REJECTED, reason="rolled back by hand"))
    wait = RolloutWait(["ranker"], document(settled()), reverting=True)
    assert views(wait, settled(), rolling(phase="ROLLING_BACK"), left)[-1].done
    drains = replace(old, converged=False, message="1 draining")
    last = views(RolloutWait(["ranker"], before, reverting=True), rolling(), drains)[-1]
    assert (last.done, last.hopeless) == (False, False), "replicas drain still"
    again = settled(version="1a2b3c4d", state="DEPLOY_FAILED", message="00000000 was rolled back (it crashed)")
    last = views(RolloutWait(["ranker"], BEFORE, reverting=True), rolling(), again)[-1]
    assert (last.hopeless, last.ended) == (True, True)
    assert last.message == "ranker: it is at version 1a2b3c4d again: 00000000 was rolled back (it crashed)"


def test_a_deployment_that_cannot_succeed_is_hopeless() -> None:
    failed = settled(state="DEPLOY_FAILED", converged=False, ready=0, message="CRASH_LOOP: failed 3 times")
    last = views(RolloutWait(["ranker"], document()), rolling(), rolling(), failed)[-1]
    assert last.hopeless
    assert "the deployment failed: CRASH_LOOP: failed 3 times" in last.message
    stuck = rolling(blocked="it asks for 1 GPU and 0 of 2 are free", message="waits for a GPU")
    assert views(RolloutWait(["ranker"], BEFORE), stuck)[-1].hopeless


def test_files_that_cannot_be_used_end_a_deployment_but_no_rollback() -> None:
    broken = document(settled(), spec_problems=["services.ranker.x-serve.rout: unknown key"])
    verdict = RolloutWait(["ranker"], BEFORE).judge(broken)
    assert (verdict.hopeless, verdict.exit_code) == (True, 2)
    assert not RolloutWait(["ranker"], BEFORE, reverting=True).judge(broken).hopeless
