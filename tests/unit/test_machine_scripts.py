"""The scripts in compose/machine, run with a PATH of stand-ins: no engine is touched, nothing is installed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from pierhead.llm_app import llm_gateway

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "compose" / "machine"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SCRIPTS = sorted(MACHINE.glob("*.sh"))

# What the scripts may use of the machine. Not among them, unless a test adds a stand-in: docker, dockerd, sudo, apt.
COREUTILS = (
    "basename",
    "cat",
    "comm",
    "cut",
    "dirname",
    "env",
    "head",
    "id",
    "mktemp",
    "mkdir",
    "paste",
    "printf",
    "rm",
    "sleep",
    "sort",
)
TOOLS = (*COREUTILS, "tail", "tee", "timeout", "tr", "uname", "whoami", "awk", "bash", "flock", "grep", "sed")


def docker_with(*cases: str) -> str:
    """A docker with a healthy engine, which does this for commands that match: "'ps -q '*) echo 4f1d"."""
    healthy = (
        "'version --format {{.Server.Version}}') echo 26.1.5+dfsg1",
        "'compose version --short') echo 2.26.1-4",
    )
    return "\n".join(['case "$*" in', *(f"{case} ;;" for case in (*healthy, *cases)), "esac"])


HEALTHY_ENGINE = docker_with()
NOTES_OPEN_FILES = 'for file in /proc/$$/fd/*; do echo "open ${file##*/}"; done >>"$TMPDIR/calls"'


@dataclass
class Machine:
    """A pretended machine: its programs, its os-release, and a record of every stand-in that was called."""

    directory: Path

    @property
    def programs(self) -> Path:
        return self.directory / "bin"

    def has(self, program: str, script: str = "") -> None:
        """Put a stand-in on PATH; each call is recorded, then `script` (bash) runs."""
        path = self.programs / program
        path.write_text(f'#!/usr/bin/env bash\necho "{program} $*" >>"{self.directory}/calls"\n{script}\n')
        path.chmod(0o755)

    def is_a(self, name: str, **fields: str) -> None:
        lines = [f'PRETTY_NAME="{name}"', *(f"{key}={value}" for key, value in fields.items())]
        (self.directory / "os-release").write_text("\n".join(lines) + "\n")

    def is_not_root(self) -> None:
        (self.programs / "id").unlink()
        self.has("id", "echo 1000")

    def calls(self) -> list[str]:
        record = self.directory / "calls"
        return record.read_text().splitlines() if record.exists() else []

    def open_files(self) -> set[int]:
        """The files that a stand-in with NOTES_OPEN_FILES has had open."""
        return {int(call.split()[1]) for call in self.calls() if call.startswith("open ")}

    def run(
        self, *command: str, open_files: Sequence[int] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(MACHINE / command[0]), *command[1:]],
            env={
                "PATH": str(self.programs),
                "HOME": str(self.directory),
                "TMPDIR": str(self.directory),
                "COMPOSE_PROJECT_NAME": "pierhead",
                "PIERHEAD_OS_RELEASE": str(self.directory / "os-release"),
                **environment,
            },
            pass_fds=open_files,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    programs = tmp_path / "bin"
    programs.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"{tool} is needed by these tests"
        (programs / tool).symlink_to(found)
    machine = Machine(tmp_path)
    machine.is_a("Debian GNU/Linux 12 (bookworm)", ID="debian", VERSION_CODENAME="bookworm")
    return machine


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone that has the scripts and nothing else."""
    return Path(shutil.copytree(MACHINE, tmp_path / "clone" / "compose" / "machine")).parents[1]


@pytest.fixture
def control(clone: Path) -> str:
    """That clone's control.sh."""
    return str(clone / "compose" / "machine" / "control.sh")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(
    ("found", "wanted", "enough"),
    [
        ("26.1.5+dfsg1", "26", True),
        ("25.0.14", "26", False),
        ("100.0", "26", True),
        ("v2.40.3", "2.26", True),
        ("2.9.0", "2.26", False),
        ("28", "26", True),
        ("(none)", "26", False),
    ],
)
def test_versions_compare_as_numbers(machine: Machine, found: str, wanted: str, enough: bool) -> None:
    command = f'. "{MACHINE}/host.sh"; at_least "$1" "$2"'
    result = subprocess.run(["bash", "-euc", command, "-", found, wanted], check=False)
    assert (result.returncode == 0) is enough


ANOTHER_CLONES = "/home/somebody/pierhead/compose"
DOCKERS = {
    "fine": HEALTHY_ENGINE,
    "away": 'echo "no such host" >&2; exit 1',
    "old": "echo 20.10.24",
    "old Compose": HEALTHY_ENGINE.replace("2.26.1-4", "2.20.3"),
    "denied": 'echo "permission denied while trying to connect" >&2; exit 1',
    "context": 'case "$*" in "context show") echo desktop-linux ;; *) exit 1 ;; esac',
    "another's": docker_with(f"'ps '*) echo; echo {ANOTHER_CLONES}"),
}


@pytest.mark.parametrize(
    ("docker", "command", "words"),
    [
        ("old", "engine.sh", "Docker Engine 20.10.24 is too old: version 26 or newer is needed."),
        ("old Compose", "engine.sh", "the Compose plug-in is 2.20.3: version 2.26 or newer is needed."),
        ("denied", "engine.sh", "sudo usermod -aG docker"),
        ("away", "DOCKER_HOST=tcp://box engine.sh", "DOCKER_HOST is tcp://box, and no Docker Engine answers there."),
        ("context", "engine.sh", 'the Docker context is "desktop-linux", and no Docker Engine answers there.'),
        ("fine", "up.sh nonesuch", '"nonesuch" (no compose/apps/nonesuch.yaml)'),
        *[("fine", "up.sh nonesuch", app.stem) for app in (ROOT / "compose" / "apps").glob("*.yaml")],
        ("fine", "up.sh '' two", 'GPU: expected 1 or nothing, found "two".'),
        ("another's", "up.sh", 'a stack named "pierhead" runs from another clone: /home/somebody/pierhead.'),
        ("another's", "down.sh 1", "is another clone's: /home/somebody/pierhead. Nothing was removed."),
        (
            "another's",
            "down.sh 1",
            "cd /home/somebody/pierhead && make down; where that clone is gone, here: make down",
        ),
        ("fine", "down.sh yes", 'VOLUMES: expected 1 or nothing, found "yes".'),
        ("fine", "down.sh '' yes", "FORCE: expected 1 or nothing"),
        ("fine", "simulate.sh '' '' ''", "Example: make simulate TRACE=step:10x SERVICE=ranker"),
        *[("fine", f"control.sh scale {of}", "make scale SERVICE=ranker N=4") for of in ("'' ''", "ranker ''", "'' 4")],
    ],
)
def test_a_refusal_says_why_and_changes_nothing(machine: Machine, docker: str, command: str, words: str) -> None:
    machine.has("apt-get")
    machine.has("docker", DOCKERS[docker])
    *settings, script = command.partition(".sh")[0].split()
    arguments = shlex.split(command.partition(".sh")[2])
    result = machine.run(f"{script}.sh", *arguments, open_files=(), **dict(each.split("=") for each in settings))
    assert result.returncode == 2
    assert words in result.stderr
    assert [
        call for call in machine.calls() if re.match(r"apt-get|docker (compose.* (build|up|down)|volume)", call)
    ] == []


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("engine.sh", "it is not installed for you (only on Debian and Ubuntu)"),
        ("base-images.sh", "they cannot be built (only on Debian and Ubuntu)"),
    ],
)
def test_an_unknown_system_is_left_alone(machine: Machine, script: str, words: str) -> None:
    machine.is_a("Fedora Linux 44", ID="fedora")
    for program in ("apt-get", "sudo", "systemctl"):
        machine.has(program)
    if script == "base-images.sh":
        machine.has("docker", DOCKERS["away"])
    result = machine.run(script)
    assert result.returncode == 2
    assert f"on Fedora Linux 44 {words}" in result.stderr
    assert [call for call in machine.calls() if not call.startswith("docker ")] == []


class TestEngine:
    def test_a_machine_with_an_engine_is_left_alone(self, machine: Machine) -> None:
        for program in ("apt-get", "sudo", "dockerd", "systemctl"):
            machine.has(program)
        machine.has("docker", HEALTHY_ENGINE)
        result = machine.run("engine.sh")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        assert machine.calls() == ["docker version --format {{.Server.Version}}", "docker compose version --short"]

    def test_without_root_and_sudo_nothing_is_installed(self, machine: Machine) -> None:
        machine.is_not_root()
        machine.has("apt-get")
        result = machine.run("engine.sh")
        assert result.returncode == 2
        assert "(not root, and no sudo)" in result.stderr
        assert not [call for call in machine.calls() if call.startswith("apt-get")]

    def test_an_engine_that_is_installed_gets_settings_with_which_published_ports_outlive_it(
        self, machine: Machine
    ) -> None:
        result, settings = self.installed(machine)
        assert result.returncode == 0, result.stderr
        assert json.loads(settings.read_text()) == {
            "features": {"cdi": True},
            "live-restore": True,
            "userland-proxy": False,
            "log-driver": "json-file",
            "log-opts": {"max-size": "10m", "max-file": "3"},
        }
        settings.write_text("{}")
        assert self.installed(machine)[0].returncode == 0
        assert settings.read_text() == "{}", "settings that are there already are the user's"

    @pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd starts the engine")
    def test_an_engine_that_is_started_holds_none_of_the_callers_files(self, machine: Machine) -> None:
        there = machine.directory / "started"
        machine.is_not_root()
        machine.has("dockerd")
        machine.has("docker", f"[ -e '{there}' ] || exit 1\n{HEALTHY_ENGINE}")
        started = f"{NOTES_OPEN_FILES}; echo >'{there}'"
        machine.has("sudo", f'case "$*" in "bash -c "*) {started} ;; "docker info") [ -e "{there}" ] ;; esac')
        with (machine.directory / "some").open("w") as some:
            number = some.fileno()
            result = machine.run("engine.sh", open_files=[number])
        assert result.returncode == 0, result.stderr
        assert {0, 1, 2} <= machine.open_files()
        assert number not in machine.open_files()

    def installed(self, machine: Machine) -> tuple[subprocess.CompletedProcess[str], Path]:
        """engine.sh on an Ubuntu machine without an engine. What it does as root changes only files of the test."""
        file, there = machine.directory / "daemon.json", machine.directory / "installed"
        there.unlink(missing_ok=True)
        machine.is_not_root()
        machine.is_a("Ubuntu 24.04", ID="ubuntu", VERSION_CODENAME="noble")
        machine.has("apt-cache", "echo '  Candidate: 28.2.2-0ubuntu1'")
        machine.has("docker", f"[ -e '{there}' ] || exit 1\n{HEALTHY_ENGINE}")
        machine.has("sudo", f"case \"$*\" in tee*) cat >\"$2\" ;; *' install '*) echo >'{there}' ;; esac")
        result = machine.run("engine.sh", PIERHEAD_ENGINE_SETTINGS=str(file))
        assert "sudo env DEBIAN_FRONTEND=noninteractive" in "\n".join(machine.calls())
        return result, file


class TestBaseImages:
    def test_images_that_are_here_are_left_alone(self, machine: Machine) -> None:
        machine.has("docker")
        result = machine.run("base-images.sh")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        assert all(call.startswith("docker image inspect ") for call in machine.calls())

    @pytest.mark.skipif(not KEYRING.exists(), reason="needs Debian's keyring, as mmdebstrap does")
    def test_files_that_the_caller_has_open_are_not_in_the_way_of_the_build(self, machine: Machine) -> None:
        machine.has("docker", 'case "$1 $2" in "image inspect" | "pull "*) exit 1 ;; esac')
        machine.is_a("Ubuntu 24.04", ID="ubuntu")
        machine.has("mmdebstrap", NOTES_OPEN_FILES)
        with ExitStack() as files:
            some = [files.enter_context((machine.directory / "some").open("w")).fileno() for _ in range(12)]
            result = machine.run("base-images.sh", open_files=some)
        assert result.returncode == 0, result.stderr
        assert {0, 1, 2} <= machine.open_files()
        assert not machine.open_files() & set(some)


class TestUp:
    def test_gpu_adds_the_file_of_each_chosen_app(self, machine: Machine) -> None:
        sources = "; ".join(f". {MACHINE}/{name}.sh" for name in ("messages", "host", "stack"))
        run = ["bash", "-euc", f'{sources}; choose_files "$1" 1; echo "$COMPOSE_FILE"', "-"]
        chosen = subprocess.run([*run, "echo recsys"], check=True, capture_output=True, text=True, timeout=60)
        assert chosen.stdout.strip() == ":".join(
            f"compose/{file}.yaml" for file in ("compose", "apps/echo", "apps/recsys", "gpu-recsys")
        )
        refused = subprocess.run([*run, "echo"], check=False, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2
        assert "GPU: none of the chosen apps has a file for GPUs" in refused.stderr

    def test_a_port_that_is_taken_is_named_before_anything_is_started(self, machine: Machine, taken_port: int) -> None:
        machine.has("docker", HEALTHY_ENGINE)
        result = machine.run("up.sh", PIERHEAD_HTTP_PORT=str(taken_port))
        assert result.returncode == 2
        assert f"port {taken_port} (PIERHEAD_HTTP_PORT) is taken by another program." in result.stderr
        assert not [call for call in machine.calls() if re.match(r"docker (compose.* (build|up)|pull)", call)]


UNUSABLE_FILES = docker_with("""'compose run '*) echo "$SAID"; exit "$CODE" """, "*' up '*) exit 1")


class TestUpLooksAtTheFiles:
    """With the controller's own reader, in its own place: before another image is built and before anything starts."""

    def up(self, machine: Machine, code: int) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        machine.has("docker", UNUSABLE_FILES)
        said = 'services.web.x-server: unknown key; did you mean "x-serve"?'
        result = machine.run(
            "up.sh", COMPOSE_FILE="compose/compose.yaml", COMPOSE_PROFILES="", SAID=said, CODE=str(code)
        )
        steps = [call for call in machine.calls() if re.match(r"docker compose.* (build|run|up)\b", call)]
        return result, steps

    def test_what_is_wrong_with_them_is_told_once_and_nothing_else_is_done(self, machine: Machine) -> None:
        result, steps = self.up(machine, 2)
        assert result.returncode == 2
        assert result.stderr.count("services.web.x-server: unknown key") == 1
        assert "the compose files cannot be used" in result.stderr
        assert steps == [
            "docker compose --progress plain build controller",
            "docker compose run --rm --no-deps --no-TTY controller pierhead validate",
        ]

    @pytest.mark.parametrize("code", [0, 1, 125])
    def test_a_look_that_does_not_succeed_is_in_nobodys_way(self, machine: Machine, code: int) -> None:
        result, steps = self.up(machine, code)
        assert steps[2:] == [
            "docker compose --progress plain build",
            "docker compose --progress plain up --detach --no-build",
        ]
        assert "x-server" not in result.stderr


# A line of .env, what Compose takes for NAME (tests/contract/test_compose_config.py asks it).
ENV_LINES = {
    "NAME=8100": "8100",
    "NAME=": "",
    'NAME="quoted"': "quoted",
    "NAME='quoted'": "quoted",
    "NAME=''": "",
    "NAME=8100 # the API": "8100",
    'NAME="a # b" # c': "a # b",
    "NAME='a # b' # c": "a # b",
    "NAME=a#b": "a#b",
    "NAME=#a": "#a",
    "NAME=a\t# b": "a\t# b",
    "NAME=two words  ": "two words",
    " NAME = a ": "a",
    "export NAME=a": "a",
    "NAME: a": "a",
    "NAME=a\r": "a",
    'NAME="a"\r': "a",
    r'NAME="say \"hi\" \\ there"': r'say "hi" \ there',
    r"NAME='it\'s'": "it's",
    "NAME=a:b=c": "a:b=c",
    "NAME=first\nNAME='second'": "second",
    "#NAME=a": "",
    "OTHER_NAME=a\nNAMES=b": "",
}


@pytest.mark.parametrize("lines", ENV_LINES)
def test_a_setting_is_read_from_the_env_file_as_compose_reads_it(machine: Machine, clone: Path, lines: str) -> None:
    (clone / ".env").write_bytes(f"{lines}\n".encode())
    scripts = "; ".join(f". {clone}/compose/machine/{name}.sh" for name in ("messages", "host", "stack"))

    def setting(**environment: str) -> str:
        command = ["bash", "-c", f"{scripts}; setting NAME default"]
        path = {"PATH": str(machine.programs)}
        return subprocess.run(command, env=path | environment, capture_output=True, text=True, check=True).stdout

    assert setting() == (ENV_LINES[lines] or "default")
    assert setting(NAME="the shell's") == "the shell's"


RUNNING_STACK = docker_with(
    "'ps -q '*) echo 4f1d",
    """'exec '*' wait-ready '*) echo "mine: $MINE" >&2; printf '%b' "$READY"; exit "$WAITED" """,
    "'exec '*' status') echo 'the whole status'",
)
SERVICES_THAT_RUN = docker_with(
    "'ps -q '*) echo 4f1d",
    """'ps --filter label=pierhead.project='*) printf '%s\\n' "$RUN" """,
    "'compose --profile * config --services') printf '%s\\n' echo controller nightly",
    "'compose config --services') printf '%s\\n' echo controller",
    "*' up '*) exit 1",
)


class TestUpTellsWhatGoes:
    """Before it is removed: of the services that run, those that no chosen file has."""

    def told(self, machine: Machine, *services: str) -> str:
        machine.has("docker", SERVICES_THAT_RUN)
        result = machine.run("up.sh", COMPOSE_FILE="compose/compose.yaml", COMPOSE_PROFILES="", RUN="\n".join(services))
        assert [call for call in machine.calls() if " up " in call], result.stderr
        return result.stderr

    def test_services_of_other_files_go(self, machine: Machine) -> None:
        told = self.told(machine, "echo", "ranker", "recsys")
        assert "not among the chosen files, so they are removed: ranker recsys." in told

    def test_services_of_a_profile_that_is_not_chosen_stay(self, machine: Machine) -> None:
        assert "removed" not in self.told(machine, "echo", "nightly")


class TestUpWaits:
    """For services of files that the scripts do not know."""

    @pytest.fixture
    def controller_port(self) -> Iterator[int]:
        class Healthy(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield server.server_address[1]
            server.shutdown()

    def up(
        self, machine: Machine, port: int, mine: str, waited: int, ready: str = ""
    ) -> subprocess.CompletedProcess[str]:
        machine.has("docker", RUNNING_STACK)
        return machine.run(
            "up.sh",
            COMPOSE_FILE="compose/compose.yaml:/home/me/mine.yaml",
            COMPOSE_PROFILES="",
            PIERHEAD_API_PORT=str(port),
            PIERHEAD_UP_TIMEOUT_S="7",
            PIERHEAD_PROC=str(machine.directory / "proc"),
            MINE=mine,
            WAITED=str(waited),
            READY=ready,
        )

    def test_until_they_serve(self, machine: Machine, controller_port: int) -> None:
        result = self.up(machine, controller_port, "2 of 2 ready", 0)
        assert result.returncode == 0, result.stderr
        assert "Waiting until every service serves: done" in result.stdout
        assert "the whole status" in result.stdout
        started, asked = (
            next(number for number, call in enumerate(machine.calls()) if words in call)
            for words in (" up --detach", "4f1d pierhead wait-ready --serving --quiet --timeout 7")
        )
        assert started < asked

    @pytest.mark.parametrize("program", ["docker-proxy", "dockerd"])
    def test_and_says_what_an_engine_without_its_proxy_would_bring(
        self, machine: Machine, controller_port: int, program: str
    ) -> None:
        (machine.directory / "proc" / "7").mkdir(parents=True)
        (machine.directory / "proc" / "7" / "comm").write_text(f"{program}\n")
        result = self.up(machine, controller_port, "2 of 2 ready", 0)
        assert result.returncode == 0, result.stderr
        told = [line for line in result.stdout.splitlines() if '"userland-proxy": false' in line]
        assert len(told) == (program == "docker-proxy")

    def test_and_a_rollout_that_goes_on_is_told(self, machine: Machine, controller_port: int) -> None:
        ready = "2 services, 4 replicas, all ready\\na rollout of ranker goes on; `make deploy` waits for its end\\n"
        result = self.up(machine, controller_port, "2 of 2 ready", 0, ready)
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        assert "a rollout of ranker goes on; `make deploy` waits for its end" in lines
        assert "2 services, 4 replicas, all ready" not in lines, "the status says as much"
        assert not [path for path in machine.directory.iterdir() if path.name.startswith("pierhead.")]

    @pytest.mark.parametrize(
        ("waited", "words"),
        [(4, "not every service serves after 7 s. The stack goes on trying"), (1, "and waiting does not help")],
    )
    def test_or_have_a_reason(self, machine: Machine, controller_port: int, waited: int, words: str) -> None:
        result = self.up(machine, controller_port, "0 of 2 ready; 2 pending: no GPU", waited)
        assert result.returncode == 1
        assert "mine: 0 of 2 ready; 2 pending: no GPU" in result.stderr.splitlines()
        assert words in result.stderr
        assert "the whole status" in result.stdout

    def test_or_the_files_turn_out_to_be_wrong(self, machine: Machine, controller_port: int) -> None:
        result = self.up(machine, controller_port, "services.a.x-serve.rout: unknown key", 2)
        assert result.returncode == 1
        assert result.stderr.count("services.a.x-serve.rout: unknown key") == 1
        assert "the whole status" not in result.stdout, "it would say the same again"


GPU_FILES = """
services:
  controller:
    command: |-
      gpu:
        devices:
    deploy:
      resources:
        limits:
          devices: 1
  llm:
    deploy:
      resources:
        reservations:
          devices:
            - count: 1
  llm-gateway:
    x-serve:
      llm:
        gpu: null
  "7":
    gpus:
      - count: 1
  ranker:
    x-serve:
      gpu:
        memory: 16GiB
  recsys:
    gpus: []
    x-serve:
      autoscale:
        gpu:
          none: true
volumes:
  data:
    gpus:
      none: true
"""


class TestUpWarnsOfGpus:
    """Where Docker knows none: before anything is built, and of all files."""

    def told(self, machine: Machine, tmp_path: Path, runtimes: str = "{}", files: str = GPU_FILES) -> str:
        (machine.directory / "config").write_text(files)
        config = f"'compose --profile * config') cat '{machine.directory}/config'"
        info = f"'info '*) echo '{runtimes}'"
        machine.has("docker", docker_with(config, "'ps -q '*) echo 4f1d", info, "*' up '*) exit 1"))
        nowhere = f"{tmp_path}/cdi:{tmp_path}/run"
        result = machine.run("up.sh", COMPOSE_PROFILES="", PIERHEAD_CDI_DIRS=nowhere)
        return result.stderr

    def test_every_service_that_asks_for_one_is_named(self, machine: Machine, tmp_path: Path) -> None:
        told = self.told(machine, tmp_path)
        assert "these services ask for one: llm 7 ranker. They will stay PENDING." in told
        assert "`pierhead llm build --gpus 0`" in told
        first_image = [call.startswith("docker image inspect") for call in machine.calls()].index(True)
        assert "docker compose --profile * config" in machine.calls()[:first_image]

    def test_nothing_is_said_where_none_is_asked_for(self, machine: Machine, tmp_path: Path) -> None:
        assert "GPU" not in self.told(machine, tmp_path, files="services:\n  echo:\n    x-serve:\n      replicas: 1")

    def test_nothing_is_said_where_docker_knows_one(self, machine: Machine, tmp_path: Path) -> None:
        assert "GPU" not in self.told(machine, tmp_path, runtimes='{"nvidia":{}}')
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "nvidia.yaml").touch()
        assert "GPU" not in self.told(machine, tmp_path)


def test_every_service_with_a_route_has_an_address(clone: Path) -> None:
    config = {
        "services": {
            "a": {"image": "mine/a", "x-serve": {"route": "/a"}},
            "echo": {"image": "pierhead/echo", "x-serve": {"route": "/echo"}},
            "gate": llm_gateway({"qwen": "llm-qwen"}),
            "grpc-only": {"x-serve": {"grpc_services": ["a.B"], "route": None}},
            "haproxy": {"environment": {"PIERHEAD_LLM_MODELS": "of no gateway"}},
            "recsys": {"x-serve": {"route": "/mine"}},
        },
        "volumes": {"route": {"x-serve": {"route": "/of-a-volume"}}},
    }
    script = (clone / "compose" / "machine" / "up.sh").read_text().replace('main "$@"', "print_addresses")
    (clone / "compose" / "machine" / "up.sh").write_text(f"docker() {{ cat '{clone}/config'; }}\n{script}")
    (clone / "config").write_text(yaml.safe_dump(config))
    told = subprocess.run(
        ["bash", str(clone / "compose" / "machine" / "up.sh")],
        env={"PATH": os.environ["PATH"], "COMPOSE_FILE": "compose/compose.yaml:/home/me/mine.yaml"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    addresses = [line.split() for line in told.splitlines() if "127.0.0.1:8000" in line]
    assert addresses == [
        ["a", "http://127.0.0.1:8000/a"],
        ["echo", "http://127.0.0.1:8000/echo?message=hi"],
        ["gate", "http://127.0.0.1:8000/v1/models"],
        ["recsys", "http://127.0.0.1:8000/mine"],
    ]


ANOTHER_CLONES_STACK = docker_with("'ps -q '*) echo 4f1d", f"'inspect '*' 4f1d') echo {ANOTHER_CLONES}")
PIPED = "--interactive --env PIERHEAD_ENDS_WITH_STDIN=1 "


class TestControl:
    def test_another_clones_stack_is_named_and_obeyed(self, machine: Machine) -> None:
        machine.has("docker", ANOTHER_CLONES_STACK)
        result = machine.run("control.sh", "scale", "ranker", "4")
        assert (result.returncode, result.stdout) == (0, "")
        assert machine.calls()[-1] == "docker exec 4f1d pierhead scale ranker 4"
        (line,) = result.stderr.splitlines()
        assert line.startswith(
            'pierhead: the stack "pierhead" was started from another clone, /home/somebody/pierhead: '
        )

    def test_this_clones_stack_is_not_another_by_any_other_name(self, machine: Machine, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(ROOT)
        machine.has("docker", ANOTHER_CLONES_STACK.replace("/home/somebody/pierhead", f"{tmp_path}/link"))
        assert machine.run("control.sh", "scale", "ranker", "4").stderr == ""

    def test_files_are_those_of_the_clone_in_which_one_types(self, machine: Machine, clone: Path, control: str) -> None:
        machine.has("docker", ANOTHER_CLONES_STACK)
        result = machine.run(control, "validate")
        assert (result.returncode, result.stderr) == (0, "")
        assert machine.calls()[-1].startswith(f"docker run --rm --network none --volume {clone}:{clone}:ro ")

    @pytest.mark.parametrize("rootless", [False, True])
    def test_a_file_is_written_where_the_controllers_container_could_not(
        self, machine: Machine, clone: Path, control: str, rootless: bool
    ) -> None:
        security = "[name=rootless]" if rootless else "[name=seccomp]"
        machine.has("docker", f"case $1 in ps) echo 4f1d ;; info) echo '{security}' ;; esac")
        for arguments in (["--file", "a.yaml", "--model", "m"], ["--model", "m", "--file=a.yaml"]):
            assert machine.run(control, "llm", "build", *arguments).returncode == 0
            call = machine.calls()[-1]
            user = "" if rootless else f"--user {os.getuid()}:{os.getgid()} "
            assert call.startswith(
                f"docker run --rm --network none --volume {clone}:{clone}:rw {user}--workdir {Path.cwd()}"
            )
            assert call.endswith(f"pierhead llm build {' '.join(arguments)}")
        machine.run(control, "llm", "build", "--model", "m")
        assert machine.calls()[-1] == "docker exec 4f1d pierhead llm build --model m"

    @pytest.mark.parametrize(
        ("arguments", "options"),
        [
            ("scale ranker abc", ""),
            ("scale --help", ""),
            ("events -f", PIPED),
            ("logs ranker --follow", PIPED),
            ("top -n 1", PIPED),
            ("wait-ready", PIPED),
        ],
    )
    def test_a_command_reaches_the_controllers_own_program(
        self, machine: Machine, arguments: str, options: str
    ) -> None:
        """One that goes on for long ends with its caller: its input is a pipe."""
        machine.has("docker", "case $1 in ps) echo 4f1d ;; exec) echo said >&2; [ ! -p /dev/stdin ] || exit 2 ;; esac")
        result = machine.run("control.sh", *arguments.split())
        assert machine.calls()[-1] == f"docker exec {options}4f1d pierhead {arguments}"
        assert (result.returncode, result.stderr) == (2 if options else 0, "said\n")
        assert not [path for path in machine.directory.iterdir() if path.name.startswith("pierhead.")]

    def test_without_a_controller_it_says_what_to_do(self, machine: Machine) -> None:
        machine.has("docker", "exit 1")
        result = machine.run("control.sh", "status", PIERHEAD_API_PORT="1")
        assert result.returncode == 3, "as the command itself ends where no controller answers"
        assert result.stderr.endswith('stack "pierhead" is not running. Start it with: make up\n')

    def test_a_shells_question_reaches_the_program(self, machine: Machine) -> None:
        machine.has("docker", "case $1 in ps) echo 4f1d ;; esac")
        question = {"_PIERHEAD_COMPLETE": "complete_bash", "COMP_WORDS": "pierhead why ra", "COMP_CWORD": "2"}
        result = machine.run("control.sh", open_files=(), **question)
        options = " ".join(f"--env {name}={value}" for name, value in question.items())
        assert (result.returncode, machine.calls()[-1]) == (0, f"docker exec {options} 4f1d pierhead")

    def test_a_shells_question_without_a_stack_gets_no_answer_and_no_noise(self, machine: Machine) -> None:
        machine.has("docker")
        result = machine.run("control.sh", _PIERHEAD_COMPLETE="complete_bash", COMP_WORDS="pierhead why ra")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

    def test_another_machines_api_needs_the_program_here(self, machine: Machine, clone: Path, control: str) -> None:
        machine.has("docker", "case $1 in ps) echo 4f1d ;; esac")
        result = machine.run(control, "status", PIERHEAD_API_URL="http://gpu-box:8100")
        assert result.returncode == 2
        assert "this clone has no .venv with the program. Make one: compose/machine/venv.sh" in result.stderr
        python = clone / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/usr/bin/env bash\necho "$PIERHEAD_API_URL" "$PIERHEAD_PROJECT_DIR" "$@"\n')
        python.chmod(0o755)
        (clone / ".venv" / "lib" / "python3.11" / "site-packages" / "typer").mkdir(parents=True)
        result = machine.run(control, "status", PIERHEAD_API_URL="http://gpu-box:8100")
        assert result.stdout == f"http://gpu-box:8100 {clone} -P -m controller.cli status\n"
        assert machine.calls() == []

    def test_what_needs_no_stack_runs_in_the_image_where_there_is_no_program(
        self, machine: Machine, clone: Path, control: str
    ) -> None:
        machine.has("docker", "case $1 in image) exit 0 ;; esac")
        result = machine.run(control, "validate", COMPOSE_FILE="compose.yaml")
        assert result.returncode == 0, result.stderr
        assert machine.calls()[-1].startswith(f"docker run --rm --network none --volume {clone}:{clone}:ro ")
        assert machine.calls()[-1].endswith("pierhead/controller:latest pierhead validate")
        result = machine.run(control, "llm", "build", "--model", "m", COMPOSE_FILE="compose.yaml")
        assert result.returncode == 0, result.stderr
        assert machine.calls()[-1].endswith("pierhead/controller:latest pierhead llm build --model m")
        assert machine.run(control, "llm", "sleep", "m", COMPOSE_FILE="compose.yaml").returncode == 3
        machine.has("docker", "case $1 in image) exit 1 ;; esac")
        result = machine.run(control, "validate", COMPOSE_FILE="compose.yaml")
        assert result.returncode == 2
        assert "Build the image (make build)" in result.stderr


STACK_OF_OTHER_FILES = docker_with(
    "'ps -q '*'service=controller'*) echo 4f1d",
    """'inspect '*Env*' 4f1d') printf '%s\\n' PATH=/bin "COMPOSE_FILE=$RUN" HOME=/""",
    """'compose --progress plain build'*) echo "built $COMPOSE_FILE" >>"$TMPDIR/calls" """,
    """'exec 4f1d pierhead validate') echo 'shop: 1 replica'; exit "${CODE:-0}" """,
    """'exec '*' pierhead validate'*) echo "of $*" """,
)
ECHO, SHOP, NIGHT = (f"compose/apps/{name}.yaml" for name in ("echo", "shop", "night"))


class TestFilesThatRunAndFilesThatAreNamed:
    """They drift apart: by `make up APPS=...`, which is not kept, and by an edit of .env, which nobody has started."""

    NAMED = f"compose/compose.yaml:{ECHO}:{NIGHT}"
    RUN = f"compose/compose.yaml:{ROOT}/{ECHO}:{SHOP}"
    TOLD = (
        "pierhead: the running stack has other files than COMPOSE_FILE (.env or the shell). "
        f"Only in the running stack: {SHOP}; a plain `make up` drops this unless COMPOSE_FILE names it. "
        f"Only in COMPOSE_FILE: {NIGHT}; `make up` starts this."
    )

    def run(self, machine: Machine, *command: str, run: str = RUN, **environment: str) -> tuple[int, str, str]:
        machine.has("docker", STACK_OF_OTHER_FILES)
        settings = {"COMPOSE_FILE": self.NAMED, "COMPOSE_PROFILES": "", "RUN": run, **environment}
        result = machine.run(*command, open_files=(), **settings)
        return result.returncode, result.stdout, result.stderr

    def built(self, machine: Machine) -> list[str]:
        return [call.removeprefix("built ") for call in machine.calls() if call.startswith("built ")]

    def test_both_are_built(self, machine: Machine) -> None:
        code, _, errors = self.run(machine, "build.sh")
        assert (code, errors.splitlines()) == (0, [self.TOLD])
        assert self.built(machine) == [self.NAMED, self.RUN]

    def test_apps_that_are_chosen_are_built_alone(self, machine: Machine) -> None:
        assert self.run(machine, "build.sh", "echo")[0] == 0
        assert self.built(machine) == [f"compose/compose.yaml:{ECHO}"]

    def test_both_are_checked(self, machine: Machine, control: str) -> None:
        for arguments in (["validate"], ["validate", "-o", "json"]):
            code, said, errors = self.run(machine, control, *arguments, run=f"compose/compose.yaml:{ECHO}:{SHOP}")
            assert code == 0
            assert errors.splitlines() == [
                self.TOLD,
                "The running stack's files:",
                "shop: 1 replica",
                "The files that COMPOSE_FILE names:",
            ]
            assert said == f"of exec --env COMPOSE_FILE={self.NAMED} 4f1d pierhead {' '.join(arguments)}\n"

    def test_a_mistake_in_what_runs_is_one_of_the_check(self, machine: Machine, control: str) -> None:
        code, said, _ = self.run(machine, control, "validate", CODE="2")
        assert code == 2
        assert said.startswith("of exec "), "what is named is checked all the same"

    def test_a_deployment_says_the_difference(self, machine: Machine) -> None:
        assert self.run(machine, "control.sh", "deploy", "echo")[2].splitlines() == [self.TOLD]
        assert machine.calls()[-1] == "docker exec 4f1d pierhead deploy echo"

    @pytest.mark.parametrize("command", [("build.sh",), ("control.sh", "deploy"), ("control.sh", "status")])
    def test_nothing_is_said_where_they_are_the_same(self, machine: Machine, command: tuple[str, ...]) -> None:
        run = f"./compose/compose.yaml:{ROOT}/{NIGHT}:{ECHO}"
        assert self.run(machine, *command, run=run)[2] == ""
        assert len(self.built(machine)) == (command == ("build.sh",))

    def test_only_what_differs_is_told(self, machine: Machine) -> None:
        told = self.run(machine, "control.sh", "deploy", run=f"{self.NAMED}:a.yaml:b.yaml")[2]
        assert "Only in the running stack: a.yaml, b.yaml; a plain" in told
        assert "Only in COMPOSE_FILE:" not in told


class TestDown:
    def test_force_removes_it_all_the_same(self, machine: Machine) -> None:
        machine.has("docker", 'case "$*" in "ps --all "*) echo /home/somebody/pierhead/compose ;; esac')
        result = machine.run("down.sh", "", "1")
        assert result.returncode == 0, result.stderr
        assert "docker compose --progress plain down" in machine.calls()

    def test_volumes_go_by_the_projects_label_when_all_else_is_gone(self, machine: Machine) -> None:
        machine.has("docker", "case \"$*\" in 'volume ls '*) printf '%s\\n' p_state p_llm-cache ;; esac")
        assert machine.run("down.sh").returncode == 0
        assert not [call for call in machine.calls() if "volume" in call]
        result = machine.run("down.sh", "1")
        assert result.returncode == 0, result.stderr
        assert machine.calls()[-2:] == [
            "docker volume ls -q --filter label=com.docker.compose.project=pierhead",
            "docker volume rm p_state p_llm-cache",
        ]

    def test_ctrl_c_is_told_as_what_it_is(self, machine: Machine) -> None:
        going = machine.directory / "going"
        os.mkfifo(going)
        machine.has("docker", f"case $3 in plain) trap 'exit 130' INT; echo yes >'{going}'; sleep 60 & wait ;; esac")
        # Python hands down that the signal is ignored, where pytest runs in the background of a shell.
        command = ["env", "--default-signal=INT", str(MACHINE / "down.sh")]
        with subprocess.Popen(
            command,
            env={"PATH": str(machine.programs), "TMPDIR": str(machine.directory), "COMPOSE_PROJECT_NAME": "pierhead"},
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            going.read_text()
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(timeout=60) == 130
            with suppress(ProcessLookupError):  # where the stand-in had not come to its sleep
                os.killpg(process.pid, signal.SIGKILL)
            told = process.stderr.read() if process.stderr else ""
        assert "Interrupted: some of the stack may be left. `make down` again goes on from here." in told
        assert "was not removed" not in told
        assert "failed" not in told


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:"))
    targets = set(phony.split()[1:])
    assert targets == set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make (\S+)", shown, flags=re.MULTILINE)) == targets


def test_scripts_are_executable_unless_they_are_sourced() -> None:
    sourced = {"messages.sh", "host.sh", "stack.sh", "uv.sh"}
    assert {path.name for path in SCRIPTS if not os.access(path, os.X_OK)} == sourced
