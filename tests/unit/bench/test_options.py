from __future__ import annotations

import pytest

from tests.bench.options import PARTS, OptionsError, read


def test_without_words_it_is_the_whole_run() -> None:
    options = read(["MODE=", "ROUNDS=", "ONLY="])
    assert (options.mode, options.rounds, options.seconds, options.peer) == ("processes", 3, 5, True)
    assert options.parts == frozenset(PARTS)
    assert options.apps == ("echo", "stream", "dlrm")


def test_a_later_word_wins_over_an_earlier_one() -> None:
    assert read(["MODE=processes", "MODE=containers"]).mode == "containers"
    assert read(["MODE=containers", "MODE="]).mode == "containers"


def test_quick_is_short_and_what_is_said_wins_over_it() -> None:
    quick = read(["QUICK=1"])
    assert (quick.rounds, quick.seconds) == (1, 2)
    assert "ablation" not in quick.parts
    said = read(["QUICK=1", "ROUNDS=2", "SECONDS=0.5", "ONLY=ablation"])
    assert (said.rounds, said.seconds, said.parts) == (2, 0.5, frozenset({"ablation"}))


def test_other_parts_alone_mean_all_applications() -> None:
    assert read(["ONLY=open"]).apps == ("echo", "stream", "dlrm")
    assert read(["ONLY=open, dlrm"]).apps == ("dlrm",)


def test_every_wrong_word_is_named() -> None:
    with pytest.raises(OptionsError) as error:
        read(["MODE=cluster", "ROUNDS=1.5", "ONLY=echo,eco", "PEER=no", "FAST=1"])
    assert str(error.value).splitlines() == [
        '"FAST=1": expected NAME=VALUE with one of MODE, ROUNDS, SECONDS, ONLY, QUICK, PEER, WATCH, DEVICE, OUT',
        'MODE: expected processes or containers, found "cluster"',
        'ROUNDS: expected a number from 1 to 99, found "1.5"',
        'ONLY: expected some of echo, stream, dlrm, open, limits, ablation, found "eco"',
        'PEER: expected 0 or 1, found "no"',
    ]
