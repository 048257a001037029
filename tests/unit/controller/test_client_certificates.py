"""The operator's certificates: what `up` and the controller refuse, and when HAProxy gets changed files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from controller.files import pem
from controller.files.certificates import CERTIFICATES
from controller.files.pem import PemWatch, WrongFiles, read_files
from controller.model.reports import EventOutcome
from tests.harness.certificates import DAY_S, made, write
from tests.harness.waiting import until
from tests.unit.controller.control import Control
from tests.unit.controller.worlds import service

NOW = 1_800_000_000.0
KEY, CHAIN = made("a.test", now=NOW)
OTHERS_KEY, _ = made("b.test", now=NOW)
GOOD = f"{KEY}{CHAIN}"


def wrong(root: Path, directory: str = "tls", now: float = NOW) -> str:
    with pytest.raises(WrongFiles) as refused:
        read_files(CERTIFICATES, root, directory, now)
    return str(refused.value)


Texts = tuple[str, ...]


@pytest.mark.parametrize(
    ("texts", "mode", "words"),
    [
        ((), 0o600, "it has no private key: put the key and the chain into one file"),
        ((KEY,), 0o600, "it has no certificate that can be read"),
        ((CHAIN,), 0o600, "it has no private key: put the key and the chain into one file"),
        ((KEY, CHAIN[:200]), 0o600, "it has no certificate that can be read"),
        ((KEY[:90], "\n-----END PRIVATE KEY-----\n", CHAIN), 0o600, "its private key cannot be read"),
        ((OTHERS_KEY, CHAIN), 0o600, "its key is not that of its first certificate"),
        (made("a", now=NOW, passphrase=b"secret"), 0o600, "its private key has a passphrase"),
        (made("a", now=NOW, begins=1), 0o600, "its certificate is not valid before 2027-01-16"),
        (made("a", now=NOW, begins=-9, ends=-1), 0o600, "its certificate ended on 2027-01-14: put a new one there"),
        (made("a", now=NOW, rsa_bits=1024), 0o600, "its RSA key has 1024 bits, and HAProxy wants 2048 at least"),
        ((GOOD,), 0o640, "others can read its private key (mode 640): chmod 600 "),
        ((GOOD,), 0o604, "others can read its private key (mode 604): chmod 600 "),
        (("Schlüssel",), 0o600, "it is not text"),
    ],
)
def test_a_wrong_file_is_refused_with_what_to_do(tmp_path: Path, texts: Texts, mode: int, words: str) -> None:
    write(tmp_path / "tls" / "a.pem", *texts, mode=mode)
    assert wrong(tmp_path).startswith(f"{tmp_path}/tls/a.pem: {words}")


@pytest.mark.parametrize("texts", [made("a", now=NOW, rsa_bits=2048), (CHAIN, KEY), (GOOD, made("x", now=NOW)[1])])
def test_right_files_are_read_and_others_are_left_alone(tmp_path: Path, texts: Texts) -> None:
    write(tmp_path / "tls" / "a.pem", *texts)
    for other in ("notes.txt", ".hidden.pem", "b.pem.bak"):
        write(tmp_path / "tls" / other, "anything", mode=0o644)
    found = read_files(CERTIFICATES, tmp_path, "tls", NOW)
    assert found.files == {"a.pem": "".join(texts)}
    assert found.ending(NOW) == ()


def test_a_directory_that_is_missing_or_empty_or_not_in_the_project(tmp_path: Path) -> None:
    assert f"PIERHEAD_TLS_DIR: {tmp_path}/tls cannot be read (No such file or directory). Make it" in wrong(tmp_path)
    (tmp_path / "tls").mkdir()
    assert f"PIERHEAD_TLS_DIR: {tmp_path}/tls has no .pem file. Make it, and put a file <name>.pem" in wrong(tmp_path)
    for outside in ("../elsewhere", "/etc/ssl"):
        assert f"PIERHEAD_TLS_DIR: {outside} is outside of {tmp_path}" in wrong(tmp_path, outside)


def test_a_link_must_not_lead_out_of_the_project(tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    write(tmp_path / "a.txt", GOOD)
    write(root / "tls" / "b.txt", GOOD)
    (root / "tls" / "a.pem").symlink_to(tmp_path / "a.txt")
    (root / "tls" / "b.pem").symlink_to("b.txt")
    assert wrong(root) == (
        f"{root}/tls/a.pem: it is a link that leads out of the project, where the controller sees nothing: "
        "copy the file"
    )


def test_every_wrong_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "tls" / "a.pem", KEY)
    write(tmp_path / "tls" / "b.pem", GOOD)
    write(tmp_path / "tls" / "c.pem", CHAIN)
    assert [line.partition(":")[0].rpartition("/")[2] for line in wrong(tmp_path).splitlines()] == ["a.pem", "c.pem"]


def test_a_certificate_that_ends_soon_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "tls" / "a.pem", *made("a", now=NOW, begins=-77, ends=13))
    write(tmp_path / "tls" / "b.pem", *made("b", now=NOW, begins=-75, ends=15))
    write(tmp_path / "tls" / "of-a-day.pem", *made("c", now=NOW, begins=-0.5, ends=0.5))
    found = read_files(CERTIFICATES, tmp_path, "tls", NOW)
    assert found.ending(NOW) == (
        f"{tmp_path}/tls/a.pem: its certificate ends on 2027-01-28: put a new one in its place",
    )
    assert "b.pem: its certificate ended on 2027-01-30" in found.ending(NOW + 16 * DAY_S)[1]


class World:
    """A watch, with what it does."""

    def __init__(self, root: Path) -> None:
        self.root, self.used, self.events = root, list[Mapping[str, str]](), list[tuple[str, EventOutcome]]()
        self.disk_is_full, self.now = False, NOW
        self.watch = PemWatch(CERTIFICATES, root, "tls", self.use, lambda: self.now)

    def use(self, files: Mapping[str, str]) -> None:
        if self.disk_is_full:
            raise OSError(28, "No space left on device")
        self.used.append(dict(files))

    def record(self, kind: str, message: str, *, outcome: EventOutcome) -> None:
        self.events.append((message, outcome))

    async def while_watching(self, change: Callable[[], None], is_seen: Callable[[], bool]) -> None:
        """Do the change and wait until it is seen."""

        async def seen() -> bool:
            return is_seen()

        task = asyncio.create_task(self.watch.run(self))
        try:
            await asyncio.sleep(0)
            change()
            await until(seen, "the change is seen")
        finally:
            task.cancel()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(pem, "LOOK_S", 0.01)
    write(tmp_path / "tls" / "a.pem", GOOD)
    return World(tmp_path)


async def test_changed_files_are_used_once_and_wrong_ones_are_not(world: World) -> None:
    world.watch.look()
    world.watch.look()
    assert world.used == [{"a.pem": GOOD}]
    file, renewed = world.root / "tls" / "a.pem", "".join(made("a.test", now=NOW))
    await world.while_watching(lambda: write(file, renewed[:-99]), lambda: bool(world.events))
    (notice,) = world.watch.notices()
    assert notice.startswith(f"{file}: it has no certificate that can be read")
    assert notice.endswith(
        "put the chain after the key. Until then HAProxy keeps the certificates that it was given before"
    )
    assert world.events == [(notice, "failed")]
    world.events.clear()
    await world.while_watching(lambda: write(file, renewed), lambda: len(world.used) == 2)
    assert world.used[-1] == {"a.pem": renewed}
    assert world.watch.notices() == ()
    await world.while_watching(lambda: write(file.with_name("b.pem"), GOOD), lambda: len(world.used) == 3)
    assert world.events[-1] == ("HAProxy gets the certificates a.pem, b.pem", "ok")


async def test_a_wrong_file_at_the_start_is_an_event_and_the_former_text_ends_it(world: World) -> None:
    world.watch.look()
    file = world.root / "tls" / "a.pem"
    write(file, KEY)
    world.watch.look()
    await world.while_watching(lambda: write(file, GOOD), lambda: len(world.events) == 2)
    assert [outcome for _, outcome in world.events] == ["failed", "ok"]
    assert world.events[-1][0] == "the certificates can be used again"
    assert len(world.used) == 1, "HAProxy has it already"


async def test_a_file_that_became_wrong_does_not_keep_the_others_from_being_renewed(world: World) -> None:
    a, b = (world.root / "tls" / f"{name}.pem" for name in "ab")
    world.watch.look()
    ends = "".join(made("b.test", now=NOW, ends=1))
    await world.while_watching(lambda: write(b, ends), lambda: len(world.used) == 2)
    world.now = NOW + 2 * DAY_S
    renewed = "".join(made("a.test", now=world.now))
    await world.while_watching(lambda: write(a, renewed), lambda: len(world.used) == 3)
    assert world.used[-1] == {"a.pem": renewed, "b.pem": ends}
    assert any(f"{b}: its certificate ended" in notice for notice in world.watch.notices())


async def test_a_certificate_that_is_not_valid_yet_is_used_when_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pem, "AGAIN_S", 0.03)
    world.watch.look()
    later = "".join(made("a.test", now=NOW, begins=1))
    await world.while_watching(lambda: write(world.root / "tls" / "a.pem", later), lambda: bool(world.events))
    assert len(world.used) == 1

    def wait_a_day() -> None:
        world.now = NOW + 2 * DAY_S

    await world.while_watching(wait_a_day, lambda: len(world.used) == 2)
    assert world.used[-1] == {"a.pem": later}


async def test_files_that_cannot_be_copied_are_tried_again(world: World) -> None:
    world.disk_is_full = True
    world.watch.look()
    assert "the certificates cannot be copied for HAProxy ([Errno 28]" in world.watch.notices()[0]

    def make_room() -> None:
        world.disk_is_full = False

    await world.while_watching(make_room, lambda: bool(world.used))
    assert world.watch.notices() == ()


async def test_the_status_names_what_is_wrong_and_an_event_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pem, "LOOK_S", 0.01)
    root = tmp_path / "project"
    root.mkdir()
    world = World(root)
    control = Control.of(tmp_path, service("web"))
    control.certificates = world.watch
    world.watch.look()
    async with control.running(web=2) as controller:
        (notice,) = control.view.notices
        assert "PIERHEAD_TLS_DIR" in notice
        assert control.said("certificates")
        write(root / "tls" / "a.pem", GOOD)
        await until(lambda: world.used and not control.view.notices, "the notice goes")
        metric, registry = "pierhead_client_certificate_expiry_timestamp_seconds", controller.publisher.metrics.registry
        assert registry.get_sample_value(metric, {"file": "a.pem"}) == int(NOW + 90 * DAY_S)
        whole = registry.get_sample_value("pierhead_client_certificate_lifetime_seconds", {"file": "a.pem"})
        assert whole == 91 * DAY_S
