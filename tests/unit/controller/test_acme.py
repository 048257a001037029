"""The certificate that an ACME server gives: what the controller makes, and what it says of attempts to get it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import stat
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
from cryptography import x509

from controller.files import acme
from controller.files.acme import ACME_CERTIFICATES, DIRECTORY, FILE, AcmeWatch, prepare
from controller.files.pem import Validity, read_files
from controller.model.reports import EventOutcome
from tests.harness.certificates import DAY_S, made, write
from tests.harness.waiting import until

NOW = 1_800_000_000.0
DOMAINS = ("shop.example", "www.shop.example")


def test_the_key_and_a_placeholder_are_made_once(tmp_path: Path) -> None:
    thumbprint = prepare(tmp_path, DOMAINS, NOW)
    files = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path).as_posix() for path in files} == {"account.key", "thumbprint", "tls/acme.pem"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert files[tmp_path / "thumbprint"] == thumbprint
    assert prepare(tmp_path, ("other.example",), NOW) == thumbprint
    assert {path: path.read_text() for path in files} == files
    found = read_files(ACME_CERTIFICATES, tmp_path, DIRECTORY, NOW)
    assert list(found.files) == [FILE]
    assert found.ending(NOW) == ()


@pytest.mark.parametrize("text", ["", "nonsense", made("a.test", now=NOW, rsa_bits=2048)[0]])
def test_a_key_that_cannot_be_used_is_made_again(tmp_path: Path, text: str) -> None:
    (tmp_path / "account.key").write_text(text)
    assert prepare(tmp_path, DOMAINS, NOW) == prepare(tmp_path, DOMAINS, NOW)


@pytest.mark.parametrize("text", [None, "", "nonsense", "".join(made(*DOMAINS, now=NOW, begins=-90, ends=-1))])
def test_what_is_lost_damaged_or_over_is_asked_for_again(tmp_path: Path, text: str | None) -> None:
    prepare(tmp_path, DOMAINS, NOW)
    write(tmp_path / "obtained", "wanted")
    if text is None:
        (tmp_path / DIRECTORY / FILE).unlink()
    else:
        write(tmp_path / DIRECTORY / FILE, text)
    prepare(tmp_path, DOMAINS, NOW)
    assert not (tmp_path / "obtained").exists()
    assert "placeholder" in notices(tmp_path)[0]


def test_links_and_pipes_of_the_container_are_not_followed(tmp_path: Path) -> None:
    prepare(tmp_path, DOMAINS, NOW)
    (tmp_path / "secret").write_text("a token")
    (tmp_path / "failure").symlink_to(tmp_path / "secret")
    assert "a token" not in notices(tmp_path)[0]
    (tmp_path / "account.key").unlink()
    os.mkfifo(tmp_path / "account.key")
    prepare(tmp_path, DOMAINS, NOW)


def test_the_thumbprint_is_that_of_the_account(tmp_path: Path) -> None:
    """RFC 7638, from what `openssl` says of the key."""
    thumbprint = prepare(tmp_path, DOMAINS, NOW)
    command = ["openssl", "pkey", "-in", str(tmp_path / "account.key"), "-pubout", "-outform", "DER"]
    point = subprocess.run(command, check=True, capture_output=True).stdout[-64:]
    x, y = (base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (point[:32], point[32:]))
    jwk = json.dumps({"crv": "P-256", "kty": "EC", "x": x, "y": y}, separators=(",", ":"))
    assert base64.urlsafe_b64decode(f"{thumbprint}=") == sha256(jwk.encode()).digest()
    assert (tmp_path / "account.key").read_text().startswith("-----BEGIN EC PRIVATE KEY-----"), "as lego reads it"


def notices(place: Path, *domains: str) -> tuple[str, ...]:
    watch = AcmeWatch(place, domains or DOMAINS, "shop", lambda: NOW)
    watch.look()
    return watch.notices()


def given(place: Path, *names: str) -> None:
    """As the container does it."""
    (place / "failure").unlink(missing_ok=True)
    write(place / DIRECTORY / FILE, *made(*names, now=NOW))


def fails(place: Path, text: str, next_at: str = "1800000300") -> None:
    (place / "failure").write_bytes(f"{text}\n{next_at}\nwanted\n".encode(errors="surrogateescape"))


def test_what_status_says_until_there_is_a_certificate(tmp_path: Path) -> None:
    prepare(tmp_path, DOMAINS, NOW)
    (words,) = notices(tmp_path)
    assert words == (
        "no ACME server has given a certificate for shop.example, www.shop.example yet. Until then HAProxy has a "
        "placeholder that no client trusts; `pierhead logs acme` shows the attempts"
    )
    watch = AcmeWatch(tmp_path, DOMAINS, "shop", lambda: NOW)
    watch.look()
    valid = {FILE: Validity(NOW - 1, NOW + 1)}
    assert watch.validity(valid) == {FILE: Validity(NOW - DAY_S, NOW - DAY_S)}, "it is no certificate for clients"
    fails(tmp_path, "connection refused")
    (words,) = notices(tmp_path)
    assert words.startswith(
        "the ACME server has given no certificate for shop.example, www.shop.example: connection refused. HAProxy has "
        "a placeholder that no client trusts; the next attempt is at 2027-01-15 08:05 UTC. "
    )
    assert words.endswith("`docker kill --signal HUP shop-acme-1` tries at once")
    given(tmp_path, *DOMAINS)
    assert notices(tmp_path) == ()
    watch.look()
    assert watch.validity(valid) == valid
    fails(tmp_path, "too many certificates")
    (words,) = notices(tmp_path)
    assert ": too many certificates. HAProxy keeps the certificate that it has; the next attempt" in words
    given(tmp_path, DOMAINS[0])
    (words,) = notices(tmp_path)
    assert "HAProxy keeps the certificate that it has, which is not for www.shop.example; `pierhead" in words


@pytest.mark.parametrize(
    ("text", "next_at", "words"),
    [
        ("a\x1b[31m\tb\u2028c \udcff", "x", "a [31m b c \ufffd. HAProxy"),
        ("x" * 3000, "9" * 30, "x" * 1000 + ". HAProxy"),
        ("x" * 9000, "", "x" * 1000 + ". HAProxy"),
        ("", "-1", "it did not say why. HAProxy"),
    ],
)
def test_what_a_server_says_is_cleaned_and_bounded(tmp_path: Path, text: str, next_at: str, words: str) -> None:
    prepare(tmp_path, DOMAINS, NOW)
    fails(tmp_path, text, next_at)
    (notice,) = notices(tmp_path)
    assert f": {words}" in notice
    assert "2027-01-15 08:00 UTC" in notice, "a time that is none"


async def test_a_failure_and_its_end_are_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acme, "LOOK_S", 0.01)
    events: list[tuple[str, EventOutcome]] = []

    class Recorder:
        def record(self, kind: str, message: str, *, outcome: EventOutcome) -> None:
            assert kind == "certificates"
            events.append((message, outcome))

    prepare(tmp_path, DOMAINS, NOW)
    fails(tmp_path, "refused")
    task = asyncio.create_task(AcmeWatch(tmp_path, DOMAINS, "shop", lambda: NOW).run(Recorder()))

    async def there_are(count: int) -> None:
        async def seen() -> bool:
            return len(events) == count

        await until(seen, f"{count} events")

    try:
        await there_are(1)
        fails(tmp_path, "refused", "1800009999")
        given(tmp_path, *DOMAINS)
        await there_are(2)
    finally:
        task.cancel()
    assert [outcome for _, outcome in events] == ["failed", "ok"]
    assert events[1][0] == "the ACME server has given the certificate"


def test_the_placeholder_is_known_by_its_issuer(tmp_path: Path) -> None:
    prepare(tmp_path, DOMAINS, NOW)
    placeholder = x509.load_pem_x509_certificate((tmp_path / DIRECTORY / FILE).read_bytes())
    names = placeholder.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == list(DOMAINS)
    given(tmp_path, *DOMAINS)  # a server may give certificates that sign themselves
    assert notices(tmp_path) == ()
