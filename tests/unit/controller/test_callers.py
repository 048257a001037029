"""Who gets an answer of the API."""

from __future__ import annotations

import pytest

from controller.daemon.api import Gatekeeper, default_gateways
from controller.errors import Forbidden, UnknownHost

ROUTES = """Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
eth0	00000000	010012AC	0003	0	0	0	00000000	0	0	0
eth0	000012AC	00000000	0001	0	0	0	0000FFFF	0	0	0
eth1	000013AC	020013AC	0003	0	0	0	0000FFFF	0	0	0
"""
THIS_MACHINE = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "172.18.0.1", "::ffff:172.18.0.1"]
RIGHT = {"Authorization": "Bearer secret"}
PAGE = {"Origin": "http://evil.example"}


def test_gateways_of_the_default_route() -> None:
    assert default_gateways(ROUTES) == {"172.18.0.1"}
    assert default_gateways("") == default_gateways("header\nnonsense\n") == frozenset()


def keeper(token: str | None = None) -> Gatekeeper:
    return Gatekeeper(token, lambda: frozenset({"172.18.0.1"}))


@pytest.mark.parametrize("peer", THIS_MACHINE)
def test_this_machine_may(peer: str) -> None:
    keeper().admit(peer, {})
    keeper("secret").admit(peer, {})


@pytest.mark.parametrize("peer", ["172.18.0.7", "10.0.0.1", "", "nonsense", None])
def test_other_addresses_may_with_the_token_only(peer: str | None) -> None:
    with pytest.raises(Forbidden, match="PIERHEAD_API_TOKEN"):
        keeper("secret").admit(peer, {})
    keeper("secret").admit(peer, RIGHT)


def test_where_the_controller_has_no_machine_of_its_own_only_the_token_counts() -> None:
    on_a_swarm = Gatekeeper("secret", None)
    for peer in THIS_MACHINE:
        with pytest.raises(Forbidden, match=r"may not ask without the token: the API answers with the header"):
            on_a_swarm.admit(peer, {})
        on_a_swarm.admit(peer, RIGHT)


@pytest.mark.parametrize("offered", ["Bearer wrong", "secret", "Bearer ", "Basic c2VjcmV0", "Bearer sécret"])
def test_a_wrong_token_may_not_even_from_this_machine(offered: str) -> None:
    for token in ("secret", None):
        with pytest.raises(Forbidden, match="is not PIERHEAD_API_TOKEN"):
            keeper(token).admit("127.0.0.1", {"Authorization": offered})


def test_a_web_page_may_not() -> None:
    with pytest.raises(Forbidden, match="web pages"):
        keeper("secret").admit("127.0.0.1", PAGE)
    keeper("secret").admit("127.0.0.1", PAGE | RIGHT)


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
    Gatekeeper(None, hosts=frozenset({"pierhead.example.com"})).refuse_unknown_host(host)


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
        Gatekeeper(None, hosts=frozenset({"pierhead.example.com"})).refuse_unknown_host(host)
