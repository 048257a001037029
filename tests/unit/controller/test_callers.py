"""Who gets an answer of the API."""

from __future__ import annotations

import re

import pytest

from controller.api_tokens import ROLES, ApiToken, digest_of, made, read_tokens
from controller.daemon.callers import Gatekeeper, default_gateways
from controller.errors import Forbidden, UnknownHost
from controller.status.records.answers import Caller

ROUTES = """Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
eth0	00000000	010012AC	0003	0	0	0	00000000	0	0	0
eth0	000012AC	00000000	0001	0	0	0	0000FFFF	0	0	0
eth1	000013AC	020013AC	0003	0	0	0	0000FFFF	0	0	0
"""
INSIDE = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]
"""From the controller's own container."""
AT_THE_PORT = ["172.18.0.1", "::ffff:172.18.0.1"]
"""From this machine."""
THIS_MACHINE = [*INSIDE, *AT_THE_PORT]
TOKENS = read_tokens("secret", f"ci:deploy:{digest_of('d')}, grafana:read:{digest_of('r')} ops:scale:{digest_of('s')}")
PAGE = {"Origin": "http://evil.example"}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_gateways_of_the_default_route() -> None:
    assert default_gateways(ROUTES) == {"172.18.0.1"}
    assert default_gateways("") == default_gateways("header\nnonsense\n") == frozenset()


def keeper(tokens: tuple[ApiToken, ...] = ()) -> Gatekeeper:
    return Gatekeeper(tokens, lambda: frozenset({"172.18.0.1"}))


@pytest.mark.parametrize("peer", INSIDE)
def test_without_tokens_the_controllers_own_container_may_everything(peer: str) -> None:
    assert keeper().admit(peer, {}, "admin") == Caller("this machine", "admin")


@pytest.mark.parametrize("peer", AT_THE_PORT)
def test_without_tokens_this_machine_may_deploy_and_is_told_what_an_admin_needs(peer: str) -> None:
    for role in ROLES[:-1]:
        assert keeper().admit(peer, {}, role) == Caller("this machine", "deploy")
    with pytest.raises(Forbidden, match=r"needs the role admin: set PIERHEAD_API_TOKEN .* type `pierhead` commands"):
        keeper().admit(peer, {}, "admin")


@pytest.mark.parametrize("tokens", [(), TOKENS])
def test_a_user_whom_the_socket_lets_in_may_everything_unless_a_token_says_less(tokens: tuple[ApiToken, ...]) -> None:
    assert keeper(tokens).admit("", {}, "admin", 1000) == Caller("uid 1000", "admin")
    with pytest.raises(Forbidden):
        keeper(tokens).admit("", bearer("r"), "admin", 1000)


@pytest.mark.parametrize("peer", ["172.18.0.7", "10.0.0.1", "", "nonsense", None])
def test_other_addresses_may_with_a_token_only(peer: str | None) -> None:
    for role in ROLES:
        with pytest.raises(Forbidden, match=r"may not ask without a token: .*PIERHEAD_API_TOKEN"):
            keeper().admit(peer, {}, role)
        assert keeper(TOKENS).admit(peer, bearer("secret"), role).name == "PIERHEAD_API_TOKEN"


@pytest.mark.parametrize("peer", [*THIS_MACHINE, "172.18.0.7"])
def test_with_tokens_this_machine_needs_one_too(peer: str) -> None:
    with pytest.raises(Forbidden, match="answers with a token only"):
        keeper(TOKENS).admit(peer, {}, "read")


@pytest.mark.parametrize(
    ("token", "name", "may"),
    [("r", "grafana", 1), ("s", "ops", 2), ("d", "ci", 3), ("secret", "PIERHEAD_API_TOKEN", 4)],
)
def test_a_role_may_what_those_before_it_may(token: str, name: str, may: int) -> None:
    for role in ROLES[:may]:
        assert keeper(TOKENS).admit("10.0.0.1", bearer(token), role).name == name
    for role in ROLES[may:]:
        with pytest.raises(Forbidden, match=f"the token {name} has the role {ROLES[may - 1]}, and this needs {role}"):
            keeper(TOKENS).admit("10.0.0.1", bearer(token), role)


@pytest.mark.parametrize(
    "offered", ["Bearer wrong", "secret", "Bearer ", "Basic c2VjcmV0", "Bearer s\u00e9cret", "bearer r"]
)
def test_a_wrong_token_may_nothing_not_even_from_this_machine(offered: str) -> None:
    for tokens in (TOKENS, ()):
        with pytest.raises(Forbidden, match="none of the tokens that this stack knows"):
            keeper(tokens).admit("127.0.0.1", {"Authorization": offered}, "read")


def test_a_web_page_may_not() -> None:
    with pytest.raises(Forbidden, match="web pages"):
        keeper().admit("127.0.0.1", PAGE, "read")
    assert keeper(TOKENS).admit("127.0.0.1", PAGE | bearer("r"), "read") == Caller("grafana", "read")


def test_the_apis_own_page_may_what_this_machine_may() -> None:
    own = {"Host": "localhost:8100", "Origin": "http://localhost:8100", "Sec-Fetch-Site": "same-origin"}
    assert keeper().admit("172.18.0.1", own, "deploy") == Caller("this machine", "deploy")
    with pytest.raises(Forbidden, match="needs the role admin"):
        keeper().admit("172.18.0.1", own, "admin")
    assert keeper().admit("172.18.0.1", {"Host": "localhost:8100", "Sec-Fetch-Site": "none"}, "read").role == "deploy"
    for other in ("http://localhost:8101", "http://localhost", "https://localhost:8100", "null", ""):
        with pytest.raises(Forbidden, match="web pages"):
            keeper().admit("127.0.0.1", own | {"Origin": other}, "read")
    for site in ("cross-site", "same-site"):
        with pytest.raises(Forbidden, match="web pages"):
            keeper().admit("127.0.0.1", {"Host": "localhost:8100", "Sec-Fetch-Site": site}, "read")


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("ci:deploy", "another form in entry 1"),
        ("ph_a-token-in-the-place-of-its-hash", "another form in entry 1"),
        (f"ci:read:{digest_of('x')}, ops:boss:{digest_of('y')}", "another form in entry 2"),
        (f"c/i:read:{digest_of('x')}", "another form in entry 1"),
        (f"ci:read:{digest_of('secret')}", "the same token as PIERHEAD_API_TOKEN and as ci"),
        (f"ci:read:{digest_of('x')},ci:admin:{digest_of('y')}", "ci twice"),
        (f"PIERHEAD_API_TOKEN:read:{digest_of('x')}", "PIERHEAD_API_TOKEN twice"),
    ],
)
def test_wrong_entries(named: str, found: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(found)}$"):
        read_tokens("secret", named)


def test_a_token_that_was_made_is_known_by_its_entry() -> None:
    token, entry = made("ci", "deploy")
    assert token not in entry
    known = read_tokens("secret", entry)
    assert keeper(known).admit(None, bearer(token), "deploy").name == "ci"
    assert token not in repr(known)


@pytest.mark.parametrize(
    "host",
    [
        None,
        "127.0.0.1:8100",
        "10.1.2.3",
        "[::1]:8100",
        "[fe80::1]",
        "localhost",
        "LOCALHOST:8100",
        "controller:8100",
        "gpu-box",
        "api.localhost",
        "host.docker.internal:8100",
        "Pierhead.example.com:443",
    ],
)
def test_names_that_no_stranger_has_get_an_answer(host: str | None) -> None:
    Gatekeeper((), hosts=frozenset({"pierhead.example.com"})).refuse_unknown_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8100",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example.",
        "tasks.example",
        "evil.example@localhost",
        "[evil.example]",
        "::1",
        ".localhost",
        "",
        "localhost:8100:evil",
        "internal.evil.example",
        "x.pierhead.example.com",
    ],
)
def test_a_name_that_a_web_page_may_have_gets_no_answer(host: str) -> None:
    with pytest.raises(UnknownHost, match=r"^Host: the API does not answer to .* PIERHEAD_API_HOSTS in \.env"):
        Gatekeeper((), hosts=frozenset({"pierhead.example.com"})).refuse_unknown_host(host)
