"""What replicas may not do by default, and the words by which they may."""

from __future__ import annotations

from typing import Any

import pytest

from controller.engines.privileges import KILLED_FIRST, MOST_PROCESSES, restrict

RAW = {"CapDrop": ["NET_RAW"]}
NONE_NEW = {"SecurityOpt": ["no-new-privileges=true"]}
MOST = {"PidsLimit": MOST_PROCESSES}
FIRST = {"OomScoreAdj": KILLED_FIRST}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, RAW | NONE_NEW | MOST),
        ({"PidsLimit": 5}, RAW | NONE_NEW | {"PidsLimit": 5}),
        ({"PidsLimit": -1}, RAW | NONE_NEW | {"PidsLimit": -1}),
        ({"CapAdd": ["NET_RAW"]}, {"CapAdd": ["NET_RAW"]} | NONE_NEW | MOST),
        ({"CapAdd": ["cap_net_raw"]}, {"CapAdd": ["cap_net_raw"]} | NONE_NEW | MOST),
        ({"CapAdd": ["ALL"]}, {"CapAdd": ["ALL"]} | NONE_NEW | MOST),
        ({"CapAdd": ["NET_ADMIN"]}, {"CapAdd": ["NET_ADMIN"]} | RAW | NONE_NEW | MOST),
        ({"CapDrop": ["ALL"]}, {"CapDrop": ["ALL"]} | NONE_NEW | MOST),
        ({"CapDrop": ["CHOWN"]}, {"CapDrop": ["CHOWN", "NET_RAW"]} | NONE_NEW | MOST),
        (
            {"SecurityOpt": ["seccomp=unconfined"]},
            {"SecurityOpt": ["seccomp=unconfined", *NONE_NEW["SecurityOpt"]]} | RAW | MOST,
        ),
        ({"SecurityOpt": ["no-new-privileges=false"]}, {"SecurityOpt": ["no-new-privileges=false"]} | RAW | MOST),
        ({"SecurityOpt": ["no-new-privileges"]}, {"SecurityOpt": ["no-new-privileges"]} | RAW | MOST),
        ({"Privileged": True}, {"Privileged": True} | MOST),
        ({"OomScoreAdj": 0}, {"OomScoreAdj": 0} | RAW | NONE_NEW | MOST),
    ],
)
def test_what_a_replica_may_not_do(said: dict[str, Any], expected: dict[str, Any]) -> None:
    host = dict(said)
    restrict(host)
    assert host == FIRST | expected
