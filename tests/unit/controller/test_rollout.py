"""The state machine of a rollout: facts as a picture, the way it goes as phases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.desired import rollout
from controller.desired.rollout import AnswerTally, Count, RolloutFacts, Rules, advance, goal_version, worse
from controller.model.desired import Rejection, Rollout, RolloutPhase, ServiceRollout
from controller.model.spec import RolloutSpec
from controller.model.world import FailureRecord

RULES = Rules(RolloutSpec(bake_s=10), startup_deadline_s=60)
V1 = ServiceRollout(stable="v1")
WAITING, STARTING, BAKING = RolloutPhase.WAITING, RolloutPhase.STARTING, RolloutPhase.BAKING
ROLLING, SETTLING, ROLLING_BACK = RolloutPhase.ROLLING, RolloutPhase.SETTLING, RolloutPhase.ROLLING_BACK


def facts(offered: str | None = "v2", target: int = 2, **changes: Any) -> RolloutFacts:
    """Two ready replicas of v1, and v2 is offered."""
    return RolloutFacts(**{"target": target, "offered": offered, "counts": {"v1": Count(2, 2)}, **changes})


def counts(**versions: tuple[int, int]) -> dict[str, Count]:
    return {version: Count(*numbers) for version, numbers in versions.items()}


def walk(
    state: ServiceRollout, *moments: tuple[float, RolloutFacts], rules: Rules = RULES
) -> tuple[ServiceRollout, list[str]]:
    """Advance through these moments; return the last state and the phases after each."""
    phases = []
    for now, seen in moments:
        state, _ = advance(state, seen, rules, now)
        phases.append(state.rollout.phase.value if state.rollout else "")
    return state, phases


def in_phase(phase: RolloutPhase, now: float = 0.0) -> ServiceRollout:
    """v1 -> v2, in that phase since `now`."""
    state, _ = advance(V1, facts(), RULES, now)
    assert state.rollout
    return replace(state, rollout=replace(state.rollout, phase=phase, since=now))


def test_a_rollout_goes_through_every_phase() -> None:
    first = counts(v1=(2, 2), v2=(1, 1))
    state, phases = walk(
        V1,
        (0, facts()),
        (1, facts(counts=counts(v1=(2, 2), v2=(1, 0)))),
        (2, facts(counts=first)),
        (11, facts(counts=first)),
        (12, facts(counts=first)),
        (13, facts(counts=counts(v1=(1, 1), v2=(2, 1)))),
        (14, facts(counts=counts(v2=(2, 2)))),
        (23, facts(counts=counts(v2=(2, 2)))),
        (24, facts(counts=counts(v2=(2, 2)))),
    )
    assert phases == ["STARTING", "STARTING", "BAKING", "BAKING", "ROLLING", "ROLLING", "SETTLING", "SETTLING", ""]
    assert state == ServiceRollout(stable="v2", previous=("v1",))


def test_without_a_record_the_version_with_ready_replicas_counts_as_proven() -> None:
    assert advance(ServiceRollout(), facts("v1"), RULES, 0)[0].stable == "v1"
    state, _ = advance(ServiceRollout(), facts("v2"), RULES, 0)
    assert (state.stable, state.rollout and state.rollout.phase) == ("v1", STARTING)
    nothing = facts("v1", counts={})
    assert advance(ServiceRollout(), nothing, RULES, 0)[0] == ServiceRollout()
    assert goal_version(ServiceRollout(), "v1") == ("v1", None)
    assert goal_version(ServiceRollout(), None) == (None, None)


def test_where_nothing_of_the_former_version_runs_the_new_one_starts_at_once() -> None:
    """As after `make down`: starting the former one first, to replace it, would serve nobody."""
    state, notes = advance(V1, facts(counts={}), RULES, 0)
    assert state == ServiceRollout(stable="v2", previous=("v1",), is_unproven=True, tried_since=0)
    assert [note.message for note in notes] == ["v1 -> v2: at once, as nothing of v1 runs"]
    assert goal_version(state, "v2") == ("v2", None)
    starting = facts(counts=counts(v2=(2, 0)))
    assert walk(state, (1, starting), (2, facts(counts=counts(v2=(2, 2)))))[0] == ServiceRollout("v2", previous=("v1",))
    failing = replace(starting, failures={"v2": FailureRecord(3, 5.0, "code 1")})
    back, phases = walk(state, (5, failing), (6, facts(counts=counts(v1=(2, 2)))))
    assert (phases, back.stable) == (["ROLLING_BACK", ""], "v1"), "its way back is that of any version"
    hangs = replace(starting, failures={"v2": FailureRecord(1, 60.0, "not ready 60 s after its start")})
    assert walk(state, (59, hangs), (60, hangs))[1] == ["", "ROLLING_BACK"], "nor are three deadlines waited for"
    before = replace(starting, failures={"v2": FailureRecord(3, -1.0, "code 1")})
    assert walk(state, (1, before))[0].stable == "v2", "what it did before it was asked for again does not count"


@pytest.mark.parametrize(
    "seen",
    [
        facts(counts={}, waits_for="ranker goes first"),
        facts(counts=counts(v1=(1, 0))),
        facts(counts=counts(v1=(1, 0), v2=(1, 1))),
    ],
    ids=["a callee goes first", "the former version starts", "both versions are there"],
)
def test_the_new_version_does_not_start_at_once(seen: RolloutFacts) -> None:
    assert advance(V1, seen, RULES, 0)[0].stable == "v1"


def test_a_version_taken_at_zero_replicas_is_proven_by_its_first_replicas() -> None:
    at_zero, _ = walk(V1, (0, facts(target=0, counts={})))
    assert at_zero == ServiceRollout(stable="v2", previous=("v1",), is_unproven=True)
    proved, _ = walk(at_zero, (1, facts(counts=counts(v2=(2, 1)))))
    assert proved == ServiceRollout(stable="v2", previous=("v1",))
    failing = facts(counts=counts(v2=(1, 0)), failures={"v2": FailureRecord(3, 5.0, "code 1")})
    back, phases = walk(at_zero, (5, failing), (6, facts(counts=counts(v1=(2, 2)))))
    assert phases == ["ROLLING_BACK", ""]
    assert (back.stable, back.rejected and back.rejected.version, back.is_unproven) == ("v1", "v2", False)
    to_v2 = Rollout("v3", "v2", ROLLING_BACK, 3, 1, "v3 had errors")
    rejected = Rejection("v3", "it had errors", 3)
    on_the_way = ServiceRollout("v2", to_v2, rejected, previous=("v1",), is_unproven=True)
    back, phases = walk(on_the_way, (5, replace(failing, offered="v3")), (6, facts("v3", counts=counts(v1=(2, 2)))))
    assert phases == ["ROLLING_BACK", ""], "the rollback continues to the former version"
    assert (back.stable, back.rejected, back.is_unproven) == ("v1", rejected, False), "what the files give waits on"
    alone = ServiceRollout(stable="v2", is_unproven=True)
    assert walk(alone, (5, failing))[0] == replace(alone, tried_since=5), "there is nothing to go back to"


def test_an_outage_during_a_first_try_does_not_lead_back_to_the_oldest_version() -> None:
    """The store of all models does not answer. v2 worked before, and works when the store is back."""
    asleep = ServiceRollout(stable="v3", previous=("v2", "v1"), is_unproven=True)
    fails = {version: FailureRecord(3, 6.0, "no connection to the store") for version in ("v1", "v2", "v3")}
    down = facts("v3", counts=counts(v3=(1, 0)), failures=fails)
    state, phases = walk(
        asleep, (5, down), (7, replace(down, counts=counts(v2=(1, 0)))), (99, replace(down, counts={}))
    )
    assert set(phases[:2]) == {"ROLLING_BACK"}
    assert (state.stable, state.previous) == ("v2", ("v1",))
    assert state.rejected
    assert state.rejected.version == "v3"


def test_a_rollback_never_goes_to_a_version_that_never_ran() -> None:
    """Built twice while the service sleeps."""
    asleep = facts(target=0, counts={})
    state, _ = walk(V1, (0, asleep), (1, replace(asleep, offered="v3")))
    assert state == ServiceRollout(stable="v3", previous=("v1",), is_unproven=True)
    begun = ServiceRollout(stable="v2", rollout=in_phase(SETTLING).rollout, previous=("v1",), is_unproven=True)
    assert begun.rollout
    begun = replace(begun, rollout=replace(begun.rollout, to="v3"))
    ended = facts("v3", counts=counts(v3=(2, 2)))
    ran, _ = walk(begun, (1, facts("v3", counts=counts(v2=(1, 1), v3=(1, 1)))), (20, ended))
    assert ran.previous == ("v2", "v1"), "it has run together with the next one"
    assert walk(begun, (20, ended))[0].previous == ("v1",)


def test_one_failure_that_took_the_whole_startup_deadline_is_enough() -> None:
    seen = facts(
        counts=counts(v1=(2, 2), v2=(1, 0)), failures={"v2": FailureRecord(1, 61.0, "not ready 60 s after its start")}
    )
    assert walk(in_phase(STARTING), (59, seen))[1] == ["STARTING"]
    assert walk(in_phase(STARTING), (61, seen))[1] == ["ROLLING_BACK"]


def test_a_version_that_becomes_ready_at_its_second_try_stays() -> None:
    """Three tries are what it has until it is ready; what fails afterwards is held against it as ever."""
    once, twice = ({"v2": FailureRecord(count, 5.0, "download timed out")} for count in (1, 2))
    first = counts(v1=(2, 2), v2=(1, 1))
    state, phases = walk(
        in_phase(STARTING),
        (6, facts(failures=once)),
        (8, facts(counts=first, failures=once)),
        (17, facts(counts=first, failures=once)),
    )
    assert phases == ["STARTING", "BAKING", "BAKING"]
    assert walk(state, (18, facts(counts=first, failures=once)))[1] == ["ROLLING"]
    assert walk(state, (17, facts(counts=first, failures=twice)))[1] == ["ROLLING_BACK"]


@pytest.mark.parametrize("phase", [BAKING, ROLLING, SETTLING])
def test_a_replica_that_fails_after_it_was_ready_ends_the_rollout(phase: RolloutPhase) -> None:
    failures = {"v2": FailureRecord(1, 5.0, "ended by signal 11")}
    serving = counts(v1=(1, 1), v2=(1, 1))
    assert walk(in_phase(phase), (6, facts(counts=serving, failures=failures)))[1] == ["ROLLING_BACK"]
    both = {**failures, "v1": FailureRecord(1, 5.0, "ended by signal 11")}
    assert walk(in_phase(phase), (6, facts(counts=serving, failures=both)))[1] == [phase.value], (
        "the fault is elsewhere"
    )


@pytest.mark.parametrize(
    ("new", "old", "is_worse"),
    [
        (AnswerTally(400, 40), AnswerTally(1000, 2), True),
        (AnswerTally(2, 2), AnswerTally(1000, 0), True),
        (AnswerTally(1, 1), AnswerTally(100, 0), False),  # one request says nothing: one in 101
        (AnswerTally(1000, 60), AnswerTally(1000, 70), False),
        (AnswerTally(100_000, 500), AnswerTally(100_000, 100), False),  # no accident, but 0.4 %
        (AnswerTally(500, 500), AnswerTally(0, 0), False),  # nothing to compare with
    ],
)
def test_when_errors_are_no_accident(new: AnswerTally, old: AnswerTally, is_worse: bool) -> None:
    assert bool(worse(new, old)) is is_worse


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ({"failures": {"v2": FailureRecord(9, 5.0, "code 1")}}, "it does not become ready (9 tries); last: code 1"),
        ({"no_place": "it asks for 4 GPUs"}, "it does not fit for 60 s (startup.deadline_s): it asks for 4 GPUs"),
    ],
    ids=["fails", "no place"],
)
def test_without_auto_rollback_a_version_in_trouble_stays(trouble: dict[str, Any], words: str) -> None:
    rules = replace(RULES, spec=replace(RULES.spec, auto_rollback=False))
    state, phases = walk(in_phase(STARTING), (6, facts(**trouble)), (500, facts(**trouble)), rules=rules)
    assert phases == ["STARTING", "STARTING"]
    assert rollout.trouble_of(state, facts(**trouble), rules, 500) == words


def test_a_rejected_version_waits_until_an_operator_asks_for_it_or_the_files_change() -> None:
    rejected = replace(V1, rejected=Rejection("v2", "code 1", 5))
    assert walk(rejected, (6, facts()))[0] == rejected
    assert goal_version(rejected, "v2") == ("v1", None)
    assert walk(rejected, (6, facts("v3")))[1] == ["STARTING"]
    assert walk(rejected, (6, facts("v1")))[0] == V1
    again = rollout.retried(rejected, "v2", 7)
    assert walk(again, (7, facts()))[1] == ["STARTING"]


def test_more_replicas_than_fit_do_not_keep_a_rollout_from_its_end() -> None:
    full = facts(target=4, counts=counts(v2=(3, 3)))
    assert walk(in_phase(ROLLING), (1, full), (12, full))[1] == ["SETTLING", ""]
    starting = facts(target=4, counts=counts(v2=(4, 3)))
    assert walk(in_phase(ROLLING), (1, starting))[1] == ["ROLLING"]


def test_failures_of_an_earlier_attempt_do_not_count_in_the_next_one() -> None:
    rejected = replace(V1, rejected=Rejection("v2", "it crashed", 90))
    before = {"v2": FailureRecord(3, 89.0, "no such model")}
    state, phases = walk(rollout.retried(rejected, "v2", 100), (100, facts(failures=before)))
    assert phases == ["STARTING"]
    again = {"v2": FailureRecord(3, 102.0, "no such model")}
    there = counts(v1=(2, 2), v2=(1, 0))
    assert walk(state, (103, facts(counts=there, failures=again)))[1] == ["ROLLING_BACK"]


def test_an_abort_goes_back_and_rejects() -> None:
    state = rollout.aborted(in_phase(BAKING), 4)
    assert state
    assert state.rejected == Rejection("v2", "an operator asked for it", 4, is_asked=True)
    assert walk(state, (5, facts(counts=counts(v1=(2, 2)))))[1] == [""]
    assert rollout.aborted(V1, 4) is None
    assert rollout.aborted(state, 5) is None, "it is going back already"


def test_a_return_to_an_earlier_version_skips_the_bake_time_and_the_files_wait() -> None:
    at_v2 = ServiceRollout(stable="v2", previous=("v1",))
    state = rollout.returned(at_v2, "v1", "v2", 0)
    serving = counts(v2=(2, 2))
    state, phases = walk(
        state,
        (0, facts(counts=serving)),
        (1, facts(counts=counts(v1=(1, 1), v2=(2, 2)))),
        (11, facts(counts=counts(v1=(2, 2)))),
        (21, facts(counts=counts(v1=(2, 2)))),
        (99, facts(counts=counts(v1=(2, 2)))),
    )
    assert phases == ["STARTING", "ROLLING", "", "", ""]
    assert (state.stable, state.previous) == ("v1", ("v2",))
    assert state.rejected
    assert (state.rejected.version, state.rejected.is_asked) == ("v2", True)
    failed = replace(at_v2, rejected=Rejection("v3", "it crashed", 1))
    assert rollout.returned(failed, "v1", "v3", 2).rejected == failed.rejected, "why it failed is worth more"


def test_a_version_that_is_asked_for_now_does_not_bake_and_the_one_after_it_does() -> None:
    first, all_new = facts(counts=counts(v1=(2, 2), v2=(1, 1))), facts(counts=counts(v2=(2, 2)))
    asked = rollout.retried(V1, "v2", 0, is_watched=False)
    state, phases = walk(asked, (0, facts()), (1, first), (2, all_new))
    assert (phases, state) == (["STARTING", "ROLLING", ""], ServiceRollout(stable="v2", previous=("v1",)))
    baking = rollout.retried(in_phase(BAKING), "v2", 1, is_watched=False)
    after, phases = walk(baking, (1, first), (2, replace(first, offered="v3")), (3, replace(first, offered="v3")))
    assert phases == ["ROLLING", "STARTING", "STARTING"], "another save takes its place"
    third = facts("v3", counts=counts(v1=(2, 2), v3=(1, 1)))
    assert walk(after, (4, third))[1] == ["BAKING"], "nobody asked for that one"
    broken = replace(first, failures={"v2": FailureRecord(3, 5.0, "code 1")}, counts=counts(v1=(2, 2), v2=(1, 0)))
    back, phases = walk(asked, (0, facts()), (5, broken))
    assert (phases[-1], back.unwatched) == ("ROLLING_BACK", None), "what never becomes ready goes back"


def failing(count: int, **changes: Any) -> RolloutFacts:
    failures = {"v2": FailureRecord(count, 5.0, "code 137")} if count else {}
    return facts(counts=counts(v1=(1, 1), v2=(1, 1)), failures=failures, **changes)


def test_a_failure_together_with_others_is_excused_and_the_next_one_is_not() -> None:
    together = (6, failing(1, is_shared=True))
    assert walk(in_phase(ROLLING), together, (20, failing(1)))[1] == ["ROLLING"] * 2, "it stays excused"
    assert walk(in_phase(ROLLING), together, (20, failing(2)))[1] == ["ROLLING", "ROLLING_BACK"]
    assert walk(in_phase(ROLLING), together, (70, failing(0)), (80, failing(1)))[1][-1] == "ROLLING_BACK", (
        "it has recovered since: what fails then is another one"
    )
    assert walk(in_phase(ROLLING), (6, failing(3, is_shared=True)))[1] == ["ROLLING_BACK"], "but not forever"


NO_ROOM = "it asks for 4 GPUs and 0 of 4 are free"


@pytest.mark.parametrize("phase", [STARTING, ROLLING])
def test_a_version_that_finds_no_place_is_rolled_back_after_the_startup_deadline(phase: RolloutPhase) -> None:
    there = counts(v1=(2, 2)) if phase is STARTING else counts(v1=(1, 1), v2=(1, 1))
    stuck, moving = facts(counts=there, no_place=NO_ROOM), facts(counts=there)
    state, phases = walk(in_phase(phase), (10, stuck), (69, moving), (71, stuck), (130, stuck))
    assert phases == [phase.value] * 4, "progress restarts the time"
    assert state.rollout
    assert state.rollout.stuck_since == 71
    state, phases = walk(state, (131, stuck))
    assert phases == ["" if phase is STARTING else "ROLLING_BACK"]
    assert state.rejected
    assert state.rejected.reason == f"it does not fit for 60 s (startup.deadline_s): {NO_ROOM}"


def test_a_version_whose_later_replicas_haproxy_never_reaches_is_rolled_back_in_time() -> None:
    """More of the former version may not go then, so it would be forever."""
    there = {"v1": Count(3, 3), "v2": Count(2, 1, unreached=1)}
    missed, reached = facts(counts=there), facts(counts=counts(v1=(3, 3), v2=(2, 2)))
    state, phases = walk(in_phase(ROLLING), (10, missed), (69, reached), (71, missed), (130, missed), (131, missed))
    assert phases == ["ROLLING"] * 4 + ["ROLLING_BACK"]
    assert state.rejected
    assert state.rejected.reason == ("it is ready, and for 60 s (startup.deadline_s) HAProxy has not sent to all of it")


WHY = "shop.Ranker.rank(user): was removed; version v2 is incompatible with v1 during a rollout"
ALLOW = replace(RULES, spec=replace(RULES.spec, incompatible="allow"))
BOTH = counts(v1=(2, 2), v2=(1, 1))


def test_a_version_that_cannot_meet_the_running_one_is_not_begun() -> None:
    state, notes = advance(V1, facts(contracts={"v2": WHY}), RULES, 3)
    assert state == replace(V1, rejected=Rejection("v2", WHY, 3, is_refused=True))
    assert [(note.kind, note.message) for note in notes] == [("refused", f"v1 -> v2 is refused: {WHY}")]
    assert goal_version(state, "v2") == ("v1", None)
    assert rollout.barred(state, facts(), RULES) == {"v2": WHY}
    assert advance(state, facts(contracts={"v2": WHY}), RULES, 4) == (state, ()), "it is said once"
    assert rollout.rollout_words("ranker", state, facts(), RULES, 4) == f"version v2 is refused, v1 runs: {WHY}"


@pytest.mark.parametrize("phase", [WAITING, STARTING])
def test_a_version_waits_until_its_contract_is_known_and_serves_only_then(phase: RolloutPhase) -> None:
    unknown = facts(counts=BOTH, contracts={"v2": None}, waits_for="the image is read" if phase is WAITING else "")
    state, phases = walk(in_phase(phase), (1, unknown), (2, unknown))
    assert phases == [phase.value] * 2
    assert list(rollout.barred(state, unknown, RULES)) == ["v2"]
    met = facts(counts=BOTH, contracts={"v2": ""})
    state, phases = walk(state, (3, met))
    assert (phases, rollout.barred(state, met, RULES)) == (["BAKING"], {})


@pytest.mark.parametrize("auto_rollback", [True, False])
def test_the_first_replica_of_a_version_that_cannot_meet_ends_it(auto_rollback: bool) -> None:
    rules = replace(RULES, spec=replace(RULES.spec, auto_rollback=auto_rollback))
    unmet = facts(counts=BOTH, contracts={"v2": WHY})
    state, phases = walk(in_phase(STARTING), (1, unmet), rules=rules)
    assert (phases, state.rejected) == (["ROLLING_BACK"], Rejection("v2", WHY, 1, is_refused=True))
    assert rollout.barred(state, unmet, rules) == {"v2": WHY}
    asked = rollout.retried(state, "v2", 2)
    assert rollout.barred(asked, unmet, rules) == {"v2": WHY}, "its replicas have not left yet"
    left = facts(contracts={"v2": None})
    state, phases = walk(state, (3, left), (4, left), rules=rules)
    assert phases == ["", ""], "its contract is not known any more, and it stays refused"
    assert walk(rollout.retried(state, "v2", 5), (5, left), rules=rules)[1] == ["STARTING"]


@pytest.mark.parametrize(
    ("seen", "rules", "phase"),
    [
        (facts(contracts={"v2": WHY}), ALLOW, "STARTING"),
        (facts(contracts={"v2": ""}), RULES, "STARTING"),
        (facts(counts={}), RULES, ""),
    ],
    ids=["it is allowed", "they can meet now", "nothing else runs"],
)
def test_a_refused_version_follows_once_nothing_is_in_its_way(seen: RolloutFacts, rules: Rules, phase: str) -> None:
    refused = replace(V1, rejected=Rejection("v2", WHY, 1, is_refused=True))
    state, phases = walk(refused, (2, seen), rules=rules)
    assert phases == [phase]
    assert state.rejected is None
    assert rollout.barred(state, seen, rules) == {}
    assert phase or state.stable == "v2"


def test_an_earlier_version_that_cannot_meet_the_running_one_gets_no_request_while_it_leaves() -> None:
    """The files' version, which was rolled back, keeps its rejection, so the earlier one has none."""
    at_v2 = ServiceRollout(stable="v2", previous=("v1",), rejected=Rejection("v3", "it crashed", 1))
    unmet = facts("v3", counts=counts(v2=(2, 2), v1=(1, 1)), contracts={"v1": WHY})
    state, phases = walk(rollout.returned(at_v2, "v1", "v3", 2), (2, unmet))
    assert (phases, state.rejected) == (["ROLLING_BACK"], at_v2.rejected)
    assert rollout.barred(state, replace(unmet, contracts={}), RULES) == {"v1": WHY}


def test_a_version_that_serves_is_not_taken_away_for_its_contract() -> None:
    for phase in (BAKING, ROLLING):
        unmet = facts(counts=BOTH, contracts={"v2": WHY})
        state, phases = walk(in_phase(phase), (1, unmet))
        assert (phases, rollout.barred(state, unmet, RULES)) == ([phase.value], {})


def test_where_versions_wait_for_deploy_what_will_be_refused_is_said_before() -> None:
    manual = replace(RULES, is_manual=True)
    unmet = facts(contracts={"v2": WHY})
    assert advance(V1, unmet, manual, 1) == (V1, ())
    words = rollout.rollout_words("ranker", V1, unmet, manual, 1)
    assert words == f"v1 -> v2 waits for `pierhead deploy ranker`, which will refuse it: {WHY}"
    state, _ = advance(rollout.retried(V1, "v2", 2), unmet, manual, 2)
    assert state.rejected == Rejection("v2", WHY, 2, is_refused=True)


versions = st.sampled_from(["v1", "v2", "v3"])
tallies = st.builds(
    lambda answered, errors: AnswerTally(answered, min(answered, errors)), st.integers(0, 500), st.integers(0, 500)
)
anything = st.builds(
    RolloutFacts,
    target=st.integers(0, 4),
    offered=st.one_of(st.none(), versions),
    counts=st.dictionaries(versions, st.builds(lambda p, r: Count(p, min(p, r)), st.integers(0, 4), st.integers(0, 4))),
    failures=st.dictionaries(versions, st.builds(FailureRecord, st.integers(1, 5), st.floats(0, 100), st.just("x"))),
    tallies=st.dictionaries(versions, tallies),
    waits_for=st.sampled_from(["", "", "a callee goes first"]),
    no_place=st.sampled_from(["", "", NO_ROOM]),
    contracts=st.dictionaries(versions, st.sampled_from(["", "", WHY, None])),
    is_shared=st.booleans(),
)
asks = st.sampled_from(["", "", "", "retry", "now", "abort", "promote", "return"])


def check_contracts(
    before: ServiceRollout, after: ServiceRollout, seen: RolloutFacts, rules: Rules, *, is_promoted: bool
) -> None:
    """A version serves only once its contract was compared with that of the others, and they can meet."""
    going, was = after.rollout, before.rollout
    if going is None or going.phase is ROLLING_BACK:
        return
    why, serves = seen.contracts.get(going.to, ""), going.phase in rollout.SERVES_NEW
    if not serves and seen.others(going.to):
        assert not why, "an incompatible version does not stay in the rollout"
    if why is None:
        served = was is not None and was.phase in rollout.SERVES_NEW
        assert served or is_promoted or not serves, "it serves only once its contract was compared"
        assert serves or going.to in rollout.barred(after, seen, rules)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(anything, asks), max_size=25), st.booleans(), st.booleans())
def test_a_rollout_never_gets_stuck_and_never_loses_the_version_that_works(
    moments: list[tuple[RolloutFacts, str]], auto_rollback: bool, is_manual: bool
) -> None:
    rules = Rules(RolloutSpec(bake_s=2, auto_rollback=auto_rollback), 30, is_manual=is_manual)
    state, now = ServiceRollout(), 0.0
    for seen, ask in moments:
        now += 1
        before = state
        if ask in ("retry", "now"):
            state = rollout.retried(state, seen.offered, now, is_watched=ask == "retry")
        elif ask == "abort":
            state = rollout.aborted(state, now) or state
        elif ask == "promote":
            state = rollout.promoted(state, now) or state
        elif ask == "return" and state.stable:
            state = rollout.returned(state, "v1", seen.offered, now)
        state, _ = advance(state, seen, rules, now)
        rejection = before.rejection_of(seen.offered)
        is_rejected = rejection is not None and not rejection.is_refused
        waits = seen.offered if ask in ("", "abort", "promote") and is_rejected else None
        if waits and waits not in (before.rollout.to if before.rollout else None, before.stable, *before.previous):
            assert goal_version(state, seen.offered)[0] != waits, "a rolled back version returns only on request"
        assert before.stable is None or state.stable is not None, "what works is never forgotten"
        goal, keep = goal_version(state, seen.offered)
        check_contracts(before, state, seen, rules, is_promoted=ask == "promote")
        if state.rollout and state.rollout.phase in rollout.ON_TRIAL:
            assert keep == state.stable, "the version that works serves until the other has proved itself"
        if state.stable != before.stable and before.stable is not None:
            assert state.stable is not None
            alone = not seen.others(state.stable)
            proved = seen.ready(state.stable) or not seen.target or alone or state.stable in before.previous
            assert proved, "a version becomes stable only when it is ready, nothing else is there, or it was before"
        assert advance(state, seen, rules, now)[0] == state, "one look is enough for one moment"
        assert len(state.previous) <= rollout.PREVIOUS_KEPT
    # The world calms down: what is offered works, everything becomes ready.
    state = rollout.retried(state, "v3", now)
    for _ in range(20):
        now += 5
        goal, keep = goal_version(state, "v3")
        calm = RolloutFacts(2, "v3", {str(goal): Count(2, 2), **({keep: Count(2, 2)} if keep else {})})
        state, _ = advance(state, calm, rules, now)
    assert state.rollout is None
    assert state.stable == "v3"
