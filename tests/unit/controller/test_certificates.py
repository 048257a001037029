"""Who trusts whom, for how long, and when a certificate is renewed."""

from __future__ import annotations

import ssl
import time
from pathlib import Path
from typing import Any

import pytest

from controller.swarm import certificates
from controller.swarm.certificates import (
    DAYS,
    DOMAIN,
    ROLE_NAMES,
    Identity,
    Role,
    context,
    is_due,
    make,
    make_authority,
)

NOW = time.time()
DAY_S = 86_400


@pytest.fixture(scope="module")
def authority() -> Identity:
    return make_authority(NOW)


@pytest.fixture(scope="module")
def edge(authority: Identity) -> Identity:
    return make("edge", authority, NOW)


def shake_hands(
    directory: Path, client: Identity, server: Identity, trusted: str, role: Role = "edge", *, by_server: str = ""
) -> str:
    """The name that the server sees in the client's certificate. Raises ssl.SSLError when either end refuses.

    `by_server`: whom the server trusts, where that is not whom the client does.
    """
    files = {"client": client.pem, "server": server.pem, "client-ca": trusted, "server-ca": by_server or trusted}
    for name, pem in files.items():
        (directory / name).write_text(pem)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = []
    for name, incoming, outgoing in (("client", to_client, to_server), ("server", to_server, to_client)):
        tls = context(directory / name, directory / f"{name}-ca", is_server=name == "server")
        tls.verify_flags |= ssl.VERIFY_X509_STRICT
        wanted = None if name == "server" else f"7.{role}.{DOMAIN}"
        ends.append(tls.wrap_bio(incoming, outgoing, server_side=name == "server", server_hostname=wanted))
    for end in (*ends, *ends):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    seen = ends[1].getpeercert()
    assert seen is not None
    subject: Any = seen["subject"]
    return str(dict(pair for part in subject for pair in part)["commonName"])


def test_each_end_knows_the_other_and_its_role(tmp_path: Path, authority: Identity, edge: Identity) -> None:
    controller = make("controller", authority, NOW)
    assert shake_hands(tmp_path, controller, edge, authority.certificate) == ROLE_NAMES["controller"]
    assert shake_hands(tmp_path, edge, controller, authority.certificate, "controller") == ROLE_NAMES["edge"]
    with pytest.raises(ssl.SSLError, match="Hostname mismatch"):
        shake_hands(tmp_path, controller, controller, authority.certificate)


def test_a_new_authority_is_trusted_with_the_old_only(tmp_path: Path, authority: Identity, edge: Identity) -> None:
    other = make_authority(NOW)
    controller = make("controller", other, NOW)
    with pytest.raises(ssl.SSLError, match=r"certificate verify failed|unknown ca"):
        shake_hands(tmp_path, controller, edge, authority.certificate)
    both = other.certificate + authority.certificate
    assert shake_hands(tmp_path, controller, edge, both) == ROLE_NAMES["controller"]


def test_when_a_certificate_ends(edge: Identity) -> None:
    assert certificates.ends_at(edge.pem) == int(NOW + DAYS * DAY_S)


def test_a_clock_that_is_behind_and_the_time_of_a_new_one(edge: Identity) -> None:
    made = NOW - certificates.SKEW_DAYS * DAY_S
    whole = (DAYS + certificates.SKEW_DAYS) * DAY_S
    assert [is_due(edge.certificate, made + share * whole) for share in (0, 0.5, 0.66, 0.68, 1, 2)] == [
        False,
        False,
        False,
        True,
        True,
        True,
    ]
