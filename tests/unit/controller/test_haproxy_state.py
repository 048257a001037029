"""Reading what HAProxy 3.0 prints."""

from __future__ import annotations

import pytest

from controller.errors import RoutingError
from controller.model.world import Held, RoutingState, Server, ServerState
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
STAT = """# pxname,svname,qcur,qmax,scur,smax,status,hrsp_1xx,hrsp_2xx,hrsp_3xx,hrsp_4xx,hrsp_5xx,
svc_echo,one,0,0,3,9,DRAIN,1,10,2,3,4,
svc_echo,two,1,0,,9,DOWN,,,,,,
svc_echo,BACKEND,4,0,3,9,UP,1,10,2,3,4,
svc_new,BACKEND,0,0,0,0,DOWN,0,0,0,0,0,
unknown_route,BACKEND,0,0,0,0,UP,0,0,0,0,0,
"""
HELD = """# backend held served expired left refused
svc_new 12 100 1 2 3
"""


def test_waiting_rooms_that_are_closed() -> None:
    closed = "# backend held served expired left refused closed\nsvc_new 0 0 0 0 0 1\nsvc_echo 1 0 0 0 0 0\n"
    found = state.routing_state(INFO, ROUTING, SERVERS, STAT, closed)
    assert found.closed == {"svc_new"}
    assert found.held["svc_echo"] == Held(now=1)


def test_the_traffic_of_a_worker_that_the_master_was_asked_for_and_of_one_that_has_gone() -> None:
    assert state.traffic(f"{STAT}\n") == state.traffic(STAT)
    for nothing in ("", "\n", "gone\n\n"):
        assert state.traffic(nothing) == {}


def test_a_snapshot() -> None:
    assert state.routing_state(INFO, ROUTING, SERVERS, STAT, HELD) == RoutingState(
        pid=11,
        started_at=1795251360.0,
        version="3.0.11-1+deb13u5",
        routing_hash="365ab53adac48011",
        servers=(
            Server(
                "svc_echo",
                "one",
                "[fd00::1]:18081",
                ServerState.DRAIN,
                up=True,
                sessions=3,
                weight=9,
                answered=20,
                errors=4,
            ),
            Server("svc_echo", "two", "127.0.0.1:18082", ServerState.READY, up=False, sessions=0, queued=1),
        ),
        backends=frozenset({"svc_echo", "svc_new"}),
        queued={"svc_echo": 4, "svc_new": 0},
        held={"svc_new": Held(now=12, served=100, expired=1, left=2, refused=3)},
    )


@pytest.mark.parametrize(
    ("check", "is_asked"), [("L7OK", True), ("L4OK", False), ("* L4OK", False), ("L4CON", True), ("INI", True)]
)
def test_whether_a_server_is_asked_or_only_takes_connections(check: str, is_asked: bool) -> None:
    stat = f"# pxname,svname,qcur,scur,check_status,\nsvc_echo,one,0,0,{check},\n"
    assert state.traffic(stat)["svc_echo", "one"].is_asked is is_asked


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0, "ready"),
        (4, "ready"),
        (1, "maint"),
        (5, "maint"),
        (0x20, "maint"),
        (8, "drain"),
        (0x10, "drain"),
        (9, "maint"),
    ],
)
def test_administrative_states(bits: int, expected: str) -> None:
    text = SERVERS.replace("fd00::1 2 8", f"fd00::1 2 {bits}")
    (one, number), _ = state.servers(text, {})
    assert (one.state.value, number) == (expected, 1)


def test_columns_are_found_by_name() -> None:
    text = (
        "1\n# srv_port srv_name srv_id new be_name srv_addr srv_admin_state srv_op_state\n80 a 4 ? svc_x 10.0.0.1 0 2\n"
    )
    assert state.servers(text, {}) == [(Server("svc_x", "a", "10.0.0.1:80", ServerState.READY, up=True), 4)]


def test_a_variable_that_is_not_set() -> None:
    assert state.variable("proc.pierhead_routing: undefined") == ""


@pytest.mark.parametrize("broken", range(4))
def test_what_is_not_haproxy_is_refused(broken: int) -> None:
    answers = [INFO, ROUTING, SERVERS, STAT, HELD]
    answers[0 if broken == 0 else broken + 1] = "nonsense\n# nonsense\nnonsense\n"
    with pytest.raises(RoutingError, match=r"is this really HAProxy 3\.0 or newer"):
        state.routing_state(*answers)


@pytest.mark.parametrize(
    ("version", "usable"),
    [
        ("3.0.11-1+deb13u5", True),
        ("3.1.0", True),
        ("3.2.5", True),
        ("3.2.6", False),
        ("3.2.16-abc", False),
        ("3.2.17", True),
        ("3.3.1", False),
        ("3.4.0", True),
        ("3.5-dev5", True),
        ("2.9.9", False),
        ("what", False),
    ],
)
def test_versions(version: str, usable: bool) -> None:
    assert (state.refusal_of_version(version) is None) is usable
