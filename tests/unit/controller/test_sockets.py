"""Replicas that take requests at Unix sockets: what the files say, the directory, the probe, HAProxy and Discovery."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pierhead.replica.admin import AdminServer, Page

from controller.engines.labels import create_body, read_labels
from controller.engines.sockets import SocketDirectory
from controller.errors import RoutingError
from controller.files.parse import parse
from controller.model.desired import Desired
from controller.model.observed import Observed
from controller.model.spec import ProbeSpec, ServiceSpec, unix_address
from controller.model.world import ContainerState, ReplicaContainer, ReplicaHealth, probe_address, service_address
from controller.observe.admin_pages import NO_SOCKET, HttpProbe
from controller.observe.prober import Subject
from controller.routing.haproxy_state import servers
from controller.routing.haproxy_text import ServerLine, server_words, with_servers
from controller.status.endpoints import endpoints
from controller.swarm.files.dialect import DIALECTS
from tests.unit.controller.compose_configs import PROJECT, config, problems_of, service

REPLICA = "shop-ranker-abcd1234-2"
ADDRESS = "unix:/run/pierhead/sockets/ranker/abcd1234-2"
FOREIGN = {"managed": False, "health": {"probe": {"path": "/health"}}, "route": "/"}


def stack(listen: str | None = None, engine: str = "docker", **services: Any) -> dict[str, Any]:
    """The services in a stack that has the volume of the sockets."""
    words = {"PIERHEAD_ENGINE": engine} | ({} if listen is None else {"PIERHEAD_LISTEN": listen})
    controller = {"image": "c", "networks": {"default": None}, "environment": words}
    return config(**services, controller=controller) | {"volumes": {"replica-sockets": {}}}


def spec_of(x_serve: Any, name: str = "ranker", **more: Any) -> ServiceSpec:
    return parse(PROJECT, stack(ranker=service(x_serve, **more), echo=service({})), DIALECTS).services[name]


def mounts(spec: ServiceSpec) -> list[tuple[str, str, bool]]:
    """Target, part of the volume, and whether it is read-only."""
    found = spec.container["HostConfig"].get("Mounts", ())
    assert {one["Source"] for one in found} <= {"shop_replica-sockets"}
    return [(one["Target"], one["VolumeOptions"]["Subpath"], one.get("ReadOnly", False)) for one in found]


OWN = ("/run/pierhead/listen", ".listen/ranker", False)
ECHO = ("/run/pierhead/sockets/echo", "echo", True)


@pytest.mark.parametrize(
    ("x_serve", "more", "listens", "found"),
    [
        ({}, {}, True, [OWN]),
        ({"listen": "tcp"}, {}, False, []),
        ({}, {"depends_on": ["echo", "redis"]}, True, [ECHO, OWN]),
        ({"listen": "tcp"}, {"depends_on": ["echo"]}, False, [ECHO]),
        (FOREIGN, {"depends_on": ["echo"]}, False, []),
        ({"managed": True, "health": {"probe": {"path": "/ok", "port": 7000}}}, {}, False, []),
    ],
)
def test_a_service_has_its_own_directory_and_those_of_its_callees(
    x_serve: Any, more: dict[str, Any], listens: bool, found: list[tuple[str, str, bool]]
) -> None:
    spec = spec_of(x_serve, **more)
    assert (spec.has_socket, mounts(spec)) == (listens, found)


@pytest.mark.parametrize("whole", [stack("tcp", ranker=service({})), config(ranker=service({}))])
def test_a_stack_without_sockets_has_none(whole: dict[str, Any]) -> None:
    spec = parse(PROJECT, whole, DIALECTS).services["ranker"]
    assert (spec.has_socket, mounts(spec)) == (False, [])


@pytest.mark.parametrize(
    ("whole", "problem"),
    [
        (
            stack("pipes", ranker=service({})),
            (
                "services.controller.environment.PIERHEAD_LISTEN: expected socket or tcp (it is set in .env), "
                'found "pipes"'
            ),
        ),
        (
            stack(ranker=service({**FOREIGN, "listen": "socket"})),
            (
                "services.ranker.x-serve.listen: has no effect on an image that is not built on Pierhead's runtime "
                "(managed: false): its own program decides where it listens; remove it"
            ),
        ),
        (
            stack(ranker=service({"listen": "socket", "managed": True, "health": {"probe": {"path": "/", "port": 7}}})),
            (
                "services.ranker.x-serve.listen: expected tcp, as health.probe.port is 7: a program that is asked at a "
                "port of its own takes requests at a port, too; found socket"
            ),
        ),
    ],
)
def test_wrong_words(whole: dict[str, Any], problem: str) -> None:
    assert problems_of(whole) == [problem]


def test_a_replica_learns_its_sockets_and_its_label_says_so() -> None:
    body = create_body(spec_of({}), REPLICA, "abcd1234", 2, (), PROJECT)
    assert {line for line in body["Env"] if "SOCKET" in line} == {
        "PIERHEAD_SOCKET=/run/pierhead/listen/abcd1234-2",
        "PIERHEAD_ADMIN_SOCKET=/run/pierhead/listen/abcd1234-2.admin",
    }
    read = read_labels(body["Labels"], REPLICA, PROJECT)
    assert read is not None
    assert read["has_socket"]
    of_a_port = create_body(spec_of({"listen": "tcp"}), REPLICA, "abcd1234", 2, (), PROJECT)
    read = read_labels(of_a_port["Labels"], REPLICA, PROJECT)
    assert read is not None
    assert not read["has_socket"]


def test_a_users_mount_is_no_directory_of_ours(tmp_path: Path) -> None:
    theirs = [
        {"Type": "bind", "Source": "/data", "Target": "/run/pierhead/sockets/x"},
        {"Target": "/t", "Type": "tmpfs"},
    ]
    part = {"Source": "shop_data", "Target": "/data", "VolumeOptions": {"Subpath": "a"}}
    SocketDirectory(tmp_path).prepare([*theirs, part])
    assert list(tmp_path.iterdir()) == []


def test_a_label_of_the_image_does_not_count() -> None:
    body = create_body(spec_of({"listen": "tcp"}), REPLICA, "abcd1234", 2, (), PROJECT)
    read = read_labels({"pierhead.listen": "socket"} | body["Labels"], REPLICA, PROJECT)
    assert read is not None
    assert not read["has_socket"]


def test_the_longest_names_make_a_path_that_a_socket_can_have() -> None:
    path = unix_address("s" * 40, f"{'p' * 63}-{'s' * 40}-abcd1234-1000").removeprefix("unix:")
    assert len(f"{path}.admin") <= 107


# --------------------------------------------------------------------------------------------------- the directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory with the parts of one service, as a replica's mounts ask for them."""
    SocketDirectory(tmp_path).prepare(spec_of({}, depends_on=["echo"]).container["HostConfig"]["Mounts"])
    return tmp_path


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_every_user_may_make_a_socket_and_nobody_in_the_directory_of_others(root: Path) -> None:
    assert (root / ".listen" / "ranker").stat().st_mode & 0o7777 == 0o1777
    assert (root / "echo").stat().st_mode & 0o022 == 0


def test_a_socket_is_seen_by_others_once_it_is_published(root: Path) -> None:
    published = root / "ranker" / "abcd1234-2"
    assert not SocketDirectory(root).publish(published)
    with listening(root / ".listen" / "ranker" / "abcd1234-2"):
        for _ in range(2):
            assert SocketDirectory(root).publish(published)
            assert connects(published)


def test_another_replica_of_that_name_takes_its_place(root: Path) -> None:
    made, published = root / ".listen" / "ranker" / "abcd1234-2", root / "ranker" / "abcd1234-2"
    with listening(made):
        assert SocketDirectory(root).publish(published)
    made.unlink()
    with listening(made):
        assert not connects(published)
        assert SocketDirectory(root).publish(published)
        assert connects(published)


@pytest.mark.parametrize("kind", ["link to a socket", "link to a socket that comes later", "file", "directory"])
def test_what_is_no_socket_is_not_published(root: Path, kind: str) -> None:
    """A link would lead HAProxy, and every client outside, to another service or to the Docker Engine."""
    made, published = root / ".listen" / "ranker" / "abcd1234-2", root / "ranker" / "abcd1234-2"
    other = root / ".listen" / "secret"
    if kind == "file":
        made.write_text("")
    elif kind == "directory":
        made.mkdir()
    else:
        made.symlink_to(other)
    if kind == "link to a socket":
        listening(other).close()
    assert not SocketDirectory(root).publish(published)
    listening(other).close() if not other.exists() else None
    assert not SocketDirectory(root).publish(published)
    assert not os.path.lexists(published)


def test_the_sockets_of_a_removed_replica_go(root: Path) -> None:
    for name in ("abcd1234-2", "abcd1234-2.admin", "abcd1234-2.lane", "abcd1234-20"):
        listening(root / ".listen" / "ranker" / name).close()
        assert SocketDirectory(root).publish(root / "ranker" / name)
    for _ in range(2):
        SocketDirectory(root).forget("ranker", REPLICA)
        SocketDirectory(root).forget("ranker", "shop_ranker_1")  # Compose's own name of a stray
    (root / ".listen" / "ranker" / "abcd1234-2").mkdir()
    SocketDirectory(root).forget("ranker", REPLICA)
    assert {path.name for path in root.rglob("*") if path.is_socket()} == {"abcd1234-20"}


# ------------------------------------------------------------------------------------------ probe, HAProxy, callers


CONTAINER = ReplicaContainer(
    id="c1",
    name=REPLICA,
    service="ranker",
    version="abcd1234",
    number=2,
    state=ContainerState.RUNNING,
    ip="10.0.0.2",
    has_socket=True,
    health=ReplicaHealth.READY,
)


def test_an_address_is_the_socket_of_a_replica_that_was_made_with_one() -> None:
    spec = spec_of({})
    assert service_address(CONTAINER, spec) == ADDRESS
    assert probe_address(CONTAINER, spec) == f"{ADDRESS}.admin"
    of_before = replace(CONTAINER, has_socket=False)
    assert service_address(of_before, spec) == "10.0.0.2:50051"
    assert probe_address(of_before, spec) == "10.0.0.2:9100"


async def test_a_replica_is_asked_at_its_socket_once_it_has_made_one(root: Path) -> None:
    own = root / ".listen" / "ranker"
    subject = Subject("c1", 0.0, "", ProbeSpec(9100, "/readyz"), managed=True, socket=f"unix:{root}/ranker/abcd1234-2")
    probe = HttpProbe(SocketDirectory(root).publish)
    assert (await probe(subject)).detail == NO_SOCKET
    pages = {("GET", "/readyz"): lambda _: Page(200, "application/json", b'{"state": "ready", "ongoing": 3}')}
    admin = AdminServer(pages)
    await admin.listen_at(str(own / "abcd1234-2.admin"))
    try:
        reading = await probe(subject)
        assert (reading.ok, reading.detail) == (False, NO_SOCKET), "requests would have no socket"
        with listening(own / "abcd1234-2"), listening(own / "abcd1234-2.lane"):
            reading = await probe(subject)
        assert sorted(path.name for path in (root / "ranker").iterdir()) == [
            "abcd1234-2", "abcd1234-2.admin", "abcd1234-2.lane",
        ]  # fmt: skip
        assert (reading.ok, reading.ongoing, reading.detail) == (True, 3, "200 from /readyz")
    finally:
        await admin.close()


async def test_a_kernel_that_keeps_containers_apart_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(path: str) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(asyncio, "open_unix_connection", refuse)
    subject = Subject("c1", 0.0, "", ProbeSpec(9100, "/readyz"), managed=True, socket=f"unix:{root}/ranker/abcd1234-2")
    detail = (await HttpProbe(lambda path: True)(subject)).detail
    assert detail.startswith("no connection to /readyz: Permission denied. SELinux")
    assert "PIERHEAD_LISTEN=tcp" in detail


CHECKED = ("check", "check-proto", "h1", "port", "9100", "inter", "500ms", "maxconn", "100")


def test_haproxy_checks_a_socket_at_the_socket_of_its_admin_pages() -> None:
    at = "unix@/run/pierhead/sockets/ranker/abcd1234-2"
    words = ("check", "check-proto", "h1", "addr", f"{at}.admin", "inter", "500ms", "maxconn", "100")
    assert server_words(ADDRESS, 7, CHECKED) == (at, "id", "7", *words)
    assert server_words("10.0.0.2:50051", 7, CHECKED) == ("10.0.0.2:50051", "id", "7", *CHECKED)
    config = "backend svc_ranker\n    # servers: check port 9100\n"
    line = ServerLine("svc_ranker", REPLICA, ADDRESS, 7)
    assert with_servers(config, [line]).splitlines()[2] == f"    server {REPLICA} {at} id 7 check addr {at}.admin"


@pytest.mark.parametrize(
    "path", ["/run/haproxy/admin.sock", "/run/pierhead/sockets/a/../b/1", "/run/pierhead/sockets/a b/1"]
)
def test_haproxy_gets_no_path_of_another_kind(path: str) -> None:
    with pytest.raises(RoutingError):
        server_words(f"unix:{path}", 1, ())


def test_haproxy_names_no_path_so_it_follows_from_the_names() -> None:
    head = "be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_port"
    rows = f"3 svc_ranker 1 {REPLICA} - 2 0 1 0\n3 svc_ranker 2 odd - 2 0 1 0\n3 svc_ranker 3 tcp 10.0.0.3 2 0 1 8080"
    found = {server.name: server.address for server, _ in servers(f"1\n# {head}\n{rows}\n", {})}
    assert found == {REPLICA: ADDRESS, "odd": "", "tcp": "10.0.0.3:8080"}


def test_callers_are_told_of_both() -> None:
    spec = spec_of({})
    seen = Observed(containers=(CONTAINER,))
    (endpoint,) = endpoints(Desired("p", {"ranker": spec}, {"ranker": 1}), seen)["ranker"].endpoints
    assert (endpoint.address, endpoint.socket) == ("10.0.0.2:50051", ADDRESS)
    seen = Observed(containers=(replace(CONTAINER, ip=None),))
    assert not endpoints(Desired("p", {"ranker": spec}, {"ranker": 1}), seen)["ranker"].endpoints, "it reaches nobody"
    seen = Observed(containers=(replace(CONTAINER, has_socket=False),))
    (endpoint,) = endpoints(Desired("p", {"ranker": spec}, {"ranker": 1}), seen)["ranker"].endpoints
    assert (endpoint.address, endpoint.socket) == ("10.0.0.2:50051", "")
