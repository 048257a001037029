"""When the command's waits are over."""

from __future__ import annotations

from typing import Any

import pytest

from controller.cli.wait import RolloutWait, ScaleWait, TargetMovedError, Verdict, judge_all
from tests.unit.controller.cli_documents import AT, document, replica, rolling, settled
from tests.unit.controller.cli_documents import row as full_row


def row(**changes: Any) -> dict[str, Any]:
    return full_row(**changes)


def test_a_scale_waits_until_the_world_agrees() -> None:
    wait = ScaleWait(2)
    assert "not taken up" in wait.judge(row(wanted=4)).message
    verdict = wait.judge(row(ready=2, converged=False, message="2 draining"))
    assert (verdict.done, verdict.message) == (False, "web: 2 of 2 ready; 2 draining")
    assert wait.judge(row()).done
    assert wait.judge(row(converged=False, blocked="no GPU")).hopeless
    with pytest.raises(TargetMovedError, match="to 5 meanwhile"):
        wait.judge(row(wanted=5))


UNREACHABLE = "not ready yet: no connection to :8001/healthz"


def test_what_is_waited_for_has_its_reasons() -> None:
    names = [f"p-web-1a2b3c4d-{number}" for number in (1, 2, 3)]
    starting = [
        replica(names[0], "STARTING", message=UNREACHABLE),
        replica(names[1]),
        replica(names[2], "STARTING", message=UNREACHABLE),
    ]
    (part,) = judge_all(all_of(row(ready=1, wanted=3, converged=False, replicas=starting))).parts
    assert [reason.words for reason in part.reasons] == [f"{names[0]} and 1 more: {UNREACHABLE}"]
    (part,) = judge_all(all_of(row())).parts
    assert part.reasons == ()


def test_a_target_that_is_overwritten_before_the_first_look_is_told_soon() -> None:
    wait = ScaleWait(2)
    looks = [wait.judge(row(wanted=5, at=AT + number)) for number in (0, 0, 0, 1, 1)]
    assert not any(verdict.done or verdict.hopeless for verdict in looks), "they may be from before the request"
    with pytest.raises(TargetMovedError, match="web: somebody else set the target to 5 meanwhile"):
        wait.judge(row(wanted=5, at=AT + 2))


def test_a_target_that_is_taken_up_late_is_waited_for() -> None:
    wait = ScaleWait(2)
    assert not any(wait.judge(row(wanted=5, at=at)).done for at in (AT, AT + 1))
    assert wait.judge(row(at=AT + 2)).done


def all_of(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return document(*rows, **changes)


def test_everything_is_waited_for_before_the_hopeless_are_told() -> None:
    blocked = row(name="ranker", converged=False, blocked="no GPU")
    starting = row(name="api", converged=False, message="1 starting")
    assert not judge_all(all_of(blocked, starting)).hopeless
    assert judge_all(all_of(blocked, row())).hopeless
    assert judge_all(all_of(row(), row(name="api"))).message == "2 services, 4 replicas, all ready"
    assert not judge_all(all_of(settled=False)).done
    assert judge_all(all_of(spec_problems=["x"])).exit_code == 2


def test_who_fails_again_and_again_is_not_waited_for() -> None:
    starting = row(name="api", ready=1, converged=False, message="1 starting")
    failing = row(
        ready=1,
        converged=False,
        message="CRASH_LOOP: failed",
        failure={"count": 5, "last_at": AT, "detail": "exit code 1"},
    )
    assert not judge_all(all_of(failing, row(name="api"))).hopeless
    failing["failure"]["count"] = 6
    assert not judge_all(all_of(failing, starting)).hopeless
    for serving in (False, True):
        verdict = judge_all(all_of(failing, row(name="api")), serving=serving)
        assert (verdict.hopeless, verdict.done) == (True, False)
        assert verdict.message == "web: 1 of 2 ready; CRASH_LOOP: failed"
        assert verdict.next_step == "`pierhead why web` says what is in the way."
    assert not judge_all(all_of({**failing, "ready": 2, "message": "1 draining"})).hopeless, "that was before"


def test_as_many_as_wanted_may_be_enough() -> None:
    busy = [row(converged=False, message="1 draining"), rolling("ranker", ready=2)]
    assert not judge_all(all_of(*busy)).done
    assert judge_all(all_of(*busy), serving=True).done
    assert not judge_all(all_of(*busy, row(name="api", ready=1, converged=False)), serving=True).done
    assert judge_all(all_of(row(ready=0, converged=False, blocked="no GPU")), serving=True).hopeless


TURNED_DOWN = {
    "version": "9f8e7d6c",
    "reason": "it does not become ready (3 tries)",
    "at": AT,
    "is_asked": False,
    "id": "9f8e7d6c@0",
}


def turned_down(**changes: Any) -> dict[str, Any]:
    """A service that serves with the version before the one that the files ask for."""
    rejected = {**TURNED_DOWN, **changes.pop("rejected", {})}
    fields = {"version": "1a2b3c4d", "offered": "9f8e7d6c", "state": "DEPLOY_FAILED", "rejected": rejected}
    return settled(**{**fields, **changes})


@pytest.mark.parametrize("serving", [False, True])
def test_a_version_that_was_rolled_back_is_not_there_however_well_the_one_before_serves(serving: bool) -> None:
    verdict = judge_all(all_of(turned_down(), row(name="api")), serving=serving)
    assert (verdict.hopeless, verdict.done, verdict.ended) == (True, False, True)
    assert verdict.message == (
        "ranker: the files ask for version 9f8e7d6c, which was rolled back: it does not become ready (3 tries); "
        "version 1a2b3c4d goes on"
    )
    assert verdict.next_step == (
        "See `pierhead why ranker`; correct the files or the image, or try the same version again with "
        "`pierhead deploy ranker`."
    )
    starting = row(name="api", ready=1, converged=False)
    assert not judge_all(all_of(turned_down(), starting), serving=serving).hopeless, "the others are waited for"
    few = turned_down(ready=1, converged=False, message="1 starting")
    assert not judge_all(all_of(few), serving=serving).hopeless, "until what serves in its place is all there"


def test_a_way_back_that_goes_on_is_the_end_of_a_wait_for_serving_alone() -> None:
    back = turned_down(converged=False, state="UPDATING", rollout=rolling(phase="ROLLING_BACK")["rollout"])
    verdict = judge_all(all_of(back), serving=True)
    assert verdict.hopeless
    assert "which is being rolled back: it does not become ready" in verdict.message
    assert not judge_all(all_of(back)).hopeless


@pytest.mark.parametrize(
    "changes",
    [{"rejected": {"is_asked": True}, "state": "HEALTHY"}, {"offered": "1a2b3c4d", "state": "HEALTHY"}],
    ids=["somebody wanted it so", "the files ask for another one"],
)
def test_a_rejection_that_is_in_nobody_s_way_ends_no_wait_badly(changes: dict[str, Any]) -> None:
    assert judge_all(all_of(turned_down(**changes))).done
    assert judge_all(all_of(turned_down(**changes)), serving=True).done


def test_settings_that_replicas_refuse_are_not_in_force() -> None:
    refused = settled(state="DEPLOY_FAILED", message="reconfigure raised ValueError: no such threshold")
    verdict = judge_all(all_of(refused), serving=True)
    assert verdict.hopeless
    assert verdict.message == (
        "ranker: its user_config is refused, the former one stays in force: "
        "reconfigure raised ValueError: no such threshold"
    )
    assert verdict.next_step == "See `pierhead why ranker`; correct it in the files."


def test_a_rollout_that_goes_on_is_told() -> None:
    def going(name: str) -> dict[str, Any]:
        return rolling(name, ready=2, offered="9f8e7d6c", phase="BAKING")

    told = judge_all(all_of(going("ranker"), row()), serving=True)
    assert told.done
    assert told.message == (
        "2 services, 4 replicas, all ready\n"
        "a rollout of ranker goes on; `make deploy` (or `pierhead deploy ranker`) waits for its end"
    )
    both = judge_all(all_of(going("api"), going("ranker")), serving=True).message
    assert both.endswith(
        "rollouts of api, ranker go on; `make deploy` (or `pierhead deploy api ranker`) waits for their end"
    )
    held = {**going("ranker"), "converged": True}
    assert judge_all(all_of(held)).message.endswith("waits for its end"), "it is watched still"


def test_a_way_back_that_somebody_asked_for_is_no_rollout_to_deploy() -> None:
    way = {**rolling(phase="ROLLING_BACK")["rollout"], "from": "9f8e7d6c", "to": "1a2b3c4d"}
    back = turned_down(converged=False, rejected={"is_asked": True}, rollout=way)
    told = judge_all(all_of({**back, "state": "UPDATING"}), serving=True)
    assert (told.done, told.message) == (True, "1 services, 2 replicas, all ready")


def test_files_that_were_changed_a_moment_ago_are_read_first() -> None:
    for rows in ([row()], [turned_down()]):
        verdict = judge_all(all_of(*rows, files_current=False), serving=True)
        assert (verdict.done, verdict.hopeless) == (False, False)
        assert verdict.message == "the controller reads the compose files"
    corrected = judge_all(all_of(row(), spec_problems=["x"], files_current=False))
    assert (corrected.done, corrected.hopeless) == (False, False)


@pytest.mark.parametrize("reachable", [False, None])
def test_what_was_there_before_the_engine_went_away_ends_no_wait(reachable: bool | None) -> None:
    unseen = {"engine_reachable": reachable}
    verdicts = [
        judge_all(all_of(row(), **unseen)),
        judge_all(all_of(row(), **unseen), serving=True),
        judge_all(all_of(row(converged=False, blocked="no GPU"), **unseen)),
        ScaleWait(2).judge(row(**unseen)),
        ScaleWait(2).judge(row(converged=False, blocked="no GPU", **unseen)),
    ]
    for judged in verdicts:
        assert (judged.done, judged.hopeless) == (False, False)
        assert judged.message.startswith("the Docker Engine does not answer, ")
    assert judge_all(all_of(spec_problems=["x"], **unseen)).exit_code == 2, "files are wrong whoever is away"


def test_views_of_a_world_that_is_not_seen_bring_no_rollout_nearer() -> None:
    old = BEFORE["services"][0]
    wait = RolloutWait(["ranker"], BEFORE)
    unseen = [wait.judge(document(old, at=AT + number, engine_reachable=False)) for number in range(5)]
    assert not any(verdict.done or verdict.hopeless for verdict in unseen)
    seen = [wait.judge(document(old, at=AT + number)).done for number in range(5, 8)]
    assert seen == [False, False, True]


def test_progress_counts_each_service() -> None:
    verdict = judge_all(all_of(row(ready=1, converged=False), row(name="api")))
    assert [(part.name, part.ready, part.wanted) for part in verdict.parts] == [("web", 1, 2), ("api", 2, 2)]


# ------------------------------------------------------------------------------------------------------------ rollouts

REJECTED = {**TURNED_DOWN, "reason": "its replicas failed 3 times", "at": AT - 500}
BEFORE = document(settled(version="1a2b3c4d"))


def views(wait: RolloutWait, *rows: dict[str, Any]) -> list[Verdict]:
    """What is said of views of one service, each a second later."""
    return [wait.judge(document(row, at=AT + number)) for number, row in enumerate(rows)]


def test_a_rollout_that_ends_in_the_new_version_is_done() -> None:
    new = settled()
    *before, last = views(RolloutWait(["ranker"], BEFORE), BEFORE["services"][0], rolling(), rolling(), new)
    assert not any(verdict.done or verdict.hopeless for verdict in before)
    assert before[1].message == "ranker: 1a2b3c4d -> 9f8e7d6c ROLLING: 1 of 2 ready"
    assert (last.done, last.message) == (True, "ranker: 2 of 2 ready, version 9f8e7d6c")


def test_a_version_that_a_service_takes_in_its_sleep_was_not_tried() -> None:
    asleep = settled(ready=0, wanted=0, untried=True)
    last = views(RolloutWait(["ranker"], BEFORE), asleep, asleep, asleep)[-1]
    assert last.done
    assert last.message == (
        "ranker: 0 of 0 ready, version 9f8e7d6c, not tried yet, "
        "as no replica is wanted now: it will be at the next wake"
    )
    awake = settled(untried=False)
    assert views(RolloutWait(["ranker"], BEFORE), awake, awake, awake)[-1].message.endswith("version 9f8e7d6c")


def test_an_update_between_two_phases_is_no_end() -> None:
    between = settled(state="UPDATING")
    last = views(RolloutWait(["ranker"], BEFORE), rolling(), between, between)[-1]
    assert (last.done, last.message) == (False, "ranker: 2 of 2 ready; UPDATING")


def test_views_from_before_the_request_are_no_end() -> None:
    old = BEFORE["services"][0]
    first, second, third = views(RolloutWait(["ranker"], BEFORE), old, old, old)
    assert not first.done
    assert not second.done
    assert third.done, "there was nothing to do"
    wait = RolloutWait(["ranker"], BEFORE)
    assert not any(wait.judge(BEFORE).done for _ in range(10)), "one view looked at often is one view"


def test_a_version_that_is_rolled_back_fails_with_reason_and_next_step() -> None:
    back = settled(version="1a2b3c4d", rejected=REJECTED)
    last = views(RolloutWait(["ranker"], BEFORE), rolling(), rolling(phase="ROLLING_BACK"), back)[-1]
    assert last.hopeless
    assert last.message == (
        "ranker: version 9f8e7d6c was rolled back: its replicas failed 3 times; version 1a2b3c4d serves"
    )
    assert "`pierhead why ranker`" in last.next_step


def test_what_was_rejected_before_is_no_outcome() -> None:
    rejected = settled(version="1a2b3c4d", rejected=REJECTED)
    assert views(RolloutWait(["ranker"], document(rejected)), rejected, rejected, rejected)[-1].done


def test_a_rejection_is_known_again_when_the_clock_was_set() -> None:
    before = settled(version="1a2b3c4d", rejected={**REJECTED, "id": "9f8e7d6c@1", "at": 1.0})
    now = settled(version="1a2b3c4d", rejected={**REJECTED, "id": "9f8e7d6c@1", "at": 9.0})
    assert views(RolloutWait(["ranker"], document(before)), now, now, now)[-1].done
    again = settled(version="1a2b3c4d", rejected={**REJECTED, "id": "9f8e7d6c@2", "at": 9.0})
    assert views(RolloutWait(["ranker"], document(before)), again, again, again)[-1].hopeless


def test_a_rollback_does_not_fail_because_of_what_it_leaves_behind() -> None:
    left = settled(version="1a2b3c4d", rejected={**REJECTED, "reason": "rolled back by hand"})
    wait = RolloutWait(["ranker"], document(settled()), reverting=True)
    assert views(wait, settled(), rolling(phase="ROLLING_BACK"), left)[-1].done


def test_a_rollback_is_done_whatever_is_still_rejected() -> None:
    before = document(settled(version="1a2b3c4d", state="DEPLOY_FAILED", rejected=REJECTED))
    old = settled(version="00000000", state="DEPLOY_FAILED", rejected=REJECTED)
    last = views(RolloutWait(["ranker"], before, reverting=True), rolling(), old)[-1]
    assert (last.done, last.message) == (True, "ranker: 2 of 2 ready, version 00000000")
    drains = {**old, "converged": False, "message": "1 draining"}
    last = views(RolloutWait(["ranker"], before, reverting=True), rolling(), drains)[-1]
    assert (last.done, last.hopeless) == (False, False), "those that go are on their way"


def test_a_rollback_to_what_does_not_work_either_fails() -> None:
    before = document(settled(version="1a2b3c4d"))
    again = settled(version="1a2b3c4d", state="DEPLOY_FAILED", message="00000000 was rolled back (it crashed)")
    last = views(RolloutWait(["ranker"], before, reverting=True), rolling(), again)[-1]
    assert (last.hopeless, last.ended) == (True, True)
    assert last.message == "ranker: it is at version 1a2b3c4d again: 00000000 was rolled back (it crashed)"


def test_a_first_deployment_that_fails_has_nothing_to_go_back_to() -> None:
    failed = settled(state="DEPLOY_FAILED", converged=False, ready=0, message="CRASH_LOOP: failed 3 times")
    last = views(RolloutWait(["ranker"], document()), rolling(), rolling(), failed)[-1]
    assert last.hopeless
    assert "the deployment failed: CRASH_LOOP: failed 3 times" in last.message


def test_a_rollout_without_a_gpu_to_start_on_is_hopeless() -> None:
    stuck = rolling(blocked="it asks for 1 GPU and 0 of 2 are free", message="waits for a GPU")
    assert views(RolloutWait(["ranker"], BEFORE), stuck)[-1].hopeless


def test_several_services_are_waited_for_until_the_last() -> None:
    before = document(settled("a", "1"), settled("b", "1"))
    wait = RolloutWait(["a", "b"], before)
    failed = settled("a", "1", rejected={**REJECTED, "version": "2"})
    assert not wait.judge(document(rolling("a"), rolling("b"))).hopeless
    verdict = wait.judge(document(failed, rolling("b"), at=AT + 1))
    assert not verdict.hopeless, "the other one may still get there"
    verdict = wait.judge(document(failed, settled("b", "2"), at=AT + 2))
    assert verdict.hopeless
    assert "a: version 2 was rolled back" in verdict.message


def test_nothing_to_roll_out_is_done_at_once() -> None:
    assert RolloutWait([], document()).judge(document()).done


def test_files_that_cannot_be_used_end_a_deployment_but_no_rollback() -> None:
    broken = document(settled(), spec_problems=["services.ranker.x-serve.rout: unknown key"])
    verdict = RolloutWait(["ranker"], BEFORE).judge(broken)
    assert (verdict.hopeless, verdict.exit_code) == (True, 2)
    assert not RolloutWait(["ranker"], BEFORE, reverting=True).judge(broken).hopeless


def test_rows_of_a_controller_without_rollouts_will_do() -> None:
    plain = document(full_row())
    wait = RolloutWait(["web"], plain)
    assert not wait.judge(plain).done
    verdicts = [wait.judge(document(full_row(), at=AT + number)) for number in (1, 2)]
    assert verdicts[-1].done
