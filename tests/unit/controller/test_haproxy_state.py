"""Reading what HAProxy 3.0 prints."""

from __future__ import annotations

import pytest

from controller.errors import RoutingError
from controller.model.world import HeldRequests, RoutingState, Server, ServerState
from controller.routing import haproxy_state as state

INFO = "Name: HAProxy\nVersion: 3.0.11-1+deb13u5\nPid: 11\nUptime: 0d 0h00m01s\nStart_time_sec: 1795251360\n"
ROUTING = "proc.pierhead_routing: type=str value=<365ab53adac48011>"
SERVERS = """1
# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight \
srv_time_since_last_change srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state \
bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord \
srv_use_ssl srv_check_port srv_check_addr srv_agent_addr srv_agent_port
7 svc_echo 7 two 127.0.0.1 0 0 1 1 3 15 3 3 6 0 0 1 - 18082 - 0 18081 - - 18081
7 svc_echo 1 one fd00::1 2 8 9 1 3 15 3 3 6 0 0 1 - 18081 - 0 18081 - - 18081
9 other 1 x 127.0.0.1 2 8 1 1 3 15 3 3 6 0 0 1 - 18081 - 0 18081 - - 18081
"""
STAT = """# pxname,svname,qcur,qmax,scur,smax,slim,status,hrsp_1xx,hrsp_2xx,hrsp_3xx,hrsp_4xx,hrsp_5xx,check_status,
svc_echo,one,0,0,3,9,7,DRAIN,1,10,2,3,4,L7OK,
svc_echo,two,1,0,,9,,DOWN,,,,,,,
svc_echo,BACKEND,4,0,3,9,,UP,1,10,2,3,4,,
svc_new,BACKEND,0,0,0,0,,DOWN,0,0,0,0,0,,
unknown_route,BACKEND,0,0,0,0,,UP,0,0,0,0,0,,
"""
KEYS = 'type=str, case=sensitive, found=yes, idx=tree, key="digest", value="0a1b2c3d4e5f6071", type="str"'
HELD = """# backend held served expired left refused closed
svc_new 12 100 1 2 3 1
svc_echo 1 0 0 0 0 0
"""


def test_the_traffic_of_a_worker_that_the_master_was_asked_for_and_of_one_that_has_gone() -> None:
    assert state.traffic(f"{STAT}\n") == state.traffic(STAT)
    for nothing in ("", "\n", "gone\n\n"):
        assert state.traffic(nothing) == {}


def test_a_snapshot() -> None:
    assert state.routing_state(INFO, ROUTING, KEYS, SERVERS, STAT, HELD) == RoutingState(
        pid=11,
        started_at=1795251360.0,
        version="3.0.11-1+deb13u5",
        routing_hash="365ab53adac48011",
        keys="0a1b2c3d4e5f6071",
        servers=(
            Server(
                "svc_echo",
                "one",
                "[fd00::1]:18081",
                ServerState.DRAIN,
                True,
                3,
                weight=9,
                answered=20,
                errors=4,
                limit=7,
            ),
            Server("svc_echo", "two", "127.0.0.1:18082", ServerState.READY, up=False, sessions=0, queued=1),
        ),
        backends=frozenset({"svc_echo", "svc_new"}),
        queued={"svc_echo": 4, "svc_new": 0},
        held={
            "svc_new": HeldRequests(now=12, served=100, expired=1, left=2, refused=3),
            "svc_echo": HeldRequests(now=1),
        },
        closed=frozenset({"svc_new"}),
    )


@pytest.mark.parametrize(
    ("check", "is_asked"), [("L7OK", True), ("L4OK", False), ("* L4OK", False), ("L4CON", True), ("INI", True)]
)
def test_whether_a_server_is_asked_or_only_takes_connections(check: str, is_asked: bool) -> None:
    assert state.traffic(STAT.replace("L7OK", check))["svc_echo", "one"].is_asked is is_asked


@pytest.mark.parametrize(
    ("expected", "bits"), [("ready", (0, 4)), ("maint", (1, 5, 0x20, 9)), ("drain", (8, 0x10))], ids=str
)
def test_administrative_states(expected: str, bits: tuple[int, ...]) -> None:
    for number in bits:
        (one, server_id), _ = state.servers(SERVERS.replace("fd00::1 2 8", f"fd00::1 2 {number}"), {})
        assert (one.state.value, server_id) == (expected, 1)


def test_a_variable_that_is_not_set_is_empty() -> None:
    assert state.variable("proc.pierhead_routing: undefined") == ""


def test_columns_are_found_by_name() -> None:
    header = "srv_port srv_name srv_id new be_name srv_uweight srv_addr srv_admin_state srv_op_state"
    text = f"1\n# {header}\n80 a 4 ? svc_x 1 10.0.0.1 0 2\n"
    assert state.servers(text, {}) == [(Server("svc_x", "a", "10.0.0.1:80", ServerState.READY, up=True), 4)]


@pytest.mark.parametrize("broken", range(4))
def test_what_is_not_haproxy_is_refused(broken: int) -> None:
    answers = [INFO, ROUTING, KEYS, SERVERS, STAT, HELD]
    answers[0 if broken == 0 else broken + 2] = "nonsense\n# nonsense\nnonsense\n"
    with pytest.raises(RoutingError, match=r"is this really HAProxy 3\.0 or newer"):
        state.routing_state(*answers)


@pytest.mark.parametrize("version", ["3.0.11-1+deb13u5", "3.1.0", "3.2.5", "3.2.17", "3.4.0", "3.5-dev5"])
def test_versions_that_can_be_used(version: str) -> None:
    assert state.refusal_of_version(version) is None


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.9.9", "is older than 3.0"),
        ("3.2.6", "may abort when servers of a leastconn backend come and go"),
        ("3.2.16-abc", "may abort"),
        ("3.3.1", "may abort"),
        ("what", "cannot be read"),
    ],
)
def test_versions_that_are_refused(version: str, words: str) -> None:
    assert words in (state.refusal_of_version(version) or "")
