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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from pierhead.llm_app import llm_gateway

from tests.harness.http_answers import sends, serving

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "compose" / "machine"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg").exists()
SYSTEMD = Path("/run/systemd/system").is_dir()
APPS = " ".join(name.removesuffix(".yaml") for name in sorted(os.listdir(ROOT / "compose" / "apps")))
ANOTHER_CLONES = "/home/somebody/pierhead/compose"
OWN_FILE = {"COMPOSE_FILE": "compose/compose.yaml", "COMPOSE_PROFILES": ""}

# What the scripts may use of the machine. Not among them, unless a test adds a stand-in: docker, dockerd, sudo, apt.
COREUTILS = "basename cat comm cut dirname env head id mktemp mkdir paste printf rm sleep sort tail tee timeout tr"
TOOLS = (*COREUTILS.split(), "uname", "whoami", "awk", "bash", "flock", "grep", "sed")
Result = subprocess.CompletedProcess[str]


def docker_with(*cases: str) -> str:
    """A docker with a healthy engine, which does this for commands that match: "'ps -q '*) echo 4f1d"."""
    healthy = ("'version --format {{.Server.Version}}') echo 26.1.5+dfsg1", "'compose version --short') echo 2.26.1-4")
    return "\n".join(['case "$*" in', *(f"{case} ;;" for case in (*healthy, *cases)), "esac"])


HEALTHY_ENGINE = docker_with()


@dataclass
class Machine:
    """A pretended machine: its programs, its os-release, and a record of every stand-in that was called."""

    directory: Path
    open_files: Sequence[int] = ()
    """What the caller of the scripts has open."""

    @property
    def programs(self) -> Path:
        return self.directory / "bin"

    def has(self, program: str, script: str = "") -> None:
        """Put a stand-in on PATH; each call is recorded, then `script` (bash) runs."""
        path = self.programs / program
        path.unlink(missing_ok=True)
        path.write_text(f'#!/usr/bin/env bash\necho "{program} $*" >>"{self.directory}/calls"\n{script}\n')
        path.chmod(0o755)

    def is_a(self, name: str, **fields: str) -> None:
        lines = [f'PRETTY_NAME="{name}"', *(f"{key}={value}" for key, value in fields.items())]
        (self.directory / "os-release").write_text("\n".join(lines) + "\n")

    def calls(self, pattern: str = "") -> list[str]:
        """Calls of stand-ins that begin so."""
        record = self.directory / "calls"
        found = record.read_text().splitlines() if record.exists() else []
        return [call for call in found if re.match(pattern, call)]

    def run(self, script: str, *arguments: str, **environment: str) -> Result:
        own = {
            "PATH": str(self.programs),
            "HOME": str(self.directory),
            "TMPDIR": str(self.directory),
            "COMPOSE_PROJECT_NAME": "pierhead",
            "PIERHEAD_OS_RELEASE": str(self.directory / "os-release"),
        }
        return subprocess.run(
            [str(MACHINE / script), *arguments],
            env=own | environment,
            pass_fds=self.open_files,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"{tool} is needed by these tests"
        (tmp_path / "bin" / tool).symlink_to(found)
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


DOCKERS = {
    "fine": HEALTHY_ENGINE,
    "away": 'echo "no such host" >&2; exit 1',
    "old": "echo 20.10.24",
    "old Compose": HEALTHY_ENGINE.replace("2.26.1-4", "2.9.0"),
    "denied": 'echo "permission denied while trying to connect" >&2; exit 1',
    "context": 'case "$*" in "context show") echo desktop-linux ;; *) exit 1 ;; esac',
    "another's": docker_with(f"'ps '*) echo; echo {ANOTHER_CLONES}"),
}


@pytest.mark.parametrize(
    ("docker", "command", "words"),
    [
        ("old", "engine.sh", "Docker Engine 20.10.24 is too old: version 26 or newer is needed."),
        ("old Compose", "engine.sh", "the Compose plug-in is 2.9.0: version 2.26 or newer is needed."),
        ("denied", "engine.sh", "sudo usermod -aG docker"),
        ("away", "DOCKER_HOST=tcp://box engine.sh", "DOCKER_HOST is tcp://box, and no Docker Engine answers there."),
        ("context", "engine.sh", 'the Docker context is "desktop-linux", and no Docker Engine answers there.'),
        ("fine", "up.sh nonesuch", '"nonesuch" (no compose/apps/nonesuch.yaml)'),
        ("fine", "up.sh nonesuch", f"There are: {APPS}."),
        ("fine", "up.sh echo 1", "GPU: none of the chosen apps has a file for GPUs"),
        ("fine", "up.sh '' two", 'GPU: expected 1 or nothing, found "two".'),
        ("another's", "up.sh", 'a stack named "pierhead" runs from another clone: /home/somebody/pierhead.'),
        ("another's", "down.sh 1", "is another clone's: /home/somebody/pierhead. Nothing was removed."),
        ("another's", "down.sh 1", "cd /home/somebody/pierhead && make down; where that clone is gone, here: make"),
        ("fine", "down.sh yes", 'VOLUMES: expected 1 or nothing, found "yes".'),
        ("fine", "down.sh '' yes", "FORCE: expected 1 or nothing"),
        ("fine", "simulate.sh '' '' ''", "Example: make simulate TRACE=step:10x SERVICE=ranker"),
        ("fine", "control.sh scale ranker ''", "make scale SERVICE=ranker N=4"),
    ],
)
def test_a_refusal_says_why_and_changes_nothing(machine: Machine, docker: str, command: str, words: str) -> None:
    machine.has("apt-get")
    machine.has("docker", DOCKERS[docker])
    *settings, script = command.partition(".sh")[0].split()
    arguments = shlex.split(command.partition(".sh")[2])
    result = machine.run(f"{script}.sh", *arguments, **dict(each.split("=") for each in settings))
    assert result.returncode == 2
    assert words in result.stderr
    assert machine.calls("apt-get|docker (compose.* (build|up|down)|volume)") == []


def test_a_port_that_is_taken_is_named_before_anything_is_started(machine: Machine) -> None:
    machine.has("docker", HEALTHY_ENGINE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = machine.run("up.sh", PIERHEAD_HTTP_PORT=str(port))
    assert result.returncode == 2
    assert f"port {port} (PIERHEAD_HTTP_PORT) is taken by another program." in result.stderr
    assert machine.calls("docker (compose.* (build|up)|pull)") == []


# ----------------------------------------------------------------------------------- the engine and the images it needs


@pytest.mark.parametrize(
    ("script", "system", "words"),
    [
        ("engine.sh", "fedora", "on Some Linux it is not installed for you (only on Debian and Ubuntu)"),
        ("base-images.sh", "fedora", "on Some Linux they cannot be built (only on Debian and Ubuntu)"),
        ("engine.sh", "debian", "(not root, and no sudo)"),
    ],
)
def test_nothing_is_installed_on_an_unknown_system_or_without_root(
    machine: Machine, script: str, system: str, words: str
) -> None:
    machine.is_a("Some Linux", ID=system)
    machine.has("apt-get")
    if script == "base-images.sh":
        machine.has("docker", DOCKERS["away"])
    else:
        machine.has("id", "echo 1000")
    result = machine.run(script)
    assert result.returncode == 2
    assert words in result.stderr
    assert machine.calls("(?!docker |id )") == []


def test_an_engine_and_images_that_are_here_are_left_alone(machine: Machine) -> None:
    for program in ("apt-get", "sudo", "dockerd", "systemctl"):
        machine.has(program)
    machine.has("docker", HEALTHY_ENGINE)
    for script in ("engine.sh", "base-images.sh"):
        result = machine.run(script)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert machine.calls("(?!docker (version|compose version|image inspect) )") == []


def test_an_engine_that_is_installed_gets_settings_with_which_published_ports_outlive_it(machine: Machine) -> None:
    settings, there = machine.directory / "daemon.json", machine.directory / "installed"
    machine.is_a("Ubuntu 24.04", ID="ubuntu", VERSION_CODENAME="noble")
    machine.has("id", "echo 1000")
    machine.has("apt-cache", "echo '  Candidate: 28.2.2-0ubuntu1'")
    machine.has("docker", f"[ -e '{there}' ] || exit 1\n{HEALTHY_ENGINE}")
    machine.has("sudo", f"case \"$*\" in tee*) cat >\"$2\" ;; *' install '*) echo >'{there}' ;; esac")
    result = machine.run("engine.sh", PIERHEAD_ENGINE_SETTINGS=str(settings))
    assert result.returncode == 0, result.stderr
    assert "No Docker Engine here. Installing from the packages of Ubuntu 24.04: docker.io " in result.stdout
    assert json.loads(settings.read_text()) == {
        "features": {"cdi": True},
        "live-restore": True,
        "userland-proxy": False,
        "log-driver": "json-file",
        "log-opts": {"max-size": "10m", "max-file": "3"},
    }
    settings.write_text("{}")
    there.unlink()
    assert machine.run("engine.sh", PIERHEAD_ENGINE_SETTINGS=str(settings)).returncode == 0
    assert there.exists()
    assert settings.read_text() == "{}", "settings that are there already are the user's"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("engine.sh", marks=pytest.mark.skipif(SYSTEMD, reason="systemd starts the engine")),
        pytest.param("base-images.sh", marks=pytest.mark.skipif(not KEYRING, reason="needs Debian's keyring")),
    ],
)
def test_what_is_started_as_root_holds_none_of_the_callers_files(machine: Machine, script: str) -> None:
    """The engine would keep their locks, and the shell of mmdebstrap cannot do with many."""
    there = machine.directory / "started"
    engine = f"[ -e '{there}' ] || exit 1\n{HEALTHY_ENGINE}"
    no_images = 'case "$1 $2" in "image inspect" | "pull "*) exit 1 ;; esac'
    machine.is_a("Ubuntu 24.04", ID="ubuntu")
    machine.has("id", "echo 1000")
    machine.has("docker", engine if script == "engine.sh" else no_images)
    machine.has("dockerd")
    machine.has("mmdebstrap")
    note = f"""for file in /proc/$$/fd/*; do echo "open ${{file##*/}}"; done >>"$TMPDIR/calls"; echo >'{there}'"""
    info = f"[ -e '{there}' ]"
    machine.has("sudo", f'case "$*" in "bash -c "* | mmdebstrap*) {note} ;; "docker info") {info} ;; esac')
    with ExitStack() as files:
        opened = [files.enter_context((machine.directory / "some").open("w")) for _ in range(12)]
        machine.open_files = [file.fileno() for file in opened]
        result = machine.run(script)
    assert result.returncode == 0, result.stderr
    held = {int(call.removeprefix("open ")) for call in machine.calls("open ")}
    assert {0, 1, 2} <= held
    assert not held & set(machine.open_files)


# ------------------------------------------------------------------------------------------ make up: which files it has


def test_gpu_adds_the_file_of_each_chosen_app() -> None:
    sources = "; ".join(f". {MACHINE}/{name}.sh" for name in ("messages", "host", "stack"))
    choose = f'{sources}; choose_files "echo recsys" 1; echo "$COMPOSE_FILE"'
    chosen = subprocess.run(["bash", "-euc", choose], check=True, capture_output=True, text=True, timeout=60)
    files = [f"compose/{file}.yaml" for file in ("compose", "apps/echo", "apps/recsys", "gpu-recsys")]
    assert chosen.stdout.strip() == ":".join(files)


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


@pytest.mark.parametrize(("code", "refused"), [(2, True), (0, False), (1, False), (125, False)])
def test_what_the_controllers_own_reader_refuses_is_told_once_and_nothing_else_is_done(
    machine: Machine, code: int, refused: bool
) -> None:
    """A look at the files that does not succeed is in nobody's way."""
    machine.has("docker", docker_with("""'compose run '*) echo "$SAID"; exit "$CODE" """, "*' up '*) exit 1"))
    said = 'services.web.x-server: unknown key; did you mean "x-serve"?'
    result = machine.run("up.sh", SAID=said, CODE=str(code), **OWN_FILE)
    assert (result.returncode == 2) is refused
    assert result.stderr.count(said) == result.stderr.count("the compose files cannot be used") == int(refused)
    first = [" --progress plain build controller", " run --rm --no-deps --no-TTY controller pierhead validate"]
    then = [] if refused else [" --progress plain build", " --progress plain up --detach --no-build"]
    assert machine.calls(r"docker compose.* (build|run|up)\b") == [f"docker compose{step}" for step in first + then]


def test_services_of_other_files_are_named_before_they_go(machine: Machine) -> None:
    docker = docker_with(
        "'ps -q '*) echo 4f1d",
        "'ps --filter label=pierhead.project='*) printf '%s\\n' echo nightly ranker recsys",
        "'compose --profile * config --services') printf '%s\\n' echo controller nightly",
        "'compose config --services') printf '%s\\n' echo controller",
        "*' up '*) exit 1",
    )
    machine.has("docker", docker)
    result = machine.run("up.sh", **OWN_FILE)
    assert machine.calls("docker .* up "), result.stderr
    # nightly stays: it is of a profile that is not chosen.
    assert "not among the chosen files, so they are removed: ranker recsys." in result.stderr


GPU_FILES: dict[str, Any] = {
    "controller": {"environment": {"gpu": {"none": True}}, "deploy": {"resources": {"limits": {"devices": [1]}}}},
    "llm": {"deploy": {"resources": {"reservations": {"devices": [1]}}}},
    "llm-gateway": {"x-serve": {"llm": {"gpu": {"none": True}}}},
    "7": {"gpus": [{"count": 1}]},
    "ranker": {"x-serve": {"gpu": {"memory": "16GiB"}}},
    "recsys": {"gpus": [], "x-serve": {"autoscale": {"gpu": {"none": True}}}},
}


def test_every_service_that_asks_for_a_gpu_where_docker_knows_none_is_named(machine: Machine, tmp_path: Path) -> None:
    def told(runtimes: str = "{}", services: dict[str, Any] = GPU_FILES) -> str:
        written = yaml.safe_dump({"services": services}, sort_keys=False)
        (tmp_path / "config").write_text(written.replace("'", '"'))
        config = f"'compose --profile * config') cat '{tmp_path}/config'"
        info = f"'info '*) echo '{runtimes}'"
        machine.has("docker", docker_with(config, "'ps -q '*) echo 4f1d", info, "*' up '*) exit 1"))
        nowhere = f"{tmp_path}/cdi:{tmp_path}/run"
        return machine.run("up.sh", COMPOSE_PROFILES="", PIERHEAD_CDI_DIRS=nowhere).stderr

    assert "these services ask for one: llm 7 ranker. They will stay PENDING." in told()
    first_image = machine.calls().index(machine.calls("docker image inspect")[0])
    assert "docker compose --profile * config" in machine.calls()[:first_image], "before anything is built"
    assert "GPU" not in told(services={"echo": {"x-serve": {"replicas": 1}}})
    assert "GPU" not in told(runtimes='{"nvidia":{}}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "nvidia.yaml").touch()
    assert "GPU" not in told()


# --------------------------------------------------------------------------------------- make up: how it waits and ends


CONFIG = {
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


@pytest.fixture
def running(machine: Machine) -> Iterator[dict[str, str]]:
    """A stack of files that the scripts do not know, and what `up.sh` is run with for it."""
    (machine.directory / "config").write_text(yaml.safe_dump(CONFIG))
    config = f"'compose --profile * config') cat '{machine.directory}/config'"
    wait = """'exec '*' wait-ready '*) echo "mine: $MINE" >&2; printf '%b' "$READY"; exit "$WAITED" """
    status = "'exec '*' status') echo 'the whole status'"
    machine.has("docker", docker_with("'ps -q '*) echo 4f1d", config, wait, status))
    with serving(lambda handler: sends(handler, 200, b"")) as server:
        yield {
            "COMPOSE_FILE": "compose/compose.yaml:/home/me/mine.yaml",
            "COMPOSE_PROFILES": "",
            "PIERHEAD_API_PORT": server.rpartition(":")[2],
            "PIERHEAD_HTTP_PORT": server.rpartition(":")[2],
            "PIERHEAD_UP_TIMEOUT_S": "7",
            "PIERHEAD_PROC": str(machine.directory / "proc"),
        }


@pytest.mark.parametrize("program", ["docker-proxy", "dockerd"])
def test_up_waits_until_every_service_serves_and_lists_the_address_of_every_route(
    machine: Machine, running: dict[str, str], program: str
) -> None:
    (machine.directory / "proc" / "7").mkdir(parents=True)
    (machine.directory / "proc" / "7" / "comm").write_text(f"{program}\n")
    rollout = "a rollout of ranker goes on; `make deploy` waits for its end"
    ready = f"2 services, 4 replicas, all ready\n{rollout}\n"
    result = machine.run("up.sh", MINE="2 of 2 ready", WAITED="0", READY=ready, **running)
    assert result.returncode == 0, result.stderr
    assert "Waiting until every service serves: done" in result.stdout
    told = result.stdout.splitlines()
    assert {"the whole status", rollout} <= set(told)
    assert "2 services, 4 replicas, all ready" not in told, "the status says as much"
    http = f"http://127.0.0.1:{running['PIERHEAD_HTTP_PORT']}"
    assert [line.split() for line in told if http in line] == [
        ["a", f"{http}/a"],
        ["echo", f"{http}/echo?message=hi"],
        ["gate", f"{http}/v1/models"],
        ["recsys", f"{http}/mine"],
        ["API", http],
    ]
    # Where the engine runs a process for each port, it says what an engine without them would bring.
    assert ('"userland-proxy": false' in result.stdout) == (program == "docker-proxy")
    (started,) = machine.calls("docker .* up --detach")
    (asked,) = machine.calls(".* 4f1d pierhead wait-ready --serving --quiet --timeout 7")
    assert machine.calls().index(started) < machine.calls().index(asked)
    assert not list(machine.directory.glob("pierhead.*"))


@pytest.mark.parametrize(
    ("waited", "words", "has_status"),
    [
        (4, "not every service serves after 7 s. The stack goes on trying", True),
        (1, "and waiting does not help", True),
        (2, "the compose files cannot be used", False),  # the status would say the same again
    ],
)
def test_or_have_a_reason(machine: Machine, running: dict[str, str], waited: int, words: str, has_status: bool) -> None:
    result = machine.run("up.sh", MINE="2 pending: no GPU", WAITED=str(waited), READY="", **running)
    assert result.returncode == 1
    assert result.stderr.splitlines().count("mine: 2 pending: no GPU") == 1
    assert words in result.stderr
    assert ("the whole status" in result.stdout) == has_status


# ----------------------------------------------------------------------------------------- where a command is handed to


ANOTHER_CLONES_STACK = docker_with("'ps -q '*) echo 4f1d", f"'inspect '*' 4f1d') echo {ANOTHER_CLONES}")


def test_another_clones_stack_is_named_and_obeyed(machine: Machine, tmp_path: Path) -> None:
    machine.has("docker", ANOTHER_CLONES_STACK)
    result = machine.run("control.sh", "scale", "ranker", "4")
    assert (result.returncode, result.stdout) == (0, "")
    assert machine.calls()[-1] == "docker exec 4f1d pierhead scale ranker 4"
    (line,) = result.stderr.splitlines()
    assert line.startswith('pierhead: the stack "pierhead" was started from another clone, /home/somebody/pierhead: ')
    (tmp_path / "link").symlink_to(ROOT)
    machine.has("docker", ANOTHER_CLONES_STACK.replace("/home/somebody/pierhead", f"{tmp_path}/link"))
    assert machine.run("control.sh", "scale", "ranker", "4").stderr == "", "this clone's by another name"


@pytest.mark.parametrize(
    "docker",
    [ANOTHER_CLONES_STACK, "case $1 in image) exit 0 ;; esac"],
    ids=["beside another clone's stack", "without a stack"],
)
def test_what_needs_no_stack_runs_in_the_image_with_the_files_of_this_clone(
    machine: Machine, clone: Path, control: str, docker: str
) -> None:
    machine.has("docker", docker)
    for command in ("validate", "llm build --model m"):
        result = machine.run(control, *command.split(), COMPOSE_FILE="compose.yaml")
        assert (result.returncode, result.stderr) == (0, "")
        call = machine.calls()[-1]
        assert call.startswith(f"docker run --rm --network none --volume {clone}:{clone}:ro ")
        assert call.endswith(f"pierhead/controller:latest pierhead {command}")
    machine.has("docker", "exit 1")
    result = machine.run(control, "validate")
    assert result.returncode == 2
    assert "Build the image (make build)" in result.stderr


@pytest.mark.parametrize(("rootless", "file"), [(False, "--file a.yaml"), (True, "--file=a.yaml")])
def test_a_file_is_written_where_the_controllers_container_could_not(
    machine: Machine, clone: Path, control: str, rootless: bool, file: str
) -> None:
    security = "[name=rootless]" if rootless else "[name=seccomp]"
    machine.has("docker", f"case $1 in ps) echo 4f1d ;; info) echo '{security}' ;; esac")
    assert machine.run(control, "llm", "build", "--model", "m", *file.split()).returncode == 0
    user = "" if rootless else f"--user {os.getuid()}:{os.getgid()} "
    image = f"docker run --rm --network none --volume {clone}:{clone}:rw {user}--workdir {Path.cwd()}"
    assert machine.calls()[-1].startswith(image)
    assert machine.calls()[-1].endswith(f"pierhead llm build --model m {file}")


def test_without_a_controller_it_says_what_to_do(machine: Machine) -> None:
    machine.has("docker", "exit 1")
    result = machine.run("control.sh", "status", PIERHEAD_API_PORT="1")
    assert result.returncode == 3, "as the command itself ends where no controller answers"
    assert result.stderr.endswith('stack "pierhead" is not running. Start it with: make up\n')
    asked = machine.run("control.sh", _PIERHEAD_COMPLETE="complete_bash", COMP_WORDS="pierhead why ra")
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, "", ""), "a shell's question makes no noise"


def test_another_machines_api_needs_the_program_here(machine: Machine, control: str) -> None:
    machine.has("docker", "case $1 in ps) echo 4f1d ;; esac")
    result = machine.run(control, "status", PIERHEAD_API_URL="http://gpu-box:8100")
    assert result.returncode == 2
    assert "this clone has no .venv with the program. Make one: compose/machine/venv.sh" in result.stderr
    assert machine.calls() == []


# ----------------------------------------------------------------------------- files that run, and files that are named


STACK_OF_OTHER_FILES = docker_with(
    "'ps -q '*'service=controller'*) echo 4f1d",
    """'inspect '*Env*' 4f1d') printf '%s\\n' PATH=/bin "COMPOSE_FILE=$RUN" HOME=/""",
    """'compose --progress plain build'*) echo "built $COMPOSE_FILE" >>"$TMPDIR/calls" """,
)
ECHO, SHOP, NIGHT = (f"compose/apps/{name}.yaml" for name in ("echo", "shop", "night"))
NAMED = f"compose/compose.yaml:{ECHO}:{NIGHT}"
DIFFERENCE = (
    "pierhead: the running stack has other files than COMPOSE_FILE (.env or the shell). "
    f"Only in the running stack: {SHOP}; a plain `make up` drops this unless COMPOSE_FILE names it. "
    f"Only in COMPOSE_FILE: {NIGHT}; `make up` starts this."
)


@pytest.fixture
def drifted(machine: Machine) -> dict[str, str]:
    """What runs and what is named differ: by `make up APPS=...`, which is not kept, and by an edit of .env."""
    machine.has("docker", STACK_OF_OTHER_FILES)
    return {"COMPOSE_FILE": NAMED, "COMPOSE_PROFILES": "", "RUN": f"compose/compose.yaml:{ROOT}/{ECHO}:{SHOP}"}


def test_both_are_built_unless_apps_are_chosen(machine: Machine, drifted: dict[str, str]) -> None:
    result = machine.run("build.sh", **drifted)
    assert (result.returncode, result.stderr.splitlines()) == (0, [DIFFERENCE])
    assert machine.calls("built ") == [f"built {NAMED}", f"built {drifted['RUN']}"]
    assert machine.run("build.sh", "echo", **drifted).returncode == 0
    assert machine.calls("built ")[2:] == [f"built compose/compose.yaml:{ECHO}"]


def test_a_deployment_says_the_difference_and_nothing_where_there_is_none(
    machine: Machine, drifted: dict[str, str]
) -> None:
    assert machine.run("control.sh", "deploy", "echo", **drifted).stderr.splitlines() == [DIFFERENCE]
    assert machine.calls()[-1] == "docker exec 4f1d pierhead deploy echo"
    drifted["RUN"] = f"./compose/compose.yaml:{ROOT}/{NIGHT}:{ECHO}"
    assert machine.run("build.sh", **drifted).stderr == machine.run("control.sh", "deploy", **drifted).stderr == ""
    assert len(machine.calls("built ")) == 1


# ------------------------------------------------------------------------------------------------------------ make down


def test_force_removes_another_clones_stack_and_volumes_go_by_the_projects_label(machine: Machine) -> None:
    mine = "'volume ls '*) printf '%s\\n' p_state p_llm-cache"
    machine.has("docker", docker_with(f"'ps --all '*) echo {ANOTHER_CLONES}", mine))
    result = machine.run("down.sh", "", "1")
    assert result.returncode == 0, result.stderr
    assert "docker compose --progress plain down" in machine.calls()
    assert machine.calls("docker volume") == []
    machine.has("docker", docker_with(mine))
    result = machine.run("down.sh", "1")
    assert result.returncode == 0, result.stderr
    assert machine.calls()[-2:] == [
        "docker volume ls -q --filter label=com.docker.compose.project=pierhead",
        "docker volume rm p_state p_llm-cache",
    ]


def test_ctrl_c_is_told_as_what_it_is(machine: Machine) -> None:
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
