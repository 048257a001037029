"""The configuration's text: what it depends on, what it refuses, and that the image carries that of no services."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import RoutingError
from controller.model.spec import AccessLog, AutoscaleSpec, BackpressureAnswer, ProbeSpec, RolloutSpec, ServiceSpec
from controller.routing import haproxy_config as config
from controller.routing import haproxy_text as text_of
from controller.routing.haproxy_text import ServerLine, hash_of, with_servers
from controller.routing.haproxy_tokens import Tokens, checked
from controller.settings import CLAIM, DEFAULT_LIMITS, EdgeLimits, TokenRules

WEB = ServiceSpec("web", "web", "http", 8080, 1, ProbeSpec(9100, "/readyz"), route="/web")
RANKER = ServiceSpec(
    "ranker", "ranker", "grpc", 50051, 2, ProbeSpec(9100, "/readyz"), grpc_services=("services.recsys.app.Ranker",)
)
TLS = config.Tls(f"/run/haproxy/tls/{'a' * 16}", 8443)
TOKENS = Tokens(TokenRules(), f"/run/haproxy/jwt/{'a' * 16}", ("1.pem", "2.pem"))
INTERNAL = ServiceSpec("internal", "internal", "grpc", 50051, 2, ProbeSpec(9100, "/readyz"))


def routing_hash(services: Collection[ServiceSpec], limits: EdgeLimits = DEFAULT_LIMITS) -> str:
    return hash_of(config.render(services, limits))


def section(text: str, name: str) -> list[str]:
    """Lines of one section, without indentation and comments."""
    lines = text.split(f"\n{name}\n", 1)[1].splitlines()
    end = next((n for n, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return [line.strip() for line in lines[:end] if line.strip() and not line.strip().startswith("#")]


@pytest.mark.parametrize("is_remote", [False, True])
def test_the_image_carries_the_configuration_of_no_services(is_remote: bool) -> None:
    baked_in = (config.TEMPLATE.parent / ("edge.cfg" if is_remote else "haproxy.cfg")).read_text()
    assert baked_in == config.render((), is_remote=is_remote), (
        "render it again: python -m controller.routing.haproxy_config"
    )


def test_other_certificates_are_another_configuration_and_without_them_there_is_no_word_of_tls() -> None:
    plain = config.render([WEB])
    assert not re.search("ssl|https|8443", plain)
    other_tls = TLS._replace(certificates=f"/run/haproxy/tls/{'b' * 16}")
    one, other = (config.render([WEB], tls=tls) for tls in (TLS, other_tls))
    assert len({hash_of(plain), hash_of(one), hash_of(other)}) == 3
    binds = [line.strip() for line in one.splitlines() if line.startswith("    bind :")]
    words = f"ssl crt /run/haproxy/tls/{'a' * 16} alpn"
    assert [bind for bind in binds if "ssl" in bind] == [
        f"bind :8443 {words} h2,http/1.1 ssl-min-ver TLSv1.2",
        f"bind :9000 proto h2 {words} h2 ssl-min-ver TLSv1.2",
    ]
    for wrong in ("../../etc", "/etc", "/run/haproxy/tls/../jwt", "/run/secrets"):
        with pytest.raises(RoutingError, match="directory of certificates"):
            config.render([WEB], tls=TLS._replace(certificates=wrong))


def test_an_edge_of_a_swarm_has_the_operators_files_as_secrets() -> None:
    asking = [replace(WEB, auth="jwt")]
    tls, tokens = config.Tls("/run/secrets/tls", 8443), Tokens(TokenRules(), "/run/secrets/jwt", ("0a.pem",))
    text = config.render(asking, is_remote=True, tls=tls, tokens=tokens)
    binds = [line.split() for line in text.splitlines() if line.startswith(("    bind :8443", "    bind :9000"))]
    assert [bind[bind.index("crt") + 1] for bind in binds] == ["/run/secrets/tls"] * 2
    assert all({"tcp-ut", "60s"} <= set(bind) for bind in binds), "a client that is off is noticed at HTTPS as well"
    assert 'jwt_verify("RS256","/run/secrets/jwt/0a.pem") eq 1' in text


def test_what_an_acme_server_asks_is_answered_before_http_leads_to_https() -> None:
    path = "/.well-known/acme-challenge/"
    lines = section(config.render([WEB], tls=TLS._replace(acme="t" * 43)), "frontend http")
    (answer,) = (number for number, line in enumerate(lines) if "acme-challenge" in line)
    (redirect,) = (number for number, line in enumerate(lines) if line.startswith("http-request redirect"))
    assert answer < redirect
    assert (
        f'"%[path,field(4,/)].{"t" * 43}" if {{ path -m reg ^/[.]{path[2:]}[A-Za-z0-9_-]{{1,128}}$ }}' in lines[answer]
    )
    for others in (config.render([WEB]), config.render([WEB], tls=TLS)):
        assert "acme" not in others
    for wrong in ("t" * 42, "t" * 42 + '"', "t" * 42 + "\n"):
        with pytest.raises(RoutingError, match="thumbprint of an ACME account"):
            config.render([WEB], tls=TLS._replace(acme=wrong))


def test_tokens_are_judged_by_the_public_keys_and_rules_and_only_where_a_service_asks_for_one() -> None:
    asking = [replace(WEB, auth="jwt"), replace(RANKER, auth="jwt")]
    changes: list[dict[str, Any]] = [
        {},
        {"directory": f"/run/haproxy/jwt/{'b' * 16}"},
        {"files": ("1.pem",)},
        {"files": ()},
        *({"rules": rules} for rules in (TokenRules("PS256"), TokenRules(issuer="a"), TokenRules(audience="a"))),
    ]
    hashes = {hash_of(config.render(asking, tokens=TOKENS._replace(**change))) for change in changes}
    assert len(hashes) == len(changes)
    assert len({hash_of(config.render([WEB], tokens=TOKENS._replace(**change))) for change in changes}) == 1
    for backend in ("hold_web", "svc_web", "hold_ranker", "svc_ranker"):
        lines = section(config.render(asking, tokens=TOKENS), f"backend {backend}")
        assert [line for line in lines if line.startswith("acl signed")] == [
            f'acl signed var(txn.token),jwt_verify("RS256","/run/haproxy/jwt/{"a" * 16}/{file}") eq 1'
            for file in ("1.pem", "2.pem")
        ]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"directory": "../tls"}, "directory of public keys"),
        ({"files": ("../1.pem",)}, "public key"),
        ({"files": ('1.pem")',)}, "public key"),
        ({"rules": TokenRules("HS256")}, "algorithm of tokens"),
        ({"rules": TokenRules("none")}, "algorithm of tokens"),
        ({"rules": TokenRules(issuer="a'")}, "issuer of tokens"),
        ({"rules": TokenRules(audience="a\n")}, "audience of tokens"),
    ],
)
def test_what_may_be_said_of_tokens(change: dict[str, Any], what: str) -> None:
    with pytest.raises(RoutingError, match=f"^{what} "):
        config.render([WEB], tokens=TOKENS._replace(**change))


@given(st.from_regex(CLAIM, fullmatch=True), st.from_regex(CLAIM, fullmatch=True))
def test_an_audience_is_found_in_a_list_and_no_other_one(audience: str, other: str) -> None:
    pattern = checked(TOKENS._replace(rules=TokenRules(audience=audience)))["in_a_list"].replace("[[:space:]]", r"\s")
    for those in ([audience], ["x", audience], [audience, other], [other, "x", audience]):
        for separators in ((",", ":"), (" , ", ":")):
            assert re.search(pattern, json.dumps(those, separators=separators))
    others: list[list[Any]] = [
        [],
        [f"{audience}x"],
        [f"x{audience}"],
        [f'x","{audience}","x'],
        [f"{audience}\n"],
        [other],
    ]
    for those in others:
        assert other == audience or not re.search(pattern, json.dumps(those))


def test_an_edge_without_routes_is_not_healthy_so_that_balancers_leave_it_out() -> None:
    for services, status in (([], 503), ([RANKER], 200), ([WEB], 503)):
        lines = section(config.render(services, is_remote=True), "frontend http")
        last = [line for line in lines if line.startswith("http-request return") and "/-/healthz" in line][-1]
        assert f"return status {status} " in last


def test_an_edge_that_leaves_says_so_before_all_else_and_the_only_haproxy_never_does() -> None:
    for services in ([], [RANKER], [WEB]):
        lines = section(config.render(services, is_remote=True), "frontend http")
        first = next(line for line in lines if line.startswith("http-request return") and "/-/healthz" in line)
        assert " status 503 " in first
        assert first.endswith("{ path /-/healthz } { var(proc.pierhead_leaving) -m int 1 }")
        assert "leaving" not in config.render(services)


@pytest.mark.parametrize("frontend", ["frontend http", "frontend grpc"])
def test_what_clients_say_of_themselves_is_removed_except_from_trusted_proxies(frontend: str) -> None:
    removed = ["x-forwarded- -m beg", "x_forwarded_ -m beg", "forwarded", "x-real-ip", "x_real_ip"]
    lines = section(config.render([WEB]), frontend)
    first = lines.index("http-request del-header x-forwarded- -m beg")
    assert lines[first : first + len(removed)] == [f"http-request del-header {header}" for header in removed]
    trusting = EdgeLimits(trusted_proxies=("10.1.2.3/32", "2001:db8::/32"))
    assert section(config.render([WEB], trusting), frontend)[first : first + 7] == [
        "acl from_trusted_proxy src 10.1.2.3/32",
        "acl from_trusted_proxy src 2001:db8::/32",
        *(f"http-request del-header {header} unless from_trusted_proxy" for header in removed),
    ]
    assert routing_hash([WEB], trusting) != routing_hash([WEB])
    assert not [line for line in section(config.render([WEB]), "frontend held") if "del-header" in line], (
        "what HAProxy wrote stays in the second pass"
    )


@pytest.mark.parametrize("network", ["10.0.0.0/8\n    http-request deny", "any", "10.0.0.0/8 or"])
def test_only_networks_are_put_into_the_list_of_trusted_proxies(network: str) -> None:
    with pytest.raises(RoutingError, match="network of trusted proxies"):
        config.render([WEB], EdgeLimits(trusted_proxies=(network,)))


def test_every_error_page_is_json_and_every_page_named_exists() -> None:
    pages = config.TEMPLATE.parent / "errors"
    services = [
        replace(WEB, auth="jwt"),
        replace(WEB, name="b", max_queued_requests=0, auth="key", allow=("10.0.0.0/8",)),
    ]
    limits = EdgeLimits(client_requests_per_s=1)
    text = config.render(services, limits, is_remote=True) + config.render(services, limits, tokens=TOKENS)
    named = set(re.findall(r"/errors/(\S+)", text))
    assert named == {page.name for page in pages.iterdir()}
    for page in pages.iterdir():
        error = json.loads(page.read_text())["error"]
        of_models = {"type", "param"} if page.name.startswith(("key", "token")) else set()
        assert error.keys() == {"code", "message", "request_id"} | of_models


def test_the_hash_is_in_the_text_and_does_not_depend_on_order_or_servers() -> None:
    text = config.render([WEB, RANKER])
    assert hash_of(text) == routing_hash([RANKER, WEB])
    assert f"set-var proc.pierhead_routing str({hash_of(text)})" in text
    filled = with_servers(text, [ServerLine("svc_web", "web-1", "10.0.0.1:8080", 1)])
    assert hash_of(filled) == hash_of(text)
    assert hash_of("global\n") == ""


BACKEND_CHANGES: list[dict[str, Any]] = [
    {"auth": "key"},
    {"auth": "jwt"},
    {"allow": ("10.0.0.0/8",)},
    {"host": "shop.example"},
    {"route": "/other"},
    {"strip_prefix": True},
    {"max_ongoing_requests": 7},
    {"max_queued_requests": 7},
    {"backpressure": BackpressureAnswer(429)},
    {"backpressure": BackpressureAnswer(retry_after_s=7)},
    {"request_timeout_s": 7.0},
    {"body_timeout_s": 7.0},
    {"streams_requests": True},
    {"probe": ProbeSpec(9100, "/other")},
    {"probe": ProbeSpec(9101, "/readyz")},
    {"probe": ProbeSpec(9100, "/readyz", haproxy_asks=False)},
    {"rollout": RolloutSpec(canary_weight=5)},
    {"replica_header": True},
    {"access_log": AccessLog("off")},
    {"access_log": AccessLog(sample=0.5)},
    {"access_log": AccessLog(slow_request_s=2.0)},
]
OTHER_CHANGES: list[dict[str, Any]] = [
    {"access_log": AccessLog("all")},  # the replicas log them
    {"replicas": 9},
    {"image": "other"},
    {"definition_hash": "x"},
    {"graceful_shutdown_timeout_s": 9.0},
]


def test_the_hash_changes_with_what_the_backend_needs_and_with_nothing_else() -> None:
    hashes = {routing_hash([replace(WEB, **change)]) for change in BACKEND_CHANGES}
    assert len({*hashes, routing_hash([WEB])}) == len(BACKEND_CHANGES) + 1, "each has its own"
    assert {routing_hash([replace(WEB, **change)]) for change in OTHER_CHANGES} == {routing_hash([WEB])}
    assert routing_hash([WEB]) != routing_hash([WEB], EdgeLimits(client_websockets=5))
    assert routing_hash([WEB]) == routing_hash([WEB, INTERNAL]), "HAProxy sends nothing to it"


OBSERVED = "fall 3 rise 1 observe layer4 error-limit 3 on-error mark-down maxconn 100"
INTERVALS = "inter 500ms fastinter 150ms downinter 500ms"


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (RANKER, f"check check-proto h1 port 9100 {INTERVALS} {OBSERVED} proto h2"),
        (replace(RANKER, probe=replace(RANKER.probe, haproxy_asks=False)), f"check {INTERVALS} {OBSERVED} proto h2"),
        (replace(WEB, probe=replace(WEB.probe, port=WEB.port)), f"check check-proto h1 {INTERVALS} {OBSERVED}"),
    ],
    ids=["at the probe's port", "a connection suffices", "at the port of each replica's requests"],
)
def test_how_haproxy_checks_a_server(spec: ServiceSpec, options: str) -> None:
    assert " ".join(config.server_options(spec)) == options
    backend = section(config.render([spec]), f"backend svc_{spec.name}")
    assert any("httpchk" in line for line in backend) is spec.probe.haproxy_asks


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize(
    ("where", "begins", "names"),
    [
        ("frontend http", "http-request return status 200 content-type application/json string '{\"/", "/web web"),
        ("backend unknown_route", "http-request return status 404", "/web web"),
        ("backend unknown_grpc_service", "http-request return", "p.A p.B"),
        ("backend unknown_application_p.A", "http-request return", "eu us"),
    ],
)
def test_clients_learn_what_there_is_only_where_the_operator_says_so(
    where: str, begins: str, names: str, shown: bool
) -> None:
    services = [
        replace(RANKER, application="eu", grpc_services=("p.A", "p.B")),
        replace(RANKER, name="other", application="us", grpc_services=("p.A",)),
        replace(WEB, name="web", route="/web"),
    ]
    lines = section(config.render(services, EdgeLimits(shows_routes=shown)), where)
    told = "\n".join(line for line in lines if line.startswith(begins))
    assert [bool(re.search(rf"(?<![\w/]){name}\b", told)) for name in names.split()] == [shown] * 2, told


def test_the_application_counts_only_where_several_services_have_the_grpc_service() -> None:
    alone = replace(RANKER, application="eu", grpc_services=("p.A",))
    assert "req.fhdr(application)" not in config.render([alone])
    both = [replace(alone, grpc_services=("p.A", "p.B")), replace(alone, name="other", application="us")]
    lines = section(config.render(both), "frontend grpc")
    assert [line for line in lines if line.startswith("use_backend svc_")] == [
        "use_backend svc_other if { path_beg /p.A/ } { req.fhdr(application) -m str us }",
        "use_backend svc_ranker if { path_beg /p.A/ } { req.fhdr(application) -m str eu }",
        "use_backend svc_ranker if { path_beg /p.B/ }",
    ]
    assert lines[-2:] == [
        "use_backend unknown_application_p.A if { path_beg /p.A/ }",
        "default_backend unknown_grpc_service",
    ]
    assert routing_hash([alone]) == routing_hash([replace(alone, application="us")])


def test_no_line_has_more_words_than_haproxy_takes() -> None:
    many = [replace(RANKER, name=f"ranker-{number}", application=f"shop-{number}") for number in range(100)]
    many += [replace(WEB, name=f"web-{number}", route=f"/web-{number}") for number in range(100)]
    networks = tuple(f"10.0.{number}.0/24" for number in range(100))
    many += [replace(one, name=f"{one.name}-for-some", allow=networks) for one in (many[0], many[-1])]
    longest = max(config.render(many).splitlines(), key=lambda line: len(shlex.split(line, comments=True)))
    assert len(shlex.split(longest, comments=True)) <= 64, longest


def test_a_percent_sign_in_a_probe_path_is_no_log_format() -> None:
    text = config.render([replace(WEB, probe=ProbeSpec(9100, "/ready?x=%20"))])
    assert "http-check send meth GET uri /ready?x=%%20 ver HTTP/1.1 hdr host web" in section(text, "backend svc_web")


def test_a_service_without_a_replica_is_answered_503_whatever_its_backpressure_says() -> None:
    backend = section(config.render([replace(WEB, backpressure=BackpressureAnswer(429, 1.5))]), "backend svc_web")
    (no_replica,) = [line for line in backend if "no-replica.json" in line]
    assert no_replica.startswith("http-request return status 503 ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "web 5000 1000"),  # its only replica may have crashed
        ({"request_timeout_s": 2.0}, "web 2000 1000"),
        ({"autoscale": AutoscaleSpec(min=1, max=4)}, "web 5000 1000"),
        ({"autoscale": AutoscaleSpec(min=0, max=4)}, "web 60000 1000"),  # it is being woken
        ({"autoscale": AutoscaleSpec(min=0, max=4), "replicas": 0}, "web 60000 1000"),
        ({"replicas": 0}, "web 5000 1000"),  # until an operator scales it up the controller closes the room
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


def test_old_workers_and_held_requests_have_the_time_of_the_longest_call() -> None:
    assert "hard-stop-after 120s" in section(config.render([WEB]), "global")
    assert "hard-stop-after 905s" in section(config.render([replace(WEB, request_timeout_s=900.0)]), "global")
    slow = replace(WEB, autoscale=AutoscaleSpec(min=0, max=1), request_timeout_s=300.0)
    text = config.render([slow])
    assert "timeout server 635000ms" in section(text, "backend hold_web"), "300 held, 30 in the queue, 300 + 5 in work"
    assert "timeout server 635000ms" in section(text, "backend held_again")
    assert "hard-stop-after 605s" in section(text, "global")


def test_servers_are_put_into_their_backends_and_replaced() -> None:
    text = config.render([WEB, RANKER])
    one = with_servers(
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
    assert with_servers(one, []) == text


HOSTILE = st.text(min_size=1).filter(lambda text: not re.fullmatch(r"[A-Za-z0-9_./?&=%:@+,~-]+", text))
FIELDS: dict[str, Callable[[str], ServiceSpec]] = {
    "name": lambda text: replace(WEB, name=text),
    "route": lambda text: replace(WEB, route=f"/{text}"),
    "grpc service": lambda text: replace(RANKER, grpc_services=(text,)),
    "application": lambda text: replace(RANKER, application=text),
    "probe path": lambda text: replace(WEB, probe=ProbeSpec(9100, f"/{text}")),
}


@pytest.mark.parametrize("field", FIELDS)
@given(text=HOSTILE)
def test_what_could_end_a_line_or_a_quote_is_refused(field: str, text: str) -> None:
    with pytest.raises(RoutingError):
        config.render([FIELDS[field](text)])


@given(text=HOSTILE)
def test_names_of_servers_and_backends_are_single_words(text: str) -> None:
    for check in (text_of.checked_server_name, text_of.checked_address, lambda t: text_of.checked_backend(f"svc_{t}")):
        with pytest.raises(RoutingError):
            check(text)


@pytest.mark.parametrize("name", ["_canary", "-1", ".hidden", "a:b", "x" * 300])
def test_a_server_that_somebody_added_by_hand_keeps_nobody_from_other_routes(name: str) -> None:
    """It is deleted, and until then it stands in the file: HAProxy takes each of these names."""
    text = with_servers(config.render([WEB]), [ServerLine("svc_web", name, "10.0.0.9:80", 1)])
    assert section(text, "backend svc_web")[-1].startswith(f"server {name} 10.0.0.9:80 id 1 ")


@pytest.mark.parametrize(
    "address", ["web:80", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", ":80", "10.0.0.1:8 0", "::1", ""]
)
def test_an_address_is_an_ip_and_a_port(address: str) -> None:
    with pytest.raises(RoutingError, match=r"expected <IP address>:<port>"):
        text_of.checked_address(address)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_timeout_s": float("nan")}, "a duration of nan s"),
        ({"name": "a b"}, "service name 'a b' may not be put into HAProxy's configuration"),
    ],
)
def test_a_refusal_says_what_and_where(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RoutingError, match=re.escape(message)):
        config.render([replace(WEB, **change)])


@pytest.mark.parametrize(
    ("policy", "balance", "with_canary_weight"),
    [
        *((policy, "leastconn", "random(2)") for policy in ("power_of_two", "least_ongoing", "prefix", "my.own:Mine")),
        ("round_robin", "roundrobin", "roundrobin"),
        ("consistent_hash", "hdr(x-session-id)", "hdr(x-session-id)"),
    ],
)
def test_haproxy_chooses_as_callers_do_with_canaries(policy: str, balance: str, with_canary_weight: str) -> None:
    spec = replace(WEB, router_policy=policy)
    canary = replace(spec, rollout=RolloutSpec(canary_weight=5))
    for one, wanted in ((spec, balance), (canary, with_canary_weight)):
        backend = section(config.render([one]), "backend svc_web")
        assert f"balance {wanted}" in backend
        hashes = [line for line in backend if line.startswith("hash-")]
        assert bool(hashes) is (policy == "consistent_hash")
