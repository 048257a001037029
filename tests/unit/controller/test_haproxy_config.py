"""The configuration's text: what it depends on, what it refuses, and that the image carries that of no services."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import RoutingError
from controller.model.spec import AutoscaleSpec, Backpressure, ProbeSpec, RolloutSpec, ServiceSpec
from controller.routing import haproxy_config as config
from controller.routing.haproxy_config import ServerLine
from controller.settings import EdgeLimits

WEB = ServiceSpec("web", "web", "http", 8080, 1, ProbeSpec(9100, "/readyz"), route="/web")
RANKER = ServiceSpec(
    "ranker", "ranker", "grpc", 50051, 2, ProbeSpec(9100, "/readyz"), grpc_services=("pierhead.recsys.v1.Ranker",)
)
INTERNAL = ServiceSpec("internal", "internal", "grpc", 50051, 2, ProbeSpec(9100, "/readyz"))


def section(text: str, name: str) -> list[str]:
    """Lines of one section, without indentation and comments."""
    lines = text.split(f"\n{name}\n", 1)[1].splitlines()
    end = next((n for n, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return [line.strip() for line in lines[:end] if line.strip() and not line.strip().startswith("#")]


def test_the_image_carries_the_configuration_of_no_services() -> None:
    baked_in = (config.TEMPLATE.parent / "haproxy.cfg").read_text()
    assert baked_in == config.render(()), (
        "render it anew: python -m controller.routing.haproxy_config > haproxy/haproxy.cfg"
    )


def test_every_error_page_is_json_and_every_page_named_exists() -> None:
    pages = config.TEMPLATE.parent / "errors"
    text = config.render([WEB, replace(WEB, name="b", max_queued_requests=0)], EdgeLimits(client_requests_per_s=1))
    named = set(re.findall(r"/errors/(\S+)", text))
    assert named == {page.name for page in pages.iterdir()}
    for page in pages.iterdir():
        error = json.loads(page.read_text())["error"]
        assert error.keys() == {"code", "message", "request_id"}


def test_only_routed_services_have_a_backend() -> None:
    text = config.render([WEB, RANKER, INTERNAL])
    assert re.findall(r"^backend svc_(\w+)$", text, re.MULTILINE) == ["ranker", "web"]


def test_the_hash_is_in_the_text_and_does_not_depend_on_order_or_servers() -> None:
    text = config.render([WEB, RANKER])
    assert config.hash_of(text) == config.routing_hash([RANKER, WEB])
    assert f"set-var proc.pierhead_routing str({config.hash_of(text)})" in text
    filled = config.with_servers(text, [ServerLine("svc_web", "web-1", "10.0.0.1:8080", 1)])
    assert config.hash_of(filled) == config.hash_of(text)
    assert config.hash_of("global\n") == ""


@pytest.mark.parametrize(
    "change",
    [
        {"route": "/other"},
        {"strip_prefix": True},
        {"max_ongoing_requests": 7},
        {"max_queued_requests": 7},
        {"backpressure": Backpressure(429)},
        {"backpressure": Backpressure(retry_after_s=7)},
        {"request_timeout_s": 7.0},
        {"body_timeout_s": 7.0},
        {"probe": ProbeSpec(9100, "/other")},
        {"probe": ProbeSpec(9101, "/readyz")},
        {"probe": ProbeSpec(9100, "/readyz", haproxy_asks=False)},
    ],
)
def test_the_hash_changes_with_what_the_backend_needs(change: dict[str, Any]) -> None:
    assert config.routing_hash([WEB]) != config.routing_hash([replace(WEB, **change)])


@pytest.mark.parametrize(
    "change", [{"replicas": 9}, {"image": "other"}, {"definition_hash": "x"}, {"graceful_shutdown_timeout_s": 9.0}]
)
def test_the_hash_does_not_change_with_anything_else(change: dict[str, Any]) -> None:
    assert config.routing_hash([WEB]) == config.routing_hash([replace(WEB, **change)])


def test_the_longest_prefix_is_asked_first() -> None:
    services = [replace(WEB, name=name, route=route) for name, route in (("r", "/"), ("a", "/a"), ("ab", "/a/b"))]
    rules = [line for line in section(config.render(services), "frontend http") if line.startswith("use_backend")]
    no_server = {name: f"{{ nbsrv(svc_{name}) le 1 }} {{ be_conn_free(svc_{name}) lt 0 }}" for name in ("ab", "a", "r")}
    assert rules == [
        f"use_backend hold_ab if {no_server['ab']} {{ path /a/b }} || {no_server['ab']} {{ path_beg /a/b/ }}",
        "use_backend svc_ab if { path /a/b } || { path_beg /a/b/ }",
        f"use_backend hold_a if {no_server['a']} {{ path /a }} || {no_server['a']} {{ path_beg /a/ }}",
        "use_backend svc_a if { path /a } || { path_beg /a/ }",
        f"use_backend hold_r if {no_server['r']} {{ path_beg / }}",
        "use_backend svc_r if { path_beg / }",
    ]


def test_every_server_has_every_option() -> None:
    assert " ".join(config.server_options(RANKER)) == (
        "check check-proto h1 port 9100 inter 500ms fastinter 150ms downinter 500ms fall 3 rise 1 "
        "observe layer4 error-limit 3 on-error mark-down maxconn 100 proto h2"
    )
    options = " ".join(config.server_options(RANKER))
    text = config.render([RANKER])
    assert f"\n    # servers: {options}\n" in text
    filled = config.with_servers(text, [ServerLine("svc_ranker", "ranker-1", "10.0.0.1:50051", 1)])
    assert f"server ranker-1 10.0.0.1:50051 id 1 {options}" in section(filled, "backend svc_ranker")


def test_a_queue_that_the_service_does_not_bound_is_bounded_by_haproxys_connections() -> None:
    (queue_full,) = [line for line in section(config.render([WEB]), "backend svc_web") if "queue-full.json" in line]
    assert queue_full.endswith(" hdr retry-after 1 if { queue ge 5000 }")
    fewer = section(config.render([RANKER], EdgeLimits(connections=100)), "backend svc_ranker")
    assert [line for line in fewer if "hdr grpc-status 8 " in line and line.endswith(" if { queue ge 50 }")]
    text = config.render([WEB], EdgeLimits(connections=100))
    assert "maxconn 100" in section(text, "frontend http")
    assert "maxconn 100" in section(text, "frontend grpc")


def test_one_client_address_is_bounded_only_where_the_operator_says_so() -> None:
    assert "stick-table" not in config.render([WEB])
    assert "stick-table" in config.render([WEB], EdgeLimits(client_connections=5))
    assert config.routing_hash([WEB]) != config.routing_hash([WEB], EdgeLimits(client_websockets=5))


def test_a_refusal_is_what_the_service_says() -> None:
    full = replace(WEB, max_queued_requests=5, backpressure=Backpressure(429, 1.5))
    backend = section(config.render([full]), "backend svc_web")
    (queue_full,) = [line for line in backend if "queue-full.json" in line]
    assert queue_full.startswith("http-request return status 429 ")
    assert " hdr retry-after 2 if " in queue_full
    assert "http-after-response set-status 429 if { status 503 } { txn.sess_term_state -m beg sQ }" in backend
    (waited,) = [line for line in backend if "/503.json" in line]
    assert waited.endswith("hdr retry-after 2")
    (nobody,) = [line for line in backend if "no-replica.json" in line]
    assert nobody.startswith("http-request return status 503 "), "that nobody is there is no backpressure"


def test_a_long_call_outlives_a_reload() -> None:
    assert "hard-stop-after 120s" in section(config.render([WEB]), "global")
    assert "hard-stop-after 905s" in section(config.render([replace(WEB, request_timeout_s=900.0)]), "global")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "web 5000 1000"),  # its only replica may have crashed
        ({"request_timeout_s": 2.0}, "web 2000 1000"),
        ({"autoscale": AutoscaleSpec(min=1, max=4)}, "web 5000 1000"),
        ({"autoscale": AutoscaleSpec(min=0, max=4)}, "web 60000 1000"),  # it is being woken
        ({"autoscale": AutoscaleSpec(min=0, max=4), "replicas": 0}, "web 60000 1000"),
        ({"max_queued_requests": 20}, "web 5000 120"),  # the first replica takes 100
        ({"max_queued_requests": 2000}, "web 5000 1000"),
    ],
)
def test_how_long_and_how_many_requests_wait_for_a_first_server(change: dict[str, Any], says: str) -> None:
    text = config.render([replace(WEB, **change)])
    (into,) = [line for line in section(text, "backend hold_web") if line.startswith("server self ")]
    assert f'set-proxy-v2-tlv-fmt(0xE0) "{says} 0"' in into
    (back,) = [line for line in section(text, "backend svc_web") if line.startswith("server hold ")]
    assert f'set-proxy-v2-tlv-fmt(0xE0) "{says} 1 %[var(txn.held_until)]"' in back


def test_a_service_that_the_files_give_no_replica_has_a_waiting_room_like_any() -> None:
    """Somebody may scale it up; while nobody has, the controller closes it."""
    assert section(config.render([replace(WEB, replicas=0)]), "backend hold_web") == section(
        config.render([WEB]), "backend hold_web"
    )


def test_who_is_not_let_into_the_waiting_room_is_told_so_and_logged() -> None:
    room = section(config.render([WEB]), "backend hold_web")
    (refusal,) = [line for line in room if "lua.waiting_room(svc_web) -m str closed" in line]
    assert "status 503" in refusal
    assert "hdr retry-after 10" in refusal, "when somebody will scale it up nobody knows, so not at once"
    assert room.index("http-request set-var(txn.service) str(web)") < room.index(refusal)
    assert room.index(refusal) < room.index("http-request set-log-level silent")


def test_what_was_held_may_still_take_its_whole_time() -> None:
    slow = replace(WEB, autoscale=AutoscaleSpec(min=0, max=1), request_timeout_s=300.0)
    text = config.render([slow])
    assert "timeout server 635000ms" in section(text, "backend hold_web"), "300 held, 30 in the queue, 300 + 5 in work"
    assert "timeout server 635000ms" in section(text, "backend held_again")
    assert "hard-stop-after 605s" in section(text, "global")


def test_servers_are_put_into_their_backends_and_replaced() -> None:
    text = config.render([WEB, RANKER])
    one = config.with_servers(
        text,
        [
            ServerLine("svc_web", "web-2", "10.0.0.2:8080", 2, disabled=True),
            ServerLine("svc_web", "web-1", "10.0.0.1:8080", 1),
            ServerLine("svc_ranker", "ranker-1", "[fd00::1]:50051", 1),
            ServerLine("svc_gone", "gone-1", "10.0.0.3:8080", 1),
        ],
    )
    web, ranker = (" ".join(config.server_options(spec)) for spec in (WEB, RANKER))
    assert section(one, "backend svc_web")[-2:] == [
        f"server web-1 10.0.0.1:8080 id 1 {web}",
        f"server web-2 10.0.0.2:8080 id 2 {web} disabled",
    ]
    assert section(one, "backend svc_ranker")[-1] == f"server ranker-1 [fd00::1]:50051 id 1 {ranker}"
    assert "gone-1" not in one
    assert section(one, "backend hold_web")[-1].startswith("server self 127.0.0.1:8405 send-proxy-v2 ")
    assert config.with_servers(one, []) == text


HOSTILE = st.text(min_size=1).filter(lambda text: not re.fullmatch(r"[A-Za-z0-9_./?&=%:@+,~-]+", text))
FIELDS: dict[str, Callable[[str], ServiceSpec]] = {
    "name": lambda text: replace(WEB, name=text),
    "route": lambda text: replace(WEB, route=f"/{text}"),
    "grpc service": lambda text: replace(RANKER, grpc_services=(text,)),
    "probe path": lambda text: replace(WEB, probe=ProbeSpec(9100, f"/{text}")),
    "protocol": lambda text: replace(WEB, protocol=text),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("field", FIELDS)
@given(text=HOSTILE)
def test_what_could_end_a_line_or_a_quote_is_refused(field: str, text: str) -> None:
    with pytest.raises(RoutingError):
        config.render([FIELDS[field](text)])


@given(text=HOSTILE)
def test_names_of_servers_and_backends_are_single_words(text: str) -> None:
    for check in (config.checked_server_name, config.checked_address, lambda t: config.checked_backend(f"svc_{t}")):
        with pytest.raises(RoutingError):
            check(text)


@pytest.mark.parametrize("name", ["_canary", "-1", ".hidden", "a:b", "x" * 300])
def test_a_server_that_somebody_added_by_hand_keeps_nobody_from_other_routes(name: str) -> None:
    """It is deleted, and until then it stands in the file: HAProxy takes each of these names."""
    text = config.with_servers(config.render([WEB]), [ServerLine("svc_web", name, "10.0.0.9:80", 1)])
    assert section(text, "backend svc_web")[-1].startswith(f"server {name} 10.0.0.9:80 id 1 ")


@pytest.mark.parametrize(
    "address", ["web:80", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", ":80", "10.0.0.1:8 0", "::1", ""]
)
def test_an_address_is_an_ip_and_a_port(address: str) -> None:
    with pytest.raises(RoutingError, match=r"expected <IP address>:<port>"):
        config.checked_address(address)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"max_ongoing_requests": 0},
            "max_ongoing_requests of service 'web': expected an integer from 1 to 1000000, found 0",
        ),
        ({"request_timeout_s": float("nan")}, "a duration of nan s"),
        ({"probe": ProbeSpec(0, "/")}, "probe port of service 'web': expected an integer from 1 to 65535, found 0"),
        ({"name": "a b"}, "service name 'a b' may not be put into HAProxy's configuration"),
    ],
)
def test_a_refusal_says_what_and_where(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RoutingError, match=re.escape(message)):
        config.render([replace(WEB, **change)])


def test_a_percent_sign_in_a_probe_path_is_no_log_format() -> None:
    text = config.render([replace(WEB, probe=ProbeSpec(9100, "/ready?x=%20"))])
    assert "http-check send meth GET uri /ready?x=%%20 ver HTTP/1.1 hdr host web" in section(text, "backend svc_web")


def test_a_check_that_asks_nothing_connects_to_where_requests_go() -> None:
    spec = replace(RANKER, probe=replace(RANKER.probe, haproxy_asks=False))
    options = " ".join(config.server_options(spec))
    assert options.startswith("check inter ")
    assert "rise 1 observe layer4" in options
    assert "http-check" not in (text := "\n".join(section(config.render([spec]), "backend svc_ranker")))
    assert "httpchk" not in text


def test_checks_that_go_to_the_port_of_requests_follow_each_server() -> None:
    """Replicas of before and after a change of the port are then each asked at their own."""
    foreign = replace(WEB, probe=replace(WEB.probe, port=WEB.port))
    assert " port " not in " ".join(config.server_options(foreign))


@pytest.mark.parametrize(
    ("policy", "lines"),
    [
        ("power_of_two", ["balance leastconn"]),
        ("least_ongoing", ["balance leastconn"]),
        ("round_robin", ["balance roundrobin"]),
        ("my.routing:Mine", ["balance leastconn"]),
        ("prefix", ["balance leastconn"]),
        ("engine_load", ["balance leastconn"]),
        (
            "consistent_hash",
            ["balance hdr(x-session-id)", "hash-type consistent crc32 avalanche", "hash-balance-factor 125"],
        ),
    ],
)
def test_the_edge_chooses_as_callers_do(policy: str, lines: list[str]) -> None:
    spec = replace(WEB, router_policy=policy)
    backend = config.render([spec]).partition(f"\nbackend svc_{WEB.name}\n")[2].partition("\nbackend ")[0]
    found = [line.strip() for line in backend.splitlines() if line.strip().startswith(("balance", "hash-"))]
    assert found == lines
    keeps_weights = policy in ("round_robin", "consistent_hash")
    tried = config.render([replace(spec, rollout=RolloutSpec(canary_weight=5))])
    assert ("balance random(2)" in tried) is not keeps_weights


def test_a_share_of_the_requests_needs_an_algorithm_that_keeps_it() -> None:
    tried = replace(WEB, rollout=RolloutSpec(canary_weight=5))
    assert "balance leastconn" in config.render([WEB])
    assert "balance random(2)" in config.render([tried])
    assert config.routing_hash([WEB]) != config.routing_hash([tried])
