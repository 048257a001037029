"""The public keys of tokens: what `up` and the controller refuse, and when HAProxy gets changed files."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from controller.files import pem
from controller.files.pem import PemFiles, PemWatch, WrongFiles, read_files
from controller.files.public_keys import public_keys
from controller.settings import TOKEN_ALGORITHMS
from tests.harness import certificates
from tests.harness.certificates import write
from tests.harness.tokens import made, private, public
from tests.harness.waiting import until
from tests.unit.controller.control import Control
from tests.unit.controller.worlds import service

NOW = 1_800_000_000.0
KEY = rsa.generate_private_key(65537, 2048)
GOOD = public(KEY)
OLD_FORM = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.PKCS1).decode()
SMALL = public(made(rsa_bits=1024))
P256 = public(made("ES256"))
ED25519 = public(ed25519.Ed25519PrivateKey.generate())


def read(root: Path, algorithm: str = "RS256") -> PemFiles:
    return read_files(public_keys(algorithm), root, "jwt", NOW)


@pytest.mark.parametrize(
    ("text", "algorithm", "words"),
    [
        ("", "RS256", 'it has no public key: put one there that begins with "-----BEGIN PUBLIC KEY-----"'),
        (private(KEY), "RS256", "it has a private key, which is for the identity provider alone"),
        (GOOD + private(KEY), "RS256", "it has a private key"),
        (certificates.made("a", now=NOW)[1], "RS256", "it has no public key"),
        (GOOD[:200], "RS256", "it has no public key"),
        (GOOD + P256, "RS256", "it has 2 public keys: put each into a file of its own"),
        (GOOD.replace("MII", "MIJ"), "RS256", "its public key cannot be read: copy it again"),
        (SMALL, "PS512", "its RSA key has 1024 bits, and 2048 are needed at least"),
        (P256, "PS256", "its key is secp256r1, and PIERHEAD_JWT_ALGORITHM=PS256 needs RSA"),
        (P256, "ES384", "its key is secp256r1, and PIERHEAD_JWT_ALGORITHM=ES384 needs secp384r1"),
        (GOOD, "ES256", "its key is RSA, and PIERHEAD_JWT_ALGORITHM=ES256 needs secp256r1"),
        (ED25519, "RS256", "its key is neither RSA nor of an elliptic curve, and PIERHEAD_JWT_ALGORITHM=RS256"),
        ("Schlüssel", "RS256", "it is not text"),
    ],
)
def test_a_wrong_file_is_refused_with_what_to_do(tmp_path: Path, text: str, algorithm: str, words: str) -> None:
    write(tmp_path / "jwt" / "a.pem", text)
    write(tmp_path / "jwt" / "b.pem", public(made(algorithm)))
    with pytest.raises(WrongFiles) as refused:
        read(tmp_path, algorithm)
    assert str(refused.value).startswith(f"{tmp_path}/jwt/a.pem: {words}")
    assert "b.pem" not in str(refused.value)


@pytest.mark.parametrize("algorithm", TOKEN_ALGORITHMS)
def test_a_key_of_each_algorithm(tmp_path: Path, algorithm: str) -> None:
    key = public(made(algorithm))
    write(tmp_path / "jwt" / "a.pem", key)
    assert read(tmp_path, algorithm) == PemFiles({"a.pem": key}, {})


def test_haproxy_gets_one_form_of_a_key_and_nothing_else_of_its_file(tmp_path: Path) -> None:
    write(tmp_path / "jwt" / "a.pem", OLD_FORM, mode=0o644)
    write(tmp_path / "jwt" / "b.pem", f"# of 2026\n{GOOD}# with words\n", mode=0o644)
    assert read(tmp_path).files == {"a.pem": GOOD, "b.pem": GOOD}
    assert read(tmp_path).ending(NOW) == ()


async def test_the_status_names_what_is_wrong_only_where_a_service_takes_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pem, "LOOK_S", 0.01)
    root, used = tmp_path / "project", list[object]()
    root.mkdir()
    control = Control.of(tmp_path, service("web"))
    control.public_keys = watch = PemWatch(public_keys("RS256"), root, "jwt", used.append, lambda: NOW)
    watch.look()
    async with control.running(web=2):
        assert not control.view.notices
        assert not control.said("public_keys")
        control.source.edit(service("web", route="/", auth="jwt"))
        await until(lambda: control.view.notices, "the notice comes")
        (notice,) = tuple(control.view.notices)
        assert notice.startswith(f"PIERHEAD_JWT_DIR: {root}/jwt cannot be read")
        assert notice.endswith("Until then HAProxy keeps the public keys that it was given before")
        write(root / "jwt" / "a.pem", GOOD)
        await until(lambda: used and not control.view.notices, "the notice goes")
        assert used == [{"a.pem": GOOD}]
        assert control.said("public_keys")
