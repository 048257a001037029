"""The scripts in compose/machine, run with a PATH of stand-ins: no engine is touched, nothing is installed."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
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
PORTS = {f"PIERHEAD_{name}_PORT": "1" for name in ("HTTP", "GRPC", "API", "STATS", "PROMETHEUS")}
"""One at which nothing listens, whatever else runs on this machine."""
OWN_FILE = {"COMPOSE_FILE": "compose/compose.yaml", "COMPOSE_PROFILES": "", **PORTS}

# What the scripts may use of the machine. Not among them, unless a test adds a stand-in: docker, dockerd, sudo, apt.
COREUTILS = "basename cat comm cut dirname env head id mktemp mkdir paste printf rm sleep sort tail tee timeout tr"
TOOLS = (*COREUTILS.split(), "sha256sum", "uname", "whoami", "awk", "bash", "flock", "grep", "sed")
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
            "PIERHEAD_KERNEL_SETTINGS": str(self.directory / "sysctl.conf"),
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
def on_swarm(clone: Path) -> str:
    return str(clone / "compose" / "machine" / "on-swarm.sh")


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
        ("fine", "simulate.sh '' '' ''", "Example: make simulate TRACE=step:10x SERVICE=ranker"),
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


# ----------------------------------------------------------------------------------- the engine and the images it needs


@pytest.mark.parametrize(
    ("script", "system", "words"),
    [
        ("engine.sh", "fedora", "on Some Linux it is not installed for you (only on Debian and Ubuntu)"),
        ("base-images.sh", "fedora", "on Some Linux they cannot be built (only on Debian and Ubuntu)"),
        ("engine.sh", "debian", "(not root, and no sudo)"),
        ("base-images.sh", "debian", "only root can build them"),
    ],
)
def test_nothing_is_installed_on_an_unknown_system_or_without_root(
    machine: Machine, script: str, system: str, words: str
) -> None:
    machine.is_a("Some Linux", ID=system)
    machine.has("apt-get")
    machine.has("id", "echo 1000")
    if script == "base-images.sh":
        machine.has("docker", DOCKERS["away"])
    if system == "debian":
        machine.has("mmdebstrap")
    result = machine.run(script)
    assert result.returncode == 2
    assert words in result.stderr
    assert machine.calls("(?!docker |id )") == []


def test_an_engine_and_images_that_are_here_are_left_alone(machine: Machine) -> None:
    for program in ("apt-get", "sudo", "dockerd", "systemctl"):
        machine.has(program)
    machine.has("id", "echo 1000")
    machine.has("docker", HEALTHY_ENGINE)
    for script in ("engine.sh", "base-images.sh"):
        result = machine.run(script)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert machine.calls("(?!id |docker (version|compose version|image inspect) )") == []


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
    assert "net.ipv4.neigh.default.gc_thresh3 = 16384" in (machine.directory / "sysctl.conf").read_text()
    assert len(machine.calls("sudo sysctl --quiet --load=")) == 1
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


def test_a_machine_in_no_swarm_is_told_before_anything_is_built(machine: Machine) -> None:
    machine.has("docker", docker_with("'info '*LocalNodeState*) echo inactive"))
    result = machine.run("up.sh", **OWN_FILE, PIERHEAD_ENGINE="swarm")
    assert result.returncode == 2
    assert "no Swarm.\npierhead: `pierhead node init` makes it the first manager of one." in result.stderr
    assert machine.calls(r"docker .*\b(build|up)\b") == []


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
    wait = """*' wait-ready '*) echo "mine: $MINE" >&2; printf '%b' "$READY"; : >"$HOME/waited"; exit $WAITED ;;"""
    machine.has("tool", f"case \"$*\" in {wait} *' status') echo 'the whole status' ;; esac")
    runs = """'ps -q '*"service=${GONE:-nothing}"*) [ -e "$HOME/waited" ] || echo 4f1d ;; 'ps -q '*) echo 4f1d"""
    machine.has("docker", docker_with(runs, config))
    with serving(lambda handler: sends(handler, 200, b"")) as server:
        yield {
            "COMPOSE_FILE": "compose/compose.yaml:/home/me/mine.yaml",
            "COMPOSE_PROFILES": "",
            "PIERHEAD_API_PORT": server.rpartition(":")[2],
            "PIERHEAD_HTTP_PORT": server.rpartition(":")[2],
            "PIERHEAD_UP_TIMEOUT_S": "7",
            "PIERHEAD_PROGRAM": str(machine.programs / "tool"),
            "PIERHEAD_PROC": str(machine.directory / "proc"),
        }


@pytest.mark.parametrize("program", ["docker-proxy", "dockerd"])
def test_up_waits_until_every_service_serves_and_lists_the_address_of_every_route(
    machine: Machine, running: dict[str, str], program: str
) -> None:
    (machine.directory / "proc" / "7").mkdir(parents=True)
    (machine.directory / "proc" / "7" / "comm").write_text(f"{program}\n")
    rollout = "ranker is still rolling out; run `make deploy` to wait"
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
    (asked,) = machine.calls("tool .* wait-ready --serving --quiet --timeout 7")
    assert machine.calls().index(started) < machine.calls().index(asked)
    assert not list(machine.directory.glob("pierhead.*"))


@pytest.mark.parametrize("change", ["Recreate", "Running"])
def test_up_says_that_it_replaces_haproxy_and_does_so_before_the_rest(
    machine: Machine, running: dict[str, str], change: str
) -> None:
    more = "for _ in {1..3000}; do printf '%99s\\n' ''; done"  # fails where nobody reads to the end
    cases = (
        f"*' --dry-run '*) echo ' DRY-RUN MODE -  Container shop-haproxy-1  {change}'; {more}",
        "*'ps --quiet'*) echo 4f1d",
    )
    docker = (machine.programs / "docker").read_text()
    machine.has("docker", docker.replace('case "$*" in', 'case "$*" in ' + " ;; ".join(cases) + " ;;"))
    told = machine.run("up.sh", MINE="", WAITED="0", READY="all\n", **running).stdout.splitlines()
    starts = told.index("Starting the stack ...")
    words = "This replaces HAProxy's container: new connections are refused until requests in flight have ended"
    assert any(line.startswith(words) for line in told[:starts]) is (change == "Recreate")
    assert ("Replacing HAProxy ..." in told[:starts]) is (change == "Recreate")


@pytest.mark.parametrize(
    ("waited", "words", "has_status"),
    [
        (4, "not every service serves after 7 s. The stack goes on trying", True),
        (1, "and waiting does not help", True),
        (2, "the compose files cannot be used", False),  # the status would say the same again
        ("controller", "the stack was taken down meanwhile, as by `make down`.\n", False),
        ("prometheus", "the stack was taken down meanwhile, as by `make down`.\n", False),
    ],
)
def test_or_have_a_reason(
    machine: Machine, running: dict[str, str], waited: int | str, words: str, has_status: bool
) -> None:
    ended = {"WAITED": "137", "GONE": waited} if isinstance(waited, str) else {"WAITED": str(waited)}
    result = machine.run("up.sh", MINE="2 pending: no GPU", READY="", **ended, **running)
    assert result.returncode == 1
    assert result.stderr.splitlines().count("mine: 2 pending: no GPU") == 1
    assert words in result.stderr
    assert ("the whole status" in result.stdout) == has_status


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


def test_the_same_files_are_built_once(machine: Machine, drifted: dict[str, str]) -> None:
    drifted["RUN"] = f"./compose/compose.yaml:{ROOT}/{NIGHT}:{ECHO}"
    assert machine.run("build.sh", **drifted).stderr == ""
    assert len(machine.calls("built ")) == 1


# ------------------------------------------------------------------------------------------------- a machine of a Swarm

TOKEN = f"SWMTKN-1-{'a' * 50}-{'b' * 25}"
NODE = r"""
case "$*" in
  'version '*) echo 26.1.5+dfsg1 ;;
  'info --format {{.LiveRestoreEnabled}}') echo false ;;
  'info --format {{.Name}}') echo box ;;
  'info --format {{.Swarm.LocalNodeState}}') cat "$HOME/state" ;;
  'info --format {{.Swarm.ControlAvailable}}') [ ! -e "$HOME/manager" ] || echo true ;;
  'info --format {{.Swarm.NodeAddr}}') echo 10.0.0.1 ;;
  'info --format {{range .Swarm.RemoteManagers}}'*) echo 10.0.0.1:2377 ;;
  'swarm join-token '*) echo "$TOKEN" ;;
  'swarm '*) [ -z "${SAYS:-}" ] || { echo "$SAYS"; exit 1; }; echo active >"$HOME/state" ;;
  'ps '*) echo "${RUNNING:-}" | sed '/^$/d' ;;
esac
"""


@pytest.fixture
def node(machine: Machine) -> Iterator[dict[str, str]]:
    """A machine that is in no Swarm, with an engine; the variables that the script needs."""
    (machine.directory / "state").write_text("inactive\n")
    (machine.directory / "daemon.json").write_text('{"live-restore": true, "debug": true}')
    (machine.programs / "python3").symlink_to(os.path.realpath(sys.executable))
    for program in ("date", "wc"):
        (machine.programs / program).symlink_to(str(shutil.which(program)))
    machine.has("docker", NODE)
    machine.has("sudo", 'exec "$@"')
    machine.has("systemctl")
    machine.has("timeout", "exit ${UNREACHABLE:-0}")
    with subprocess.Popen(["env", "--default-signal=HUP", "sleep", "60"]) as engine:
        (machine.directory / "pid").write_text(str(engine.pid))
        yield {
            "TOKEN": TOKEN,
            "PIERHEAD_ENGINE_SETTINGS": str(machine.directory / "daemon.json"),
            "PIERHEAD_TOOLKIT_SETTINGS": str(machine.directory / "nvidia" / "config.toml"),
            "PIERHEAD_ENGINE_PID": str(machine.directory / "pid"),
        }
        engine.kill()


def has_two_gpus(machine: Machine, toolkit: str = "1.19.0") -> None:
    machine.has("nvidia-smi", "printf '%s\\n' GPU-1 GPU-2")
    if toolkit:
        machine.has("nvidia-container-runtime", f"echo 'NVIDIA Container Runtime version {toolkit}'")


def test_a_machine_with_gpus_joins_and_keeps_its_other_settings(machine: Machine, node: dict[str, str]) -> None:
    has_two_gpus(machine)
    settings, toolkit = machine.directory / "daemon.json", machine.directory / "nvidia" / "config.toml"
    toolkit.parent.mkdir()
    toolkit.write_text('#swarm-resource = "DOCKER_RESOURCE_GPU"\n\n[nvidia-container-cli]\nno-cgroups = false\n')
    settings.write_text(
        '{"node-generic-resources": ["SSD=1", "NVIDIA-GPU=GPU-0"], "runtimes": {"crun": {"path": "crun"}}, "debug": 1}'
    )
    join = ("node.sh", "join", "10.0.0.1", TOKEN, "--registry", "10.0.0.1:5000")
    joined = machine.run(*join, **node)
    assert joined.returncode == 0, joined.stderr
    assert joined.stdout.splitlines()[-1] == "This machine, box, is a worker of the Swarm at 10.0.0.1:2377."
    assert json.loads(settings.read_text()) == {
        "node-generic-resources": ["SSD=1", "NVIDIA-GPU=GPU-1", "NVIDIA-GPU=GPU-2"],
        "runtimes": {"crun": {"path": "crun"}, "nvidia": {"path": "nvidia-container-runtime"}},
        "debug": 1,
        "live-restore": False,
        "default-runtime": "nvidia",
        "insecure-registries": ["10.0.0.1:5000"],
    }
    assert toolkit.read_text() == (
        'swarm-resource = "DOCKER_RESOURCE_NVIDIA-GPU"\n\n[nvidia-container-cli]\nno-cgroups = false\n'
    )
    assert machine.calls("docker swarm") == [f"docker swarm join --token {TOKEN} 10.0.0.1:2377"]
    before = machine.directory / "calls"
    before.unlink()
    again = machine.run(*join, **node)
    assert (again.returncode, again.stdout) == (0, joined.stdout.splitlines()[-1] + "\n")
    assert machine.calls("docker swarm|systemctl") == []


def test_a_machine_without_gpus_joins_while_its_containers_go_on(machine: Machine, node: dict[str, str]) -> None:
    joined = machine.run("node.sh", "join", "[fd00::1]:2377", TOKEN, **node, RUNNING="4f1d")
    assert joined.returncode == 0, joined.stderr
    assert machine.calls("docker swarm") == [f"docker swarm join --token {TOKEN} [fd00::1]:2377"]
    assert json.loads((machine.directory / "daemon.json").read_text()) == {"live-restore": False, "debug": True}
    engine = int((machine.directory / "pid").read_text())
    ended = os.waitid(os.P_PID, engine, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    assert ended.si_status == signal.SIGHUP, "the engine is told to read its settings"
    assert machine.calls("systemctl") == []


JOIN = f"join 10.0.0.1 {TOKEN}"


@pytest.mark.parametrize(
    ("command", "case", "words"),
    [
        ("join 10.0.0.1", "", "expected init, join ADDRESS TOKEN, or token [--manager]."),
        ("join 10.0.0.1 secret", "", '"secret" is no token of a Swarm'),
        ("join fd00::1 SWMTKN-1-a-b", "", "an IPv6 address is written [address]:2377."),
        (f"{JOIN} --gpus", "", "--gpus needs a value."),
        (JOIN, "UNREACHABLE=1", "the manager does not answer at 10.0.0.1, port 2377."),
        (JOIN.replace(".1 ", ".7 "), "state=active", "is in a Swarm already, whose managers are 10.0.0.1:2377."),
        (JOIN, "state=error", "is in a Swarm whose managers it does not reach: error"),
        (JOIN, "toolkit=", "has GPUs, and no NVIDIA Container Toolkit"),
        (JOIN, "toolkit=1.18.2", "the NVIDIA Container Toolkit here, 1.18.2, does not give containers the GPUs"),
        (JOIN, "toolkit=1.19.0 RUNNING=4f1d", "and that ends the containers that run here: 1."),
        (JOIN, "daemon.json={", "is not JSON"),
        ("init", "state=active", "is in a Swarm already"),
        ("token", "", "this machine is no manager of a Swarm."),
    ],
)
def test_what_keeps_a_machine_out_of_a_swarm_is_told_before_anything_changes(
    machine: Machine, node: dict[str, str], command: str, case: str, words: str
) -> None:
    given = dict(each.split("=", 1) for each in case.split())
    for file in given.keys() & {"state", "daemon.json"}:
        (machine.directory / file).write_text(given.pop(file))
    if "toolkit" in given:
        has_two_gpus(machine, given.pop("toolkit"))
    before = (machine.directory / "daemon.json").read_text()
    result = machine.run("node.sh", *command.split(), **node, **given)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
    assert (machine.directory / "daemon.json").read_text() == before
    assert machine.calls("docker swarm (init|join |leave)|systemctl") == []


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("rpc error: desc = A valid join token is necessary to join this cluster", "does not take this token"),
        ("remote CA does not match fingerprint. Expected: 1", "the token is of another Swarm than the manager at"),
        ("Timeout was reached before node joined.", "its Swarm has no quorum"),
        ("could not choose an IP address to advertise", "name one with --advertise-addr ADDRESS"),
        ("x509: certificate is not yet valid", "are not valid by this machine's clock"),
        ("no space left", "the Docker Engine says: no space left"),
    ],
)
def test_what_the_engine_says_about_a_join_comes_with_what_to_do(
    machine: Machine, node: dict[str, str], says: str, words: str
) -> None:
    result = machine.run("node.sh", *JOIN.split(), **node, SAYS=f"Error response from daemon: {says}")
    assert result.returncode == 2
    assert words in result.stderr


def test_the_first_manager_prints_the_command_that_takes_in_the_next_machine(
    machine: Machine, node: dict[str, str]
) -> None:
    machine.has("docker", NODE.replace("'swarm '*)", "'swarm init '*) touch \"$HOME/manager\" ;;\n  'swarm '*)"))
    (machine.programs / "touch").symlink_to(str(shutil.which("touch")))
    made = machine.run("node.sh", "init", **node, PIERHEAD_REGISTRY="here")
    assert made.returncode == 0, made.stderr
    assert f"  ./pierhead node join 10.0.0.1:2377 {TOKEN} --registry 10.0.0.1:5000" in made.stdout.splitlines()
    assert json.loads((machine.directory / "daemon.json").read_text())["insecure-registries"] == ["10.0.0.1:5000"]
    assert len(machine.calls("docker swarm init --default-addr-pool [0-9./]+ --default-addr-pool-mask-length 20$")) == 1
    for_managers = machine.run("node.sh", "token", "--manager", **node)
    assert for_managers.stdout == f"  ./pierhead node join 10.0.0.1:2377 {TOKEN}\n"
    assert machine.calls("docker swarm join-token")[-1] == "docker swarm join-token --quiet manager"
    registry = "'service inspect '*) echo 'node.id == n7' ;; 'node inspect '*n7) echo 10.0.0.7:2377 ;;\n  'swarm init"
    machine.has("docker", NODE.replace("'swarm '*)", f"{registry} '*) ;;\n  'swarm '*)"))
    elsewhere = machine.run("node.sh", "token", **node, PIERHEAD_REGISTRY="here")
    assert elsewhere.stdout.endswith(" --registry 10.0.0.7:5000\n")


ROUTES = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"


@pytest.mark.parametrize(
    ("networks", "found"),
    [
        (("0.0.0.0/0", "172.17.0.0/16"), "10.0.0.0/8"),
        (("10.0.0.0/24",), "10.128.0.0/9"),
        (("10.0.0.0/9", "10.200.0.0/16"), "10.128.0.0/10"),
        (("10.0.0.0/8",), "100.64.0.0/10"),
        (("10.0.0.0/8", "100.64.0.0/10"), "leave no range of addresses free"),
    ],
)
def test_overlay_networks_get_addresses_that_no_network_of_the_machine_has(
    tmp_path: Path, networks: Sequence[str], found: str
) -> None:
    def field(address: ipaddress.IPv4Address) -> str:
        return f"{int.from_bytes(address.packed, sys.byteorder):08X}"

    ranges = [ipaddress.IPv4Network(network) for network in networks]
    lines = [f"eth0 {field(one.network_address)} 0 1 0 0 0 {field(one.netmask)} 0 0 0\n" for one in ranges]
    (tmp_path / "route").write_text(ROUTES + "".join(lines))
    pool = [sys.executable, str(MACHINE / "node_settings.py"), "pool", str(tmp_path / "route")]
    done = subprocess.run(pool, capture_output=True, text=True, check=False)
    assert found in done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------------------ make down


def interrupted(machine: Machine, script: str, *arguments: str, **environment: str) -> str:
    """What a script says to Ctrl-C while its docker, which has said so in the pipe `going`, does not end by itself."""
    going = machine.directory / "going"
    own = {"PATH": str(machine.programs), "HOME": str(machine.directory), "TMPDIR": str(machine.directory)}
    # Python hands down that the signal is ignored, where pytest runs in the background of a shell.
    with subprocess.Popen(
        ["env", "--default-signal=INT", str(MACHINE / script), *arguments],
        env=own | {"COMPOSE_PROJECT_NAME": "pierhead"} | environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        going.read_text()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
        with suppress(ProcessLookupError):  # where the stand-in had not come to its sleep
            os.killpg(process.pid, signal.SIGKILL)
        return process.stderr.read() if process.stderr else ""


HANGS = "trap 'exit 130' INT; echo yes >\"$HOME/going\"; sleep 60 >/dev/null 2>&1 & wait"


def test_ctrl_c_is_told_as_what_it_is(machine: Machine, node: dict[str, str]) -> None:
    os.mkfifo(machine.directory / "going")
    machine.has("docker", NODE.replace("'swarm '*)", f"'swarm join '*) {HANGS} ;;\n  'swarm '*)"))
    told = interrupted(machine, "node.sh", *JOIN.split(), **node)
    assert told.splitlines()[-1] == "Interrupted. The same command goes on from here."


@pytest.mark.parametrize(
    ("script", "needs_torch"), [("docs.sh build", False), ("simulate.sh step", False), ("lint.sh check", True)]
)
def test_what_runs_no_model_does_not_install_torch(
    machine: Machine, clone: Path, script: str, needs_torch: bool
) -> None:
    (clone / "uv.lock").touch()
    (clone / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "mkdocs", "ruff", "mypy"):
        machine.has(name, 'case "$*" in *\'version("torch")\'*) exit 1 ;; esac')
        (clone / ".venv" / "bin" / name).symlink_to(machine.programs / name)
    machine.has("uv")
    machine.has("cp")
    name, argument = script.split()
    done = machine.run(str(clone / "compose" / "machine" / name), argument)
    assert done.returncode == 0, done.stderr
    assert machine.calls("uv sync ")
    assert bool(machine.calls(".*torch==")) is needs_torch


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:"))
    targets = set(phony.split()[1:])
    assert targets == set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make (\S+)", shown, flags=re.MULTILINE)) == targets


# ------------------------------------------------------------------------------------------------------------- a Swarm

ON_SWARM = {"PIERHEAD_ENGINE": "swarm", "COMPOSE_FILE": "compose/compose.yaml:compose/apps/echo.yaml"}
A_STACK = docker_with(
    '*".ContainerSpec.Image}} pierhead_controller") echo registry/controller@sha256:00',
    "'service inspect '*.ContainerSpec.Env*) echo PIERHEAD_API_TOKEN=secret",
    "'run '*) echo \"TOKEN $PIERHEAD_API_TOKEN\"",
)


def test_commands_run_beside_the_controller_of_a_swarm_whichever_node_it_is_on(machine: Machine, on_swarm: str) -> None:
    machine.has("docker", A_STACK)
    status = machine.run(on_swarm, "status", **ON_SWARM)
    ran = machine.calls("docker run")[-1]
    assert "--network pierhead_default" in ran
    assert ran.endswith("registry/controller@sha256:00 pierhead status")
    assert ("TOKEN secret" in status.stdout, "secret" in ran) == (True, False), "other users see a program's arguments"

    machine.run(on_swarm, "deploy", **ON_SWARM)
    stored, deployed = (call.rpartition(" ")[2] for call in machine.calls("docker run")[-2:])
    assert (stored, deployed) == ("files", "deploy"), "the controller is given the files before it is asked"

    machine.has("docker", docker_with("'service '*) echo 'Error: no such service: pierhead_controller' >&2; exit 1"))
    gone = machine.run(on_swarm, "status", **ON_SWARM)
    assert (gone.returncode, "does not run on this Swarm. Start it with: make up" in gone.stderr) == (3, True)

    machine.has("docker", docker_with("'service '*) echo 'the swarm does not have a leader' >&2; exit 1"))
    leaderless = machine.run(on_swarm, "status", **ON_SWARM)
    assert leaderless.returncode == 3
    assert leaderless.stderr.splitlines()[0].endswith("cannot ask the Swarm: the swarm does not have a leader")
    assert "more than half of the Swarm's managers must be up" in leaderless.stderr
    assert "Start it" not in leaderless.stderr


def test_status_says_where_files_were_edited_after_they_were_stored(
    machine: Machine, clone: Path, on_swarm: str
) -> None:
    """A Swarm's controller has the files that were stored, and looks at none."""
    words = "the compose files here are not as the Swarm has them"
    stack, app = clone / "compose/swarm.yaml", clone / "compose/apps/echo.yaml"
    app.parent.mkdir()
    stack.write_text("services: {}\n")
    app.write_text("services: {echo: {}}\n")
    kept = '\'config inspect \'*) [ ! -e "$HOME/labels" ] || cat "$HOME/labels" ;;'
    machine.has("docker", A_STACK.replace('case "$*" in', f'case "$*" in {kept}'))
    assert machine.run(on_swarm, "deploy", **ON_SWARM).returncode == 0
    [stored] = [call for call in machine.calls("docker run") if call.endswith(" controller.swarm.up files")]
    found = re.search(r"--env COMPOSE_FILE=(\S+) --env PIERHEAD_FILES_DIGEST=(\w{16}) ", stored)
    assert found
    assert found[1] == "compose/swarm.yaml:compose/apps/echo.yaml"
    assert words not in machine.run(on_swarm, "status", **ON_SWARM).stderr, "a stack of before, without labels"

    (machine.directory / "labels").write_text(f"{found[2]} {found[1]}\n")
    other_apps = ON_SWARM | {"COMPOSE_FILE": "compose/compose.yaml"}
    assert words not in machine.run(on_swarm, "status", **other_apps).stderr, "what is stored counts"
    app.write_text("services: {echo: {image: other}}\n")
    edited = machine.run(on_swarm, "status", **ON_SWARM)
    assert f"{words} (compose/swarm.yaml, compose/apps/echo.yaml)" in edited.stderr
    assert ("`make deploy`" in edited.stderr, "TOKEN secret" in edited.stdout) == (True, True)
    app.unlink()
    assert words in machine.run(on_swarm, "status", **ON_SWARM).stderr

    theirs = "'service inspect '*pierhead.clone*) echo /home/somebody/pierhead ;;"
    machine.has("docker", A_STACK.replace('case "$*" in', f'case "$*" in {theirs} {kept}'))
    elsewhere = machine.run(on_swarm, "status", **ON_SWARM).stderr
    assert 'the stack "pierhead" was started from another clone, /home/somebody/pierhead: ' in elsewhere
    assert words not in elsewhere, "that one's files are not these"


def test_down_on_a_swarm_reads_no_compose_file(machine: Machine, clone: Path) -> None:
    machine.has("docker", A_STACK)
    done = machine.run(str(clone / "compose/machine/down-on-swarm.sh"), "1", "1", **ON_SWARM)
    assert done.returncode == 0, done.stderr
    assert machine.calls("docker compose") == []
    assert re.search(r"VOLUMES=1 --env FORCE=1 .* python -m controller.swarm.up down$", machine.calls("docker run")[-1])
