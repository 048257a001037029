"""haproxy/acme/entrypoint.sh, with stand-ins for lego and HAProxy: when it asks, what it keeps, how it waits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.certificates import made, write
from tests.harness.imports import ROOT
from tests.harness.waiting import eventually

SCRIPT = (ROOT / "haproxy/acme/entrypoint.sh").read_text()
DOMAINS = "shop.example,www.shop.example"
WANTED = "https://ca.example:9000/dir ops@shop.example shop.example www.shop.example"
LEGO = """#!/bin/sh
echo "$@" >>/var/lib/acme/asked
cat /tmp/lego/accounts/ca.example_9000/ops@shop.example/keys/ops@shop.example.key >>/var/lib/acme/asked
if [ -e /var/lib/acme/refuses ]; then
  echo "2026/11/30 01:54:22 [INFO] acme: Registering account" >&2
  echo "2026/11/30 01:54:22 Could not obtain certificates:" >&2
  printf '\\terror: one or more domains had a problem:\\n[shop.example] acme: error: 400\\n' >&2
  exit 1
fi
mkdir -p /tmp/lego/certificates
cp /var/lib/acme/given.key /tmp/lego/certificates/shop.example.key
cp /var/lib/acme/given.crt /tmp/lego/certificates/shop.example.crt
"""
SLEEP = '#!/bin/sh\necho "$1" >>/var/lib/acme/slept\nexec /usr/bin/env -S PATH=/usr/bin:/bin sleep "$1"\n'
HAPROXY = "#!/bin/sh\n[ -e /var/lib/acme/haproxy ] && printf 'HTTP/1.0 200 OK\\r\\n\\r\\nready.thumb'\n"


class Container:
    """Runs the script, with the volume and /tmp in a directory of the test."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "tmp").mkdir()
        (place / "bin").mkdir()
        for name, text in {"lego": LEGO, "sleep": SLEEP, "bash": HAPROXY, "entrypoint": SCRIPT}.items():
            file = place / "bin" / name
            file.write_text(text.replace("/tmp/", "@@/tmp/").replace("/var/lib/acme", "@@").replace("@@", str(place)))
            file.chmod(0o755)
        for name, text in {"account.key": "the account's key\n", "thumbprint": "thumb", "haproxy": ""}.items():
            write(place / name, text)
        self.ready(*made("shop.example", now=time.time()))

    def ready(self, key: str, certificate: str) -> None:
        """What the server gives next."""
        write(self.place / "given.key", key)
        write(self.place / "given.crt", certificate)

    @contextlib.contextmanager
    def running(self, domains: str = DOMAINS) -> Iterator[subprocess.Popen[bytes]]:
        (self.place / "slept").unlink(missing_ok=True)
        env = {
            "PATH": f"{self.place}/bin:{os.environ['PATH']}",
            "PIERHEAD_ACME_DOMAINS": domains,
            "PIERHEAD_ACME_EMAIL": "ops@shop.example",
            "PIERHEAD_ACME_SERVER": "https://ca.example:9000/dir",
        }
        command = ["sh", str(self.place / "bin" / "entrypoint")]
        with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, start_new_session=True) as process:
            try:
                yield process
            finally:
                os.killpg(process.pid, signal.SIGKILL)

    def lines(self, name: str) -> list[str]:
        file = self.place / name
        return file.read_text().splitlines() if file.exists() else []

    @property
    def attempts(self) -> int:
        return len(self.lines("asked")) // 2

    def waits(self, least: float, most: float) -> None:
        """Until the script does nothing but wait that long."""
        (self.place / "tls").mkdir(exist_ok=True)
        eventually(lambda: any(least <= float(text) <= most for text in self.lines("slept")), f"it waits {most} s", 20)


@pytest.fixture
def container(tmp_path: Path) -> Container:
    (tmp_path / "tls").mkdir()
    return Container(tmp_path)


def test_a_certificate_is_asked_once_and_again_when_a_third_of_its_time_is_left(container: Container) -> None:
    file = container.place / "tls" / "acme.pem"
    with container.running():
        container.waits(3600, 3600)
        asked, key = container.lines("asked")
        assert "--domains shop.example --domains www.shop.example --http" in asked
        assert "--server https://ca.example:9000/dir --email ops@shop.example" in asked
        assert key == "the account's key"
        given = (container.place / "given.key").read_text() + (container.place / "given.crt").read_text()
        assert (file.read_text(), file.stat().st_mode & 0o777) == (given, 0o600)
        assert not list((container.place / "tmp").glob("lego*")), "no key is left there"
    with container.running():
        container.waits(3600, 3600)
        assert container.attempts == 1, "nothing is due"
    for begins, is_due in ((-59, False), (-61, True)):
        write(file, *made("shop.example", now=time.time(), begins=begins, ends=90 + begins))
        (container.place / "asked").unlink(missing_ok=True)
        with container.running():
            container.waits(3600, 3600)
            assert container.attempts == is_due, begins
    with container.running("shop.example"):
        container.waits(3600, 3600)
        assert container.lines("obtained") == [WANTED.rpartition(" ")[0]], "other names are another certificate"


def test_after_failures_it_waits_longer_and_longer_also_across_restarts(container: Container) -> None:
    write(container.place / "refuses", "")
    before = {"text": "placeholder"}
    write(container.place / "tls" / "acme.pem", before["text"])
    with container.running() as process:
        container.waits(299, 300)
        why, next_at, wanted = container.lines("failure")
        assert why == (
            "Could not obtain certificates: error: one or more domains had a problem: [shop.example] acme: error: 400 "
        )
        assert 290 <= int(next_at) - time.time() <= 300
        assert wanted == WANTED
        for delay in (600, 1200):
            process.send_signal(signal.SIGHUP)
            container.waits(delay - 1, delay)
        assert container.attempts == 3
    with container.running():
        container.waits(1100, 1200)
        assert container.attempts == 3, "the attempt before the restart counts"
    with container.running("shop.example"):
        container.waits(299, 300)
        assert container.attempts == 4, "something else is wanted"
        assert (container.place / "tls" / "acme.pem").read_text() == before["text"]
    (container.place / "refuses").unlink()
    with container.running("shop.example") as process:
        container.waits(200, 300)
        process.send_signal(signal.SIGHUP)
        container.waits(3600, 3600)
        assert not (container.place / "failure").exists()


def test_an_attempt_that_failed_while_the_clock_was_ahead_is_not_waited_for(container: Container) -> None:
    ahead = int(time.time()) + 365 * 86400
    write(container.place / "failure", f"refused\n{ahead}\n{WANTED}\n")
    with container.running():
        container.waits(299, 300)
        why, next_at, wanted = container.lines("failure")
        assert 290 <= int(next_at) - time.time() <= 300, "which the status shows"
        assert (why, wanted) == ("refused", WANTED)
    assert container.attempts == 0
    write(container.place / "failure", f"refused\n{int(time.time()) + 21600}\n{WANTED}\n")
    with container.running():
        container.waits(21500, 21600)


def test_no_server_is_asked_before_haproxy_answers_for_the_account(container: Container) -> None:
    (container.place / "haproxy").unlink()
    with container.running() as process:
        container.waits(2, 2)
        process.send_signal(signal.SIGHUP)
        assert container.attempts == 0
        write(container.place / "haproxy", "")
        container.waits(3600, 3600)
        assert container.attempts == 1


def test_a_certificate_that_cannot_be_stored_is_a_failure(container: Container) -> None:
    (container.place / "given.crt").unlink()
    with container.running():
        container.waits(299, 300)
        assert "No such file or directory" in container.lines("failure")[0]
        assert not (container.place / "tls" / "acme.pem").exists()


def test_a_renewal_that_was_asked_for_and_failed_is_tried_again(container: Container) -> None:
    """Though the certificate is not due."""
    with container.running() as process:
        container.waits(3600, 3600)
        write(container.place / "refuses", "")
        process.send_signal(signal.SIGHUP)
        container.waits(299, 300)
        (container.place / "refuses").unlink()
    lines = container.lines("failure")
    write(container.place / "failure", "\n".join([lines[0], str(int(time.time()) - 1), *lines[2:], ""]))
    with container.running():
        container.waits(3600, 3600)
        assert container.attempts == 3
        assert not (container.place / "failure").exists()
