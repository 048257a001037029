"""The scripts in compose/machine, run with a PATH of stand-ins: no engine is touched, nothing is installed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:"))
    targets = set(phony.split()[1:])
    assert targets == set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make (\S+)", shown, flags=re.MULTILINE)) == targets
