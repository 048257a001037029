"""A whole stack of its own for tests: own project name, own ports, own network, removed at the end.

Everything is done the way a user does it: `docker compose`, the controller's CLI, HTTP. Nothing here knows how the
controller works inside.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import docker
import docker.errors
from docker.models.containers import Container

from tests.harness.commands import Ended, run
from tests.harness.ports import free_ports as free_ports
from tests.harness.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
OURS = f"{zlib.crc32(bytes(ROOT)) % 10_000:04}{os.environ.get('PYTEST_XDIST_WORKER', '')}"
"""Of this clone, and of this process of a test run."""
PORTS = tuple(f"PIERHEAD_{name}_PORT" for name in ("HTTP", "GRPC", "API", "STATS", "PROMETHEUS"))

EVIDENCE = ROOT / "test-evidence"
"""Where tests leave what explains a failure."""

ANSWER_S = 120.0
"""Against what never answers: an edge that holds a request for a replica's start may take most of a minute."""

ENGINE_S = 300.0
"""Against an engine that never answers: a build may be silent for minutes, and so may an engine with much to start."""
COMMAND_S = 330.0
"""Against a command that never ends: `scale` gives up by itself after 300 s, and says what was missing."""


@dataclass(frozen=True)
class Answer:
    """An HTTP answer; `json` fails where the body is none."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Stack:
    """One Compose project with its controller. `apps` are file names below the clone's root.

    Other clones, and other processes of one test run, have projects of other names: this one's number is added.
    """

    project: str
    apps: Sequence[str]
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.project = f"{self.project}-{OURS}"
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.env = {
            **os.environ,
            **{name: str(port) for name, port in self.ports.items()},
            "COMPOSE_PROJECT_NAME": self.project,
            "COMPOSE_FILE": ":".join(["compose/compose.yaml", *self.apps]),
            "COMPOSE_PROFILES": "",
            "PWD": str(ROOT),
            "PIERHEAD_ROUTES": "shown",
            **self.extra_env,
        }
        self.docker = docker.from_env(environment=self.env, timeout=int(ENGINE_S))
        self._forgotten_at = 0.0

    # ------------------------------------------------------------------------------------------------- as a user does

    def compose(self, *arguments: str, timeout_s: float = COMMAND_S) -> Ended:
        """Run `docker compose ...` in the clone's root, with this stack's environment."""
        return run(["docker", "compose", *arguments], timeout_s, ROOT, self.env)

    def up(self) -> None:
        done = self.compose("up", "--detach", "--no-build", "--remove-orphans")
        assert done.returncode == 0, done.stderr

    def sockets_of(self, service: str) -> list[Path]:
        """The sockets of a service's replicas as this machine sees them; that of the admin pages ends with `.admin`."""
        short = self._short_path
        short.unlink(missing_ok=True)
        short.symlink_to(self.docker.volumes.get(f"{self.project}_replica-sockets").attrs["Mountpoint"])
        addresses = [replica["address"] for replica in self.service(service)["replicas"]]
        return [short / service / address.rpartition("/")[2] for address in addresses]

    @property
    def _short_path(self) -> Path:
        return Path(f"/tmp/{self.project}")  # the paths of sockets are short

    def down(self) -> None:
        """Remove everything; what the controller could not (it is dead, say) goes with the orphans."""
        self._short_path.unlink(missing_ok=True)
        for orphans in ([], ["--remove-orphans"]):
            if not self._is_there():
                return
            done = self.compose("down", "--volumes", *orphans)
            assert done.returncode == 0, done.stderr

    def _is_there(self) -> bool:
        """Whether the engine has anything of the project."""
        of_ours, engine = {"label": f"com.docker.compose.project={self.project}"}, self.docker.api
        listings = (
            engine.containers(all=True, filters=of_ours),
            engine.networks(filters=of_ours),
            engine.volumes(filters=of_ours)["Volumes"],
        )
        return any(listings)

    @contextlib.contextmanager
    def running(self, evidence: str = "") -> Iterator[Self]:
        """From nothing to a controller that answers; in the end keeps what explains a failure, and removes everything.

        `evidence`: name of the directory for it, the project's unless given.
        """
        try:
            self.renew()
            yield self
        finally:
            self.save_evidence(EVIDENCE / (evidence or self.project))
            self.down()

    def renew(self) -> None:
        """Start from nothing, whatever there is."""
        self.down()
        self._forgotten_at = 0.0
        self.up()
        eventually(lambda: self.api("/healthz").status == 200, "the controller is up")

    def pierhead(self, *arguments: str, timeout_s: float = COMMAND_S) -> Ended:
        """Run the controller's CLI, as every make target does."""
        return self.compose("exec", "-T", "controller", "pierhead", *arguments, timeout_s=timeout_s)

    def scale(self, service: str, replicas: int) -> None:
        done = self.pierhead("scale", service, str(replicas))
        assert done.returncode == 0, done.stdout + done.stderr

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.ports['PIERHEAD_HTTP_PORT']}{path}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.ports['PIERHEAD_GRPC_PORT']}"

    def get(self, path: str) -> Answer:
        return request(self.url(path))

    def post(self, path: str, body: bytes | object) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return request(self.url(path), "POST", raw, {"Content-Type": "application/json"})

    def api(self, path: str, method: str = "GET", body: object | None = None) -> Answer:
        raw = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.ports['PIERHEAD_API_PORT']}{path}"
        return request(url, method, raw, {"Content-Type": "application/json"})

    # -------------------------------------------------------------------------------------------- states of the world

    def container(self, compose_service: str) -> Container:
        """The container of one of the stack's own services (haproxy, controller, prometheus)."""
        labels = [f"com.docker.compose.project={self.project}", f"com.docker.compose.service={compose_service}"]
        found = self.docker.containers.list(all=True, filters={"label": [*labels, "com.docker.compose.oneoff=False"]})
        assert len(found) == 1, f"{compose_service}: {found}"
        return found[0]

    def replicas(self, service: str | None = None) -> dict[str, Container]:
        """Replica containers by name, in whatever state, of one service or all."""
        labels = [f"pierhead.project={self.project}"] + ([f"pierhead.service={service}"] if service else [])
        found = self.docker.containers.list(all=True, filters={"label": labels}, ignore_removed=True)
        return {str(container.name): container for container in found}

    def replica_ids(self, service: str | None = None) -> set[str]:
        return {str(container.id) for container in self.replicas(service).values()}

    def service(self, name: str) -> Any:
        """One service as the API tells it."""
        answer = self.api(f"/api/v1/services/{name}")
        assert answer.status == 200, answer.body
        return answer.json

    def is_settled(self, service: str, replicas: int) -> bool:
        """Whether exactly that many replicas exist and are ready."""
        row = self.service(service)
        return bool(row["wanted"] == row["ready"] == replicas == len(row["replicas"]))

    def wait_settled(self, within_s: float = 120.0, **replicas: int) -> None:
        for name, count in replicas.items():
            eventually(
                lambda name=name, count=count: self.is_settled(name, count),  # type: ignore[misc]
                f"{name} has {count} ready replicas and no other",
                within_s,
            )

    def settle(self, **replicas: int) -> None:
        """Wait until the services have these replicas and there is nothing left to do, and forget the events so far."""
        self.wait_settled(**replicas)
        # A replica that is ready has no server yet, and one that is gone may have routes: the next step is planned.
        eventually(lambda: self.plan_text() == "nothing to do", "there is nothing else")
        self.forget_events()

    def plan_text(self) -> str:
        return self.api("/api/v1/plan?format=text").body.decode().strip()

    def events(self) -> list[Any]:
        """What happened since the last `forget_events`, oldest first."""
        events = self.api("/api/v1/events?limit=1000").json["events"]
        return [event for event in events if event["last_at"] > self._forgotten_at]

    def messages(self, kind: str) -> list[str]:
        """What the events of a kind say."""
        return [event["message"] for event in self.events() if event["kind"] == kind]

    def gave_way(self, service: str) -> int:
        """How often it did; an event that repeats is one with a number."""
        found = [event for event in self.events() if event["kind"] == "autoscale" and event["service"] == service]
        return sum(event["times"] for event in found if "gave way to" in event["message"])

    def forget_events(self) -> None:
        """Leave out of `events` everything that has happened so far."""
        self._forgotten_at = max((float(event["last_at"]) for event in self.events()), default=self._forgotten_at)

    def haproxy_worker(self) -> int:
        """Process id (of this machine) of HAProxy's youngest worker: the same before and after = it was not reloaded.

        Older ones may be there that still end: a new stack's first route is a reload.
        """
        return max(self._haproxy_processes()[1], key=_started)

    def _haproxy_processes(self) -> tuple[list[int], list[int]]:
        """The master, which the entrypoint has started, and its workers."""
        masters = _children(int(self.container("haproxy").attrs["State"]["Pid"]))
        return masters, [worker for master in masters for worker in _children(master)]

    def kill_process(self, container: Container, signal_name: str = "KILL") -> float:
        """Kill a container's first process from outside, as a crash would (`docker kill` counts as a manual stop).

        Returns when (time.time()).
        """
        container.reload()
        pid = int(container.attrs["State"]["Pid"])
        assert pid > 0, f"{container.name} does not run, and 0 would be everybody in this test's own group"
        subprocess.run(["kill", f"-{signal_name}", str(pid)], check=True)
        return time.time()

    def hang_haproxy(self) -> float:
        """Stop HAProxy's processes from outside, so that the kernel still accepts connections and nothing answers.

        Returns when (time.time()).
        """
        hung_at = time.time()
        for processes in self._haproxy_processes():
            for process in processes:
                os.kill(process, signal.SIGSTOP)
        return hung_at

    def save_evidence(self, directory: Path) -> None:
        """Keep what explains a failure: status, plan, events, logs of everything.

        What cannot be had is said in its place: a replica may go while it is looked at, and nothing of that may keep a
        stack from being removed.
        """
        directory.mkdir(parents=True, exist_ok=True)
        logs = ("logs", "--no-color", "--timestamps", "--tail", "2000")
        evidence: dict[str, Callable[[], Any]] = {
            "services.json": lambda: self.api("/api/v1/services").body,
            "plan.json": lambda: self.api("/api/v1/plan").body,
            "events.json": lambda: self.api("/api/v1/events?limit=1000").body,
            "ps.txt": lambda: bytes(self.compose("ps", "--all").stdout, "utf-8"),
            "logs.txt": lambda: bytes(self.compose(*logs).stdout, "utf-8"),
        }
        with contextlib.suppress(*UNAVAILABLE):
            evidence |= {f"{name}.log": partial(one.logs, tail=500) for name, one in self.replicas().items()}
        for name, content in evidence.items():
            try:
                (directory / name).write_bytes(content())
            except UNAVAILABLE as error:
                (directory / name).write_text(f"not available: {type(error).__name__}: {error}")


UNAVAILABLE = (OSError, docker.errors.DockerException, subprocess.SubprocessError)
"""The API does not answer, a container is being removed, a command does not end."""


class _Socket(http.client.HTTPConnection):
    """To a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get_at(path: Path, target: str) -> Answer:
    """GET at a Unix socket; any status is an answer, only a broken connection raises (OSError)."""
    with contextlib.closing(_Socket(str(path))) as connection:
        try:
            connection.request("GET", target)
            return _read(connection.getresponse())
        except http.client.HTTPException as error:
            raise ConnectionError(f"{path}: {type(error).__name__}: {error}") from error


def address_of(container: Container) -> str:
    """Its IP address on the first of its networks, as it is now."""
    container.reload()
    return str(next(iter(container.attrs["NetworkSettings"]["Networks"].values()))["IPAddress"])


def request(
    url: str, method: str = "GET", body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """One HTTP request; any status is an answer, only a broken connection raises (OSError)."""
    asked = urllib.request.Request(url, data=body, method=method, headers=dict(headers or {}))
    try:
        try:
            with urllib.request.urlopen(asked, timeout=ANSWER_S) as response:
                return _read(response)
        except urllib.error.HTTPError as error:
            with error:
                return _read(error)
    except http.client.HTTPException as error:  # it broke in the midst of the answer
        raise ConnectionError(f"{url}: {type(error).__name__}: {error}") from error


def _read(response: Any) -> Answer:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(response.status, headers, response.read())


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def _started(pid: int) -> int:
    """When a process was started, in ticks of the kernel's clock; -1 for one that has already ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return -1
