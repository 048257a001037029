"""The lease under chance: controllers pause, calls are late or lost, clocks differ; never do two controllers act."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controller.swarm.state.lease import BEAT, EPOCH, HOLD_S, HOLDER, NOBODY, TAKE_S, UNKNOWN, Claim, StateLease

CONTROLLERS = 2
controllers = st.integers(0, CONTROLLERS - 1)


@dataclass
class Call:
    """A write on its way: it may be carried out long after its sender has given up waiting."""

    claim: Claim
    version: int
    sent_at: float
    outcome: bool | None = None


@dataclass
class Contender:
    """A controller with a clock of its own."""

    offset_s: float
    speed: float
    lives: int = 0
    lease: StateLease = field(init=False)
    read: tuple[Claim, int] | None = None
    """A read that has been answered by Swarm and has not arrived yet."""
    waits_for: Call | None = None

    def restart(self, name: str) -> None:
        self.lives += 1
        self.lease = StateLease(f"{name}.{self.lives}")
        self.forget_calls()

    def forget_calls(self) -> None:
        self.read = self.waits_for = None

    def clock(self, now: float) -> float:
        return self.offset_s + self.speed * now


class LeaseMachine(RuleBasedStateMachine):
    """Reads and writes are split into sending, carrying out and arriving, in any order and with any delay."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.claim, self.version = Claim(UNKNOWN, 0, 0), 10
        self.history = [(self.claim, self.version)]
        self.calls: list[Call] = []
        self.epochs: dict[int, str] = {}
        self.contenders: list[Contender] = []

    @initialize(
        offsets=st.lists(st.sampled_from([-120.0, 0.0, 120.0]), min_size=CONTROLLERS, max_size=CONTROLLERS),
        speeds=st.lists(st.sampled_from([0.95, 1.05]), min_size=CONTROLLERS, max_size=CONTROLLERS),
    )
    def start(self, offsets: list[float], speeds: list[float]) -> None:
        self.contenders = [Contender(offset, speed) for offset, speed in zip(offsets, speeds, strict=True)]
        for number, one in enumerate(self.contenders):
            one.restart(f"c{number}")
        for wait_s in (TAKE_S * 2, 0.0):
            self.all_goes_well(0)
            self.now += wait_s
        assert self.contenders[0].lease.acts(self.contenders[0].clock(self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, HOLD_S - 0.1, HOLD_S, TAKE_S, 60.0]))
    def time_passes(self, seconds: float) -> None:
        """During a pause of a controller nothing else happens to it."""
        self.now += seconds

    @rule(who=controllers, times=st.integers(1, 3))
    def next_steps(self, who: int, times: int) -> None:
        """Of four: Swarm answers a read, the answer arrives and a write is sent, Swarm carries it out, its answer
        arrives."""
        one = self.contenders[who]
        for _ in range(times):
            self._step(one)

    @rule(who=controllers, age=st.integers(1, 3))
    def an_old_answer(self, who: int, age: int) -> None:
        """Of a manager that was deposed and does not know it."""
        one = self.contenders[who]
        if one.read is None and one.waits_for is None:
            one.read = self.history[max(0, len(self.history) - 1 - age)]

    @rule(who=controllers)
    def an_answer_is_lost(self, who: int) -> None:
        """The write itself was carried out before, or will be later, or never."""
        self.contenders[who].waits_for = None

    @rule(which=st.integers(0, 20))
    def a_late_write_is_carried_out(self, which: int) -> None:
        pending = [call for call in self.calls if call.outcome is None]
        if pending:
            self._carry_out(pending[which % len(pending)])

    @rule(who=controllers)
    def all_goes_well(self, who: int) -> None:
        one = self.contenders[who]
        one.forget_calls()
        for _ in range(4):
            self._step(one)

    @rule(who=controllers)
    def a_controller_is_killed_and_started(self, who: int) -> None:
        self.contenders[who].restart(f"c{who}")

    @rule(who=controllers)
    def a_controller_ends_by_itself(self, who: int) -> None:
        one = self.contenders[who]
        one.lease.give_up()
        if self.claim.holder == one.lease.me:
            self._write(Claim(NOBODY, self.claim.epoch, self.claim.beat + 1))
        one.restart(f"c{who}")

    @invariant()
    def at_most_one_acts(self) -> None:
        acting = [one.lease for one in self.contenders if one.lease.acts(one.clock(self.now))]
        assert len(acting) <= 1, [lease.me for lease in acting]
        for lease in acting:
            assert self.epochs.setdefault(lease.epoch, lease.me) == lease.me, "an epoch has one holder"
            assert lease.epoch == max(self.epochs), "who acts has the greatest epoch that ever acted"

    def teardown(self) -> None:
        """When the trouble is over, some controller acts again."""
        if not self.contenders:
            return
        for _ in range(4):
            for who, one in enumerate(self.contenders):
                if one.lease.state(one.clock(self.now)) == "lost":
                    one.restart(f"c{who}")
                self.all_goes_well(who)
            self.at_most_one_acts()
            self.now += HOLD_S - 0.5
        for who in range(CONTROLLERS):
            self.all_goes_well(who)
        assert any(one.lease.acts(one.clock(self.now)) for one in self.contenders)

    def _step(self, one: Contender) -> None:
        if one.waits_for is not None:
            self._carry_out_or_answer(one, one.waits_for)
        elif one.read is not None:
            self._read_arrives(one)
        else:
            one.read = (self.claim, self.version)

    def _read_arrives(self, one: Contender) -> None:
        assert one.read is not None
        now = one.clock(self.now)
        claim, version = one.lease.next_claim(*one.read, now), one.read[1]
        one.read = None
        if claim is not None and one.lease.state(now) != "lost":
            one.waits_for = Call(claim, version, now)
            self.calls.append(one.waits_for)

    def _carry_out_or_answer(self, one: Contender, call: Call) -> None:
        if call.outcome is None:
            self._carry_out(call)
            return
        one.waits_for = None
        if call.outcome:
            one.lease.written(call.claim, call.sent_at)

    def _carry_out(self, call: Call) -> None:
        call.outcome = call.version == self.version
        if call.outcome:
            self._write(call.claim)

    def _write(self, claim: Claim) -> None:
        self.claim, self.version = claim, self.version + 1
        self.history.append((self.claim, self.version))


TestLease = LeaseMachine.TestCase
TestLease.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


def test_labels_that_a_person_has_broken_are_a_claim_of_nobody_known() -> None:
    """So the next controller waits, and takes the lease with an epoch that is greater than all before."""
    assert Claim.of({}) == Claim(UNKNOWN, 0, 0)
    assert Claim.of({HOLDER: "x", EPOCH: "-1", BEAT: "many"}) == Claim("x", 0, 0)
    assert Claim.of(Claim("x", 7, 3).labels()) == Claim("x", 7, 3)
    lease = StateLease("me")
    assert lease.next_claim(Claim.of({}), 40, 0.0) is None
    assert lease.next_claim(Claim.of({}), 40, TAKE_S) == Claim("me", 41, 0)
    assert lease.state(math.inf) == "seeking"


def test_a_holder_ends_when_it_reads_of_a_later_epoch_only() -> None:
    lease = StateLease("me")
    lease.written(Claim("me", 41, 0), 0.0)
    assert lease.next_claim(Claim("before", 30, 5), 40, 1.0) is None
    assert lease.state(1.0) == "acting", "an answer out of date"
    assert lease.state(HOLD_S) == "expired"
    assert lease.next_claim(Claim("me", 41, 0), 41, 60.0) == Claim("me", 41, 1), "nobody took over: it renews the lease"
    assert lease.next_claim(Claim("after", 43, 0), 43, 61.0) is None
    assert lease.state(61.0) == "lost"
