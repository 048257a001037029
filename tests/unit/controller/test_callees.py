"""Who goes first when several services change at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.desired.deployer import all_callees, goes_before, order_of
from controller.model.world import ReplicaContainer
from tests.unit.controller.worlds import replica, service

CHAIN = {"ingress": frozenset({"ranker"}), "ranker": frozenset({"features"}), "features": frozenset[str]()}


def test_callees_of_callees_go_first_and_those_in_a_circle_by_name() -> None:
    assert all_callees("ingress", CHAIN) == {"ranker", "features"}
    assert goes_before("ingress", CHAIN) == ("features", "ranker")
    assert goes_before("features", CHAIN) == goes_before("unknown", CHAIN) == ()
    circle = {"a": frozenset({"b"}), "b": frozenset({"a"})}
    assert (goes_before("a", circle), goes_before("b", circle)) == ((), ("a",))


names = st.sampled_from("abcdef")


@given(st.dictionaries(names, st.frozensets(names, max_size=4), max_size=6))
def test_there_is_always_one_that_may_begin(direct: dict[str, frozenset[str]]) -> None:
    waiting = set("abcdef")
    while waiting:
        free = {name for name in waiting if not waiting & set(goes_before(name, direct))}
        assert free, f"{sorted(waiting)} wait for each other"
        waiting -= free


def made(*names: str, has_socket: bool) -> list[ReplicaContainer]:
    return [replica(service(name), 1, has_socket=has_socket) for name in names]


def test_callers_with_ports_alone_change_before_what_leaves_its_port() -> None:
    services = {name: service(name, has_socket=True) for name in CHAIN}
    turned = {"ingress": frozenset[str](), "ranker": frozenset({"ingress"}), "features": frozenset({"ranker"})}
    assert order_of(services, CHAIN, made(*CHAIN, has_socket=False)) == turned
    assert order_of(services, CHAIN, made(*CHAIN, has_socket=True)) == CHAIN
    assert order_of({name: service(name) for name in CHAIN}, CHAIN, made(*CHAIN, has_socket=False)) == CHAIN
    partly = made("ingress", has_socket=True) + made("ranker", "features", has_socket=False)
    assert order_of(services, CHAIN, partly)["ingress"] == {"ranker"}, "the ingress sees sockets, and ports"
