"""`up` and `build-images`: what is refused, built, started and waited for; decided in memory."""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from pierhead.llm_app import llm_gateway

from controller.errors import ControllerError, InvalidRequest
from controller.swarm.tool.stack import SwarmStack
from controller.tool.project import resolved
from controller.tool.project.apps import chosen_files
from controller.tool.project.engines import ProjectEngine
from controller.tool.project.images import build_images
from controller.tool.project.on_machine import OnMachine
from controller.tool.project.on_nodes import OnNodes
from controller.tool.project.programs import Done, Programs, Told
from controller.tool.project.project import Project
from controller.tool.project.stack import NotUp, ProjectStack
from controller.tool.project.up import StackUp
from tests.fakes.fake_programs import LOOKS, FakePrograms
from tests.harness import certificates, tokens
from tests.harness.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
HTTP = "http://127.0.0.1"
ANOTHERS = "/home/somebody/pierhead/compose"
SERVICES: dict[str, Any] = {
    "a": {"image": "mine/a", "x-serve": {"route": "/a"}},
    "controller": {"environment": {"COMPOSE_FILE": "a.yaml", "PIERHEAD_DEPLOY": "auto"}},
    "echo": {"image": "pierhead/echo", "x-serve": {"route": "/echo"}},
    "gate": llm_gateway({"qwen": "llm-qwen"}, image="mine/gate"),
    "grpc-only": {"x-serve": {"grpc_services": ["a.B"], "route": None}},
    "haproxy": {"environment": {"PIERHEAD_LLM_MODELS": "of no gateway"}},
    "recsys": {"x-serve": {"route": "/mine"}},
}


ALONE = StackUp._alone


@pytest.fixture(autouse=True)
def _no_lock_on_this_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StackUp, "_alone", nullcontext)


def config(services: Mapping[str, Any]) -> str:
    return yaml.safe_dump({"name": "pierhead", "services": dict(services)})


@dataclass
class User:
    """One who types `make up`, or `pierhead up` in a project; `docker` answers before what a fine machine says."""

    docker: Mapping[str, Done | str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    root: Path = ROOT
    services: Mapping[str, Any] = field(default_factory=lambda: SERVICES)
    listening: frozenset[str] = frozenset()
    statuses: Mapping[str, int] = field(default_factory=dict)
    refusal: str = ""
    """What the controller's reader says of the files."""
    said: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    read: list[Mapping[str, str]] = field(default_factory=list)
    """The variables that the files were read with."""

    def __post_init__(self) -> None:
        fine = {
            r"\.sh( |$)": "",
            "^docker compose .*--dry-run": "",
            "^docker compose .*config$": config(self.services),
            "^docker compose .*(build|up --detach)": "",
            "^docker ps --filter .*service=": "4f1d\n",
            "^docker (ps|info|image|compose ps|compose config)": "",
            " (status|wait-ready)": "all ready\n",
        }
        self.programs = FakePrograms({**self.docker, **fine}, self.listening, self.statuses)
        own = {"COMPOSE_PROJECT_NAME": "pierhead", "COMPOSE_FILE": "a.yaml", "COMPOSE_PROFILES": ""}
        environment = {**own, "PIERHEAD_CDI_DIRS": "/nowhere", "PIERHEAD_PROC": "/nowhere", **self.variables}
        self.stack = ProjectStack(Project(self.root), environment, self.programs)

    def reads(self, _: Path, variables: Mapping[str, str]) -> list[str]:
        self.read.append(variables)
        if self.refusal:
            raise InvalidRequest(self.refusal)
        return ["services.a: a warning"]

    def types_up(self) -> None:
        on_swarm = self.stack.setting("PIERHEAD_ENGINE") == "swarm"
        one_machine = OnMachine(self.stack, self.reads, self.said.append, self.warnings.append)
        StackUp(
            self.stack,
            OnNodes(self.stack, ProjectEngine.SWARM) if on_swarm else one_machine,
            self.said.append,
            self.warnings.append,
        ).run()

    def is_refused(self, kind: type[ControllerError] = InvalidRequest) -> str:
        with pytest.raises(kind) as refusal:
            self.types_up()
        return str(refusal.value)

    def calls(self, pattern: str) -> list[str]:
        return [call for call in self.programs.calls if re.search(pattern, call)]


CHANGES = r"^docker (compose .*(build|up)\b|pull)|base-images|stack up$"


def test_up_goes_from_the_engine_to_addresses() -> None:
    user = User()
    user.types_up()
    assert user.programs.steps == [
        "Building the images",
        "Starting the stack",
        "Waiting for the controller",
        "Waiting until every app answers",
    ]
    assert [call.rpartition("/")[2] for call in user.calls(r"\.sh$")][:2] == ["engine.sh", "base-images.sh"]
    (asked,) = user.calls("wait-ready --serving --quiet --timeout 300")
    assert user.calls("up --detach|wait-ready")[-1] == asked
    assert user.calls(" status$")[-1] == user.programs.calls[-1]
    assert user.programs.variables[-1]["PIERHEAD_API_URL"] == "", "this stack is meant, whatever the shell names"
    addresses = [line.split() for line in "\n".join(user.said).splitlines() if line.startswith("  ")]
    assert addresses == [
        ["a", f"{HTTP}:8000/a"],
        ["echo", f"{HTTP}:8000/echo?message=hi"],
        ["gate", f"{HTTP}:8000/v1/models"],
        ["recsys", f"{HTTP}:8000/mine"],
        ["gRPC", "127.0.0.1:9000"],
        ["console", f"{HTTP}:8100"],
        ["HAProxy", f"{HTTP}:8404"],
        ["Prometheus", f"{HTTP}:9090"],
    ]
    assert user.warnings == ["warning: services.a: a warning"]


def test_what_serves_is_waited_for_and_rollouts_in_progress_are_reported() -> None:
    rollout = "ranker is still rolling out; run `make deploy` to wait"
    user = User({"wait-ready": f"2 services, 4 replicas, all ready\n{rollout}\n"}, {"PIERHEAD_UP_TIMEOUT_S": "7"})
    user.types_up()
    assert rollout in user.said
    assert "2 services, 4 replicas, all ready" not in user.said, "the status says as much"
    assert len(user.calls("wait-ready .* --timeout 7")) == 1
    assert [call for call in user.calls("GET") if "message" in call] == [f"GET {HTTP}:8000/echo?message=hi"]


# ------------------------------------------------------------------------------ what is refused before anything changes


@pytest.mark.parametrize(
    ("docker", "words"),
    [
        ({r"ps --filter .*working_dir": f"\n{ANOTHERS}\n"}, 'a stack named "pierhead" runs from another clone: /home/'),
        (
            {r"ps --filter .*working_dir": Done(124, errors="docker did not end within 10 s")},
            'it is not known whether another clone started the stack named "pierhead": `docker ps` failed (docker did',
        ),
        (
            {"config$": Done(15, errors="yaml: line 3\n")},
            "Compose cannot read the stack's files (a.yaml): yaml: line 3",
        ),
        ({"config$": "{"}, "printed what is not YAML"),
    ],
)
def test_a_refusal_says_why_and_changes_nothing(docker: dict[str, Done | str], words: str) -> None:
    user = User(docker)
    assert words in user.is_refused()
    assert user.calls(CHANGES) == []


def test_the_script_reports_an_engine_that_is_not_available() -> None:
    user = User({"engine.sh": Done(2)})
    assert user.is_refused(Told) == ""
    assert user.programs.calls == [f"{ROOT}/compose/machine/engine.sh"]


def test_the_files_are_read_as_the_controller_will_and_before_anything_is_built() -> None:
    user = User(variables={"PATH": "/bin", "OF_THE_SHELL": "1"}, refusal="services.web.x-server: unknown key")
    assert user.is_refused() == "services.web.x-server: unknown key"
    assert user.read == [{"PATH": "/bin", "COMPOSE_FILE": "a.yaml", "PIERHEAD_DEPLOY": "auto"}]
    assert user.calls(CHANGES) == []


PORT = {"mode": "ingress", "target": 5432, "published": "7000", "protocol": "tcp"}


@pytest.mark.parametrize(
    ("of_stack", "port", "name"),
    [
        ("7000", {}, "PIERHEAD_STATS_PORT"),
        ("8404", {}, "services.db.ports"),
        ("8404", {"host_ip": "127.0.0.1"}, "services.db.ports"),
        ("7000", {"host_ip": "0.0.0.0"}, "PIERHEAD_STATS_PORT"),
        ("8404", {"host_ip": "10.0.0.1"}, ""),
        ("8404", {"protocol": "udp"}, ""),
        ("8404", {"published": "7001"}, ""),
    ],
)
@pytest.mark.parametrize("listener", ["container db-1", "process postgres (7)", "another program"])
def test_up_refuses_a_port_that_is_taken(of_stack: str, port: dict[str, str], name: str, listener: str) -> None:
    kind, _, who = listener.partition(" ")
    said: dict[str, Done | str] = {
        "ps --filter publish=7000 --format": f"{listener}\n" if kind == "container" else "",
        "^ss .*7000": 'users:(("postgres",pid=7,fd=3))\n' if kind == "process" else "",
    }
    services = {**SERVICES, "db": {"ports": [PORT | port]}}
    user = User(said, {"PIERHEAD_STATS_PORT": of_stack}, services=services, listening=frozenset({f"{HTTP}:7000"}))
    if not name:
        user.types_up()
        return
    first, last = user.is_refused().splitlines()
    assert first == f"port 7000 ({name}) is taken by {listener}."
    remedy = "for this time: make up PIERHEAD_STATS_PORT=...." if "STATS" in name else "Stop that, or write another"
    assert remedy in last
    assert user.calls(CHANGES) == [], who


def test_a_port_of_this_stacks_own_is_not_taken() -> None:
    user = User({"ps --quiet --filter publish=8000": "4f1d\n"}, listening=frozenset({f"{HTTP}:8000"}))
    user.types_up()
    assert "Starting the stack" in user.programs.steps


def test_a_port_that_was_taken_while_the_stack_was_built_is_reported() -> None:
    """Not only in the engine's words."""
    user = User({"up --detach": Done(1)})
    in_time, listens = set[str](), user.programs.listens

    def begun(address: str) -> bool:
        in_time.add(address)
        return listens(address) or (bool(user.calls("up --detach")) and address.endswith(":9000"))

    user.programs.listens = begun  # type: ignore[method-assign]
    assert "port 9000 (PIERHEAD_GRPC_PORT) is taken by another program." in user.is_refused()


@pytest.mark.parametrize(
    ("variables", "host", "is_told"),
    [
        ({}, "127.0.0.1", True),
        ({"PIERHEAD_BIND": "127.0.0.2"}, "127.0.0.2", True),
        ({"PIERHEAD_BIND": "0.0.0.0"}, "127.0.0.1", False),
        ({"PIERHEAD_BIND": "[::]"}, "127.0.0.1", False),
        ({"PIERHEAD_BIND": "10.1.2.3"}, "10.1.2.3", False),
    ],
)
def test_who_reaches_the_ports_is_told(variables: Mapping[str, str], host: str, is_told: bool) -> None:
    user = User(variables=variables)
    user.types_up()
    told = "\n".join(user.said)
    assert f"http://{host}:8000/echo" in told
    assert f"gRPC         {host}:9000" in told
    assert "console      http://127.0.0.1:8100" in told
    assert ("The line PIERHEAD_BIND=0.0.0.0 in .env opens them" in told) is is_told


def test_an_address_of_another_machine_is_refused_before_anything_is_stopped() -> None:
    user = User(variables={"PIERHEAD_BIND": "10.99.99.99"})
    assert "PIERHEAD_BIND: this machine has no address 10.99.99.99" in user.is_refused()
    assert not user.calls("up --detach")


@pytest.mark.parametrize("engine", ["docker", "swarm"])
def test_settings_that_the_controller_would_refuse_are_refused_before_it_is_stopped(engine: str) -> None:
    wrong = {"PIERHEAD_ENGINE": engine, "PIERHEAD_MAX_CONNECTIONS": "many", "PIERHEAD_TRUSTED_PROXIES": "10.0.0.1/8"}
    user = User(variables={"PIERHEAD_ENGINE": engine}, services={**SERVICES, "controller": {"environment": wrong}})
    network = "expected an address or a network such as 10.0.0.0/8, with zeros after its first 8 bits"
    assert user.is_refused().splitlines() == [
        "the controller could not start with these settings:",
        "PIERHEAD_MAX_CONNECTIONS: expected an integer between 1 and 30000, found 'many'",
        f"PIERHEAD_TRUSTED_PROXIES: {network}, found '10.0.0.1/8'",
        "Correct them in .env (or in the shell) and repeat. Nothing was started; running services are not affected.",
    ]
    assert user.calls(CHANGES) == []


@pytest.mark.parametrize(
    ("listening", "is_taken"), [("http://10.1.2.3:8000", True), (f"{HTTP}:8000", False), (f"{HTTP}:8100", True)]
)
def test_a_port_is_taken_at_the_address_where_it_is_published(listening: str, is_taken: bool) -> None:
    user = User(variables={"PIERHEAD_BIND": "10.1.2.3"}, listening=frozenset({listening}))
    if is_taken:
        assert "is taken by another program" in user.is_refused()
    else:
        user.types_up()


def test_addresses_of_this_machine() -> None:
    programs = Programs()
    assert [programs.has_address(host) for host in ("127.0.0.1", "0.0.0.0", "127.9.9.9")] == [True] * 3
    assert not programs.has_address("203.0.113.77"), "kept for documentation (RFC 5737)"
    assert programs.has_address("nonsense"), "Compose says what it is"
    assert "127.0.0.1" in programs.addresses_of("localhost")
    assert (programs.addresses_of("::1"), programs.addresses_of("no.such.invalid")) == (["::1"], [])


# ------------------------------------------------------------------------------------------------------------------ TLS


TLS = {"PIERHEAD_TLS": "files", "PIERHEAD_TLS_DIR": "certs", "PIERHEAD_HTTPS_PORT": "9443"}


@pytest.fixture
def project_with_certificates(tmp_path: Path) -> Path:
    """A directory like a project's, with one certificate."""
    certificates.write(tmp_path / "certs" / "a.pem", *certificates.made("a", now=time.time(), begins=-80, ends=10))
    return tmp_path


def test_with_tls_the_addresses_are_https_and_the_stack_has_one_more_file(project_with_certificates: Path) -> None:
    user = User(variables=TLS, root=project_with_certificates)
    user.types_up()
    told = "\n".join(user.said)
    assert "https://127.0.0.1:9443/mine" in told
    assert "http://127.0.0.1:8000" not in told
    assert "console      http://127.0.0.1:8100" in told
    (ending, _) = user.warnings
    assert re.fullmatch(r"warning: /.*/certs/a\.pem: its certificate ends on .*: put a new one in its place", ending)


@pytest.mark.parametrize(
    ("root", "named", "files"),
    [
        (ROOT, "compose/compose.yaml:b.yaml", "compose/compose.yaml:compose/tls.yaml:b.yaml"),
        (ROOT, "compose/compose.yaml:compose/tls.yaml:b.yaml", "compose/compose.yaml:compose/tls.yaml:b.yaml"),
        (Path("/nowhere"), "a.yaml:.pierhead/stack.yaml", "a.yaml:.pierhead/tls.yaml"),
        (Path("/nowhere"), "a.yaml:.pierhead/tls.yaml", "a.yaml:.pierhead/tls.yaml"),
    ],
)
def test_the_file_that_publishes_https(root: Path, named: str, files: str) -> None:
    assert User(variables={**TLS, "COMPOSE_FILE": named}, root=root).stack.files == files
    assert User(variables={"COMPOSE_FILE": named}, root=root).stack.files == named


ACME = {"PIERHEAD_TLS": "acme", "PIERHEAD_HTTP_PORT": "80", "PIERHEAD_BIND": "0.0.0.0"}


@pytest.mark.parametrize(
    ("root", "named", "files"),
    [
        (ROOT, "compose/compose.yaml:b.yaml", "compose/compose.yaml:compose/tls.yaml:compose/acme.yaml:b.yaml"),
        (Path("/nowhere"), "a.yaml:.pierhead/stack.yaml", "a.yaml:.pierhead/acme.yaml"),
    ],
)
def test_the_files_with_which_an_acme_server_is_asked(root: Path, named: str, files: str) -> None:
    stack = User(variables={**ACME, "COMPOSE_FILE": named}, root=root).stack
    assert stack.files == files
    assert User(variables={**ACME, "COMPOSE_FILE": files}, root=root).stack.files == files


@pytest.mark.parametrize("closed", [{"PIERHEAD_HTTP_PORT": "8000"}, {"PIERHEAD_BIND": "127.0.0.1"}])
def test_an_acme_server_comes_to_port_80(tmp_path: Path, closed: Mapping[str, str]) -> None:
    user = User(variables=ACME, root=tmp_path)
    user.types_up()
    assert not [words for words in user.warnings if "ACME" in words]
    user = User(variables={**ACME, **closed}, root=tmp_path)
    user.types_up()
    assert "warning: an ACME server asks at port 80 of each name, and HTTP listens at " in "\n".join(user.warnings)


ALERTS = {"PIERHEAD_ALERT_WEBHOOK": "https://pager.example/hook"}


@pytest.mark.parametrize(
    ("root", "named", "files"),
    [
        (ROOT, "compose/compose.yaml:b.yaml", "compose/compose.yaml:b.yaml:compose/alerts.yaml"),
        (ROOT, "compose/compose.yaml:compose/alerts.yaml:b.yaml", "compose/compose.yaml:compose/alerts.yaml:b.yaml"),
        (Path("/nowhere"), "a.yaml:.pierhead/stack.yaml", "a.yaml:.pierhead/stack.yaml:.pierhead/alerts.yaml"),
    ],
)
def test_a_receiver_adds_the_file_of_alertmanager(root: Path, named: str, files: str) -> None:
    stack = User(variables={**ALERTS, "COMPOSE_FILE": named}, root=root).stack
    assert stack.files == files
    assert "alertmanager" in stack.own_services
    assert User(variables={**ALERTS, "COMPOSE_FILE": files}, root=root).stack.files == files
    assert User(variables={"PIERHEAD_ALERT_SMTP": "a:25", "COMPOSE_FILE": named}, root=root).stack.files == named


def test_on_a_swarm_a_profile_has_alertmanager() -> None:
    own = {"PIERHEAD_ENGINE": "swarm", "COMPOSE_FILE": "compose/swarm.yaml", "PIERHEAD_REGISTRY": "here"}
    for more, profiles in ((ALERTS, "mine,registry,alertmanager"), ({}, "mine,registry")):
        stack = User(variables={**own, **more, "COMPOSE_PROFILES": "mine"}).stack
        assert (stack.files, stack.profiles) == ("compose/swarm.yaml", profiles)


def test_what_is_left_of_alertmanager_is_removed() -> None:
    for variables, is_removed in (({}, True), (ALERTS, False)):
        user = User({"-alertmanager-1": "1a2b pierhead/alertmanager:0.1\n"}, variables=variables)
        user.types_up()
        assert bool(user.calls("rm --force 1a2b")) is is_removed, variables


def test_what_is_left_of_acme_is_removed_and_a_service_of_that_name_is_not() -> None:
    cases: list[tuple[Mapping[str, str], str, bool]]
    cases = [({}, "pierhead/acme:0.1", True), ({}, "mine", False), (ACME, "pierhead/acme:0.1", False)]
    for variables, image, is_removed in cases:
        user = User({"-acme-1": f"1a2b {image}\n"}, variables=variables)
        user.types_up()
        assert bool(user.calls("rm --force 1a2b")) is is_removed, (variables, image)


def test_the_authority_of_a_private_acme_server_must_be_readable_in_the_container(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    user = User(variables={**ACME, "PIERHEAD_ACME_CA": "ca.pem"}, root=tmp_path / "project")
    file = user.root / "ca.pem"
    assert f"PIERHEAD_ACME_CA: {file} cannot be read (No such file or directory)" in user.is_refused()
    file.write_text("nonsense")
    file.chmod(0o600)
    assert f"PIERHEAD_ACME_CA: others cannot read {file}, so the container acme cannot: chmod 644" in user.is_refused()
    file.chmod(0o644)
    assert f"PIERHEAD_ACME_CA: {file} has no certificate that can be read" in user.is_refused()
    file.write_text(certificates.made("ca.example", now=time.time())[1])
    user.types_up()
    for outside in ("../ca.pem", str(file)):
        user = User(variables={**ACME, "PIERHEAD_ACME_CA": outside}, root=user.root)
        assert f"PIERHEAD_ACME_CA: {outside} is not in {user.root}: copy the file there" in user.is_refused()
    assert user.calls(CHANGES) == []


def test_with_tls_an_app_of_the_clone_is_asked_over_https() -> None:
    user = User(variables=ACME)
    user.types_up()
    assert user.calls("GET https://127.0.0.1:8443/echo")
    assert not user.calls("GET http://127.0.0.1:80/")


def test_certificates_that_cannot_be_used_are_refused_before_anything_changes(project_with_certificates: Path) -> None:
    file = project_with_certificates / "certs" / "a.pem"
    file.chmod(0o644)
    user = User(variables=TLS, root=project_with_certificates)
    assert user.is_refused().splitlines() == [
        f"{file}: others can read its private key (mode 644): chmod 600 {file}",
        "Nothing was started; running services are not affected.",
    ]
    assert user.calls(CHANGES) == []


def test_a_port_of_https_that_is_taken(project_with_certificates: Path) -> None:
    listening = frozenset({f"{HTTP}:9443"})
    user = User(variables=TLS, root=project_with_certificates, listening=listening)
    assert "port 9443 (PIERHEAD_HTTPS_PORT) is taken by another program." in user.is_refused()
    User(variables={**TLS, "PIERHEAD_TLS": "off"}, listening=listening).types_up()


def test_on_many_machines_certificates_come_from_files(project_with_certificates: Path) -> None:
    swarm = {**TLS, "PIERHEAD_ENGINE": "swarm", "COMPOSE_FILE": "compose.yaml"}
    user = User(variables={**swarm, "PIERHEAD_TLS": "acme"}, root=project_with_certificates)
    assert user.is_refused().startswith("PIERHEAD_TLS=acme is for one machine, not for PIERHEAD_ENGINE=swarm, where ")
    (project_with_certificates / "certs" / "a.pem").chmod(0o644)
    user = User(variables=swarm, root=project_with_certificates)
    assert "others can read its private key" in user.is_refused()
    assert user.calls(CHANGES) == []


# --------------------------------------------------------------------------------------------------------------- tokens


TOKENS: dict[str, Any] = {**SERVICES, "a": {"image": "mine/a", "x-serve": {"route": "/a", "auth": "jwt"}}}


def test_public_keys_are_needed_where_a_service_takes_tokens(tmp_path: Path) -> None:
    variables = {"PIERHEAD_JWT_DIR": "idp", "PIERHEAD_JWT_ALGORITHM": "es256"}
    User(variables=variables, root=tmp_path).types_up()
    user = User(variables=variables, root=tmp_path, services=TOKENS)
    missing, nothing_started = user.is_refused().splitlines()
    assert missing.startswith(f"PIERHEAD_JWT_DIR: {tmp_path}/idp cannot be read (No such file or directory). Make it, ")
    assert nothing_started == "Nothing was started; running services are not affected."
    certificates.write(tmp_path / "idp" / "a.pem", tokens.public(tokens.made("ES384")))
    assert "a.pem: its key is secp384r1, and PIERHEAD_JWT_ALGORITHM=ES256 needs secp256r1" in user.is_refused()
    assert user.calls(CHANGES) == []
    certificates.write(tmp_path / "idp" / "a.pem", tokens.public(tokens.made("ES256")))
    user.types_up()


def test_images_that_are_missing_are_named() -> None:
    docker: dict[str, Done | str] = {
        "up --detach": Done(1),
        "config --images": "mine/a\nb\nmine/a\n",
        "inspect mine/a": Done(1),
    }
    words = User(docker).is_refused(NotUp)
    assert "Not on this machine: mine/a. Check the names; for a private registry: docker login." in words


GPU_FILES: dict[str, Any] = {
    "controller": {"environment": {"gpu": "none"}, "deploy": {"resources": {"limits": {"devices": [1]}}}},
    "llm": {"deploy": {"resources": {"reservations": {"devices": [1]}}}},
    "llm-gateway": {"x-serve": {"llm": {"gpu": {"none": True}}}},
    "7": {"gpus": [{"count": 1}]},
    "ranker": {"x-serve": {"gpu": {"memory": "16GiB"}}},
    "recsys": {"gpus": [], "x-serve": {"autoscale": {"gpu": {"none": True}}}},
}


def test_every_service_that_asks_for_a_gpu_where_docker_knows_none_is_named(tmp_path: Path) -> None:
    assert resolved.with_gpus(GPU_FILES) == ["llm", "7", "ranker"]

    def told(runtimes: str = "{}", services: Mapping[str, Any] = GPU_FILES) -> str:
        cdi = {"PIERHEAD_CDI_DIRS": f"{tmp_path}/cdi:{tmp_path}/run"}
        user = User({"info .*Runtimes": runtimes}, cdi, services=services, refusal="no further")
        user.is_refused()
        return " ".join(user.warnings)

    assert "these services ask for one: 7 llm ranker. They will stay PENDING." in told()
    assert told(services={"echo": {"x-serve": {"replicas": 1}}}) == ""
    assert told(runtimes='{"nvidia":{}}') == ""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "nvidia.yaml").touch()
    assert told() == ""


def test_services_of_other_files_are_named_before_they_go() -> None:
    user = User({r"ps --filter label=pierhead\.project=": "echo\nnightly\n\nranker\nrecsys\n"})
    user.types_up()
    (told,) = (line for line in user.warnings if "removed" in line)
    assert "not among the chosen files, so they are removed: nightly ranker. To keep them" in told
    assert user.calls("config$")[0] == "docker compose --profile * config", "of profiles that are not chosen, too"


@pytest.mark.parametrize("change", ["Recreate", "Running"])
def test_up_says_that_it_replaces_haproxy_and_does_so_before_the_rest(change: str) -> None:
    planned = f" DRY-RUN MODE -  Container shop-haproxy-1  {change}\n"
    user = User({"--dry-run": Done(0, errors=planned), "compose ps --quiet haproxy": "4f1d\n"})
    user.types_up()
    words = "This replaces HAProxy's container: new connections are refused until requests in flight have ended"
    assert any(line.startswith(words) for line in user.said) is (change == "Recreate")
    steps = user.programs.steps[1:3]
    assert (steps == ["Replacing HAProxy", "Starting the stack"]) is (change == "Recreate")


@pytest.mark.parametrize(
    ("profiles", "others"), [("grafana", ""), ("grafana,nightly", "nightly"), ("nightly, grafana,dev", "nightly,dev")]
)
def test_grafana_is_left_out_where_no_registry_gives_it(profiles: str, others: str) -> None:
    services = {**SERVICES, "grafana": {"image": "grafana/grafana:1"}}
    user = User({"inspect grafana": Done(1)}, {"COMPOSE_PROFILES": profiles}, services=services)
    user.types_up()
    assert user.said[0] == (
        "Continuing without Grafana: no registry gives grafana/grafana:1 "
        f"(plain Compose: COMPOSE_PROFILES={others} docker compose up)."
    )
    assert user.programs.variables[-1]["COMPOSE_PROFILES"] == others
    has_it = User({}, {"COMPOSE_PROFILES": profiles}, services=services)
    has_it.types_up()
    assert "COMPOSE_PROFILES" not in has_it.programs.variables[-1]
    assert any(f"{HTTP}:3000" in line for line in has_it.said)
    taken = User({}, {"COMPOSE_PROFILES": profiles}, services=services, listening=frozenset({f"{HTTP}:3000"}))
    assert taken.is_refused().startswith("port 3000 (PIERHEAD_GRAFANA_PORT) is taken by ")


def test_nothing_is_built_where_the_user_says_so() -> None:
    user = User(variables={"PIERHEAD_BUILD": "0"})
    user.types_up()
    assert user.calls(" build$|base-images") == []


# --------------------------------------------------------------------------------------------------- how it waits, ends


@pytest.mark.parametrize(
    ("docker", "words", "has_status"),
    [
        ({"wait-ready": Done(4)}, "not every service serves after 300 s. The stack keeps trying", True),
        ({"wait-ready": Done(1)}, "and waiting does not help", True),
        ({"wait-ready": Done(2)}, "the compose files cannot be used", False),  # the status would say the same again
        ({"wait-ready": Done(137), "service=controller": ""}, "taken down while it started", False),
        ({"wait-ready": Done(137), "service=prometheus": ""}, "taken down while it started", False),
    ],
)
def test_or_it_says_why_not(docker: dict[str, Done | str], words: str, has_status: bool) -> None:
    user = User(docker)
    assert words in user.is_refused(NotUp)
    assert NotUp.exit_code == 1
    assert bool(user.calls(" status$")) == has_status


def test_a_controller_that_does_not_answer_is_reported_with_its_log() -> None:
    user = User({"compose logs": "the last line\n"}, statuses={f"{HTTP}:8100/healthz": 0})
    assert "the controller does not answer after 30 s" in user.is_refused(NotUp)
    assert user.warnings[-1] == "the last line"
    assert len(user.calls("GET .*healthz")) == LOOKS


def test_an_app_of_the_clone_that_does_not_answer_is_reported() -> None:
    user = User(statuses={f"{HTTP}:8000/echo?message=hi": 503})
    assert "an app does not answer after 300 s" in user.is_refused(NotUp)


@pytest.mark.parametrize("program", ["docker-proxy", "dockerd"])
def test_processes_that_carry_ports_are_advised_against(tmp_path: Path, program: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "comm").write_text(f"{program}\n")
    user = User(variables={"PIERHEAD_PROC": str(tmp_path)})
    user.types_up()
    assert any('"userland-proxy": false' in line for line in user.said) == (program == "docker-proxy")


def test_a_second_up_of_the_same_directory_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StackUp, "_alone", ALONE)
    (tmp_path / "compose.yaml").touch()
    user = User(root=tmp_path)
    waits = threading.Thread(target=user.types_up)
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        waits.start()
        eventually(lambda: user.said, "it says that it waits")
        assert user.said == ["Another `pierhead up` of this directory is running: waiting for it."]
        assert user.calls(CHANGES) == []
    finally:
        os.close(directory)
    waits.join(60)
    assert "Starting the stack" in user.programs.steps


# --------------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize(
    ("line", "builds", "refuses"),
    [
        ("FROM pierhead/python:1\r", True, False),
        ("FROM --platform=linux/amd64 pierhead/python:1 AS base", True, False),
        ("ARG BASE=pierhead/python:${TAG}\nFROM ${BASE}", True, False),
        ("inline FROM pierhead/python:1", True, False),
        ("FROM pierhead/python:0.0.1", False, True),
        ("FROM pierhead/python", False, True),
        ("FROM registry.example/pierhead/python:0.0.1", False, False),
        ("# FROM pierhead/python:0.0.1\nFROM debian", False, False),
    ],
)
def test_the_base_of_users_images_is_built_where_a_dockerfile_begins_with_it(
    tmp_path: Path, line: str, builds: bool, refuses: bool
) -> None:
    (tmp_path / "my code").mkdir()
    (tmp_path / "my code" / "Dockerfile").write_bytes(f"{line}\n".encode())
    build = {"context": str(tmp_path / "my code"), "dockerfile": "Dockerfile"}
    if line.startswith("inline "):
        build["dockerfile_inline"] = f"{line.removeprefix('inline ')}\nCOPY a b\n"
    services = {**SERVICES, "web": {"build": build}}
    user = User({"image inspect": Done(1)}, {"PIERHEAD_TAG": "1"}, root=tmp_path, services=services)
    if refuses:
        assert "Change that line, or install the tool of that version. Nothing was started." in user.is_refused()
    else:
        user.types_up()
    base = ["docker compose --file .pierhead/compose/images.yaml --progress plain build python"] if builds else []
    rest = [] if refuses else ["docker compose --progress plain build"]
    assert user.calls("docker compose.* build( python)?$") == base + rest
    if builds:
        assert (
            user.programs.variables[user.programs.steps.index("Building pierhead/python:1") + 2]["PIERHEAD_TAG"] == "1"
        )


def test_the_stacks_images_that_services_run_are_built_once_for_all_of_them() -> None:
    of_another = {"image": "registry.example/pierhead/llm-cpu:0.0.1"}
    services = {
        **SERVICES,
        "llm-gateway": {"image": "pierhead/llm-gateway:1"},
        "smollm2": {"image": "pierhead/llm-cpu:1"},
        "tiny": {"image": "pierhead/llm-cpu:1"},
        "own": {"build": {"context": "/x", "dockerfile_inline": "FROM pierhead/llm-none:1\nCOPY own own\n"}},
        "built": {"image": "pierhead/llm-cuda:1", "build": {"context": "/x", "dockerfile_inline": "FROM debian"}},
        "other": of_another,
    }
    user = User(variables={"PIERHEAD_TAG": "1"}, services=services)
    user.types_up()
    named = "llm-cpu llm-gateway llm-none"
    assert user.calls("docker compose.* build")[:2] == [
        f"docker compose --file compose/images.yaml --progress plain build {named}",
        "docker compose --progress plain build",
    ]
    step = user.programs.steps.index("Building pierhead/llm-cpu:1, pierhead/llm-gateway:1, pierhead/llm-none:1")
    labelled = user.programs.variables[step + 2]["COMPOSE_PROJECT_NAME"]
    assert labelled == "pierhead-images", (
        "Compose labels what it builds: two projects that build one image get the same"
    )
    services = {**SERVICES, "smollm2": {"image": "pierhead/llm-cpu:0.0.1"}, "other": of_another}
    user = User({"image inspect": Done(1)}, {"PIERHEAD_TAG": "1"}, services=services)
    assert "begins with pierhead/llm-cpu:0.0.1, or a service runs it. That is not on" in user.is_refused()


@pytest.mark.parametrize(
    ("variables", "found", "inputs"),
    [
        ({}, "", ("./machine/no-ca.pem", "./wheels")),
        ({}, "/etc/ca.pem\n/wheels\n", ("/etc/ca.pem", "/wheels")),
        ({"PIERHEAD_CA_BUNDLE": "mine", "PIERHEAD_WHEELS": "w"}, "/etc/ca.pem\n/wheels\n", ("mine", "w")),
    ],
)
def test_images_are_built_with_this_machines_certificates_and_wheels(
    variables: Mapping[str, str], found: str, inputs: tuple[str, str]
) -> None:
    user = User({"ca_bundle": found}, variables)
    user.types_up()
    built = user.programs.variables[-1]
    assert (built["PIERHEAD_CA_BUNDLE"], built["PIERHEAD_WHEELS"]) == inputs


ECHO, SHOP, NIGHT = (f"compose/apps/{name}.yaml" for name in ("echo", "shop", "night"))


def built(running: str, named: str, *, has_apps: bool = False) -> tuple[list[str], list[str]]:
    """The files of each build, and the warnings."""
    docker: dict[str, Done | str] = {
        "ps --filter .*service=controller": f"4f1d\t{ROOT}/compose\t8100/tcp\n",
        "inspect .*Env": f"PATH=/bin\nCOMPOSE_FILE={running}\n",
    }
    user = User(docker, {"COMPOSE_FILE": named})
    build_images(user.stack, user.warnings.append, has_apps=has_apps)
    return [variables["COMPOSE_FILE"] for variables in user.programs.variables if variables], user.warnings


def test_what_runs_and_what_is_named_are_built_unless_apps_are_chosen() -> None:
    named, running = f"compose/compose.yaml:{ECHO}:{NIGHT}", f"compose/compose.yaml:{ROOT}/{ECHO}:{SHOP}"
    files, (told,) = built(running, named)
    assert files == [named, running]
    assert told == (
        "pierhead: the running stack has other files than COMPOSE_FILE (.env or the shell). "
        f"Only in the running stack: {SHOP}; a plain `make up` drops this unless COMPOSE_FILE names it. "
        f"Only in COMPOSE_FILE: {NIGHT}; `make up` starts this."
    )
    assert built(running, named, has_apps=True) == ([named], [])
    assert built(f"./compose/compose.yaml:{ROOT}/{NIGHT}:{ECHO}", named) == ([named], [])


@pytest.mark.parametrize(
    ("apps", "gpu", "files"),
    [
        ("", "", "compose/compose.yaml:mine.yaml"),
        ("echo recsys", "", "compose/compose.yaml:compose/apps/echo.yaml:compose/apps/recsys.yaml"),
        (
            *("echo recsys", "1"),
            "compose/compose.yaml:compose/apps/echo.yaml:compose/apps/recsys.yaml:compose/gpu-recsys.yaml",
        ),
    ],
)
def test_which_files_are_chosen(apps: str, gpu: str, files: str) -> None:
    assert chosen_files(ROOT, apps, gpu, "compose/compose.yaml:mine.yaml") == files
    assert chosen_files(ROOT, "", "1" if gpu else "", files) == files, "what is named already is not named again"


KNOWN = " ".join(sorted(path.stem for path in (ROOT / "compose" / "apps").glob("*.yaml")))


@pytest.mark.parametrize(
    ("apps", "gpu", "words"),
    [
        ("nonesuch", "", f'"nonesuch" (no compose/apps/nonesuch.yaml). There are: {KNOWN}.'),
        ("echo", "1", "GPU: none of the chosen apps has a file for GPUs"),
        ("", "two", 'GPU: expected 1 or nothing, found "two".'),
    ],
)
def test_apps_that_cannot_be_chosen_are_reported(apps: str, gpu: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        chosen_files(ROOT, apps, gpu, "compose/compose.yaml")


# -------------------------------------------------------------------------------------------------------------- a Swarm

ON_SWARM = {"PIERHEAD_ENGINE": "swarm", "COMPOSE_FILE": f"compose/compose.yaml:{ECHO}"}


def test_a_machine_in_no_swarm_is_reported_before_anything_is_built() -> None:
    user = User({"info .*LocalNodeState": "inactive\n"}, ON_SWARM)
    with pytest.raises(
        InvalidRequest, match=re.escape("no Swarm.\n`pierhead node init` makes it the first manager of one.")
    ):
        SwarmStack(user.stack).refuse()
    user = User({" stack refuse": Done(2)}, ON_SWARM)
    assert user.is_refused(Told) == ""
    assert user.calls(CHANGES) == []


def test_on_a_swarm_the_controllers_image_checks_and_starts() -> None:
    user = User(
        {" stack services": "echo\nold\n", " stack ": "", "compose .*config": config(SERVICES)},
        {**ON_SWARM, "PIERHEAD_REGISTRY": "here"},
    )
    user.types_up()
    done = [call.rpartition(" stack ")[2] for call in user.calls(" stack ")]
    assert done == ["refuse", "check", "services", "up", "answers", "trouble"]
    assert user.programs.steps[:2] == ["Building the controller", "Building the images"]
    built = [variables for variables in user.programs.variables if "COMPOSE_PROFILES" in variables]
    assert {(each["COMPOSE_FILE"], each["COMPOSE_PROFILES"]) for each in built} == {
        (f"compose/swarm.yaml:{ECHO}", "registry")
    }
    assert any("removed: old." in line for line in user.warnings)
    assert "  and the same at every other node" in user.said[-1]


def test_what_the_swarms_check_refuses_is_not_started() -> None:
    user = User({" stack check": Done(2), " stack ": ""}, ON_SWARM)
    assert user.is_refused() == "Nothing was started; running services are not affected."
    assert user.calls(" stack up") == []


def test_what_up_asks_of_a_swarm() -> None:
    docker: dict[str, Done | str] = {
        "service ls": "s1\ns2\n",
        "service inspect .* s1 s2": "echo\nold\n",
        "service logs": "the last line\n",
    }
    on_swarm = SwarmStack(User(docker, ON_SWARM).stack)
    assert on_swarm.told("services").split() == ["echo", "old"]
    assert on_swarm.told("log") == "the last line\n"
    assert (on_swarm.answers(), on_swarm.told("is-down")) == (False, "yes")
