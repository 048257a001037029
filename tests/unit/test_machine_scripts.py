"""The scripts in compose/machine, run with a PATH of stand-ins: no engine is touched, nothing is installed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "compose" / "machine"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg").exists()
SYSTEMD = Path("/run/systemd/system").is_dir()
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


DOCKERS = {
    "fine": HEALTHY_ENGINE,
    "away": 'echo "no such host" >&2; exit 1',
    "old": "echo 20.10.24",
    "old Compose": HEALTHY_ENGINE.replace("2.26.1-4", "2.9.0"),
    "denied": 'echo "permission denied while trying to connect" >&2; exit 1',
    "context": 'case "$*" in "context show") echo desktop-linux ;; *) exit 1 ;; esac',
}


@pytest.mark.parametrize(
    ("docker", "command", "words"),
    [
        ("old", "engine.sh", "Docker Engine 20.10.24 is too old: version 26 or newer is needed."),
        ("old Compose", "engine.sh", "the Compose plug-in is 2.9.0: version 2.26 or newer is needed."),
        ("denied", "engine.sh", "sudo usermod -aG docker"),
        ("away", "DOCKER_HOST=tcp://box engine.sh", "DOCKER_HOST is tcp://box, and no Docker Engine answers there."),
        ("context", "engine.sh", 'the Docker context is "desktop-linux", and no Docker Engine answers there.'),
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
    moves = f'mv*) {shutil.which("mv")} "$2" "$3" ;;'
    sudo = f"case \"$*\" in tee*) cat >\"$2\" ;; {moves} *' install '*) echo >'{there}' ;; esac"
    machine.has("sudo", f'case $1 in tee) : >"$2"; exit 130 ;; esac\n{sudo}')
    assert machine.run("engine.sh", PIERHEAD_ENGINE_SETTINGS=str(settings)).returncode, "it is interrupted"
    machine.has("sudo", sudo)
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


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:"))
    targets = set(phony.split()[1:])
    assert targets == set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make (\S+)", shown, flags=re.MULTILINE)) == targets


# --------------------------------------------------------------------------------------------- the Python environment

PYTHON_OF_VENV = """case "$*" in
  *' pip' | '-m pip '*) [ -e .venv/pip ] && echo >.venv/uv ;;
  '-m uv '*) [ -e .venv/uv ] ;;
esac"""


@pytest.mark.parametrize("has_own_uv", [False, True])
def test_an_environment_whose_making_was_interrupted_is_made_again(machine: Machine, has_own_uv: bool) -> None:
    """Python is there before pip, with which uv is installed; a uv of the machine needs none."""
    clone = machine.directory / "clone"
    shutil.copytree(MACHINE, clone / "compose" / "machine")
    (clone / "uv.lock").write_text("")
    (clone / ".venv" / "bin").mkdir(parents=True)
    machine.has("python", PYTHON_OF_VENV)
    shutil.copy(machine.programs / "python", clone / ".venv" / "bin")
    machine.has("python3", 'case "$*" in *" venv --clear .venv") echo >.venv/pip ;; esac')
    machine.has("cp", f'exec {shutil.which("cp")} "$@"')
    if has_own_uv:
        machine.has("uv")
    for _ in range(2):
        result = machine.run(str(clone / "compose" / "machine" / "venv.sh"), "tool")
        assert result.returncode == 0, result.stderr
        assert len(machine.calls("python3 -m venv")) == (0 if has_own_uv else 1)
