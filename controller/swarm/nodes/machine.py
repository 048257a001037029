"""This machine as a node of a Swarm: its engine, and the settings that the engine needs. What is right stays."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ControllerError, InvalidRequest
from ...tool.project.programs import NOT_FOUND, Programs
from ..names import Json
from .engine_settings import needs_restart, node_settings, read_settings, toolkit_settings
from .options import NodeOptions

ENGINE_S = 60.0
LOOK_S = 0.2
ENGINE_SETTINGS = "/etc/docker/daemon.json"
ENGINE_PID = "/var/run/docker.pid"
TOOLKIT = "nvidia-container-runtime"
TOOLKIT_SETTINGS = f"/etc/{TOOLKIT}/config.toml"
READ = '[ ! -e "$0" ] || cat "$0"'
WRITE = (
    'to=$(readlink -f "$0") && new=$to.new && { [ ! -e "$to" ] || cp -p "$to" "$new"; } && cat > "$new" && '
    'mv -f "$new" "$to"'
)
"""In `sh`, with a file's place. An interrupted one leaves the former file, and a new one has its owner and mode."""


@dataclass
class NodeMachine:
    """See the module."""

    programs: Programs
    engine_script: Path
    """Sees to a running Docker Engine."""
    has_systemd: bool = field(default_factory=Path("/run/systemd/system").is_dir)
    _sudo: tuple[str, ...] | None = None

    def start_engine(self) -> None:
        """Install the Docker Engine where there is none, start it where it does not run. Raises SystemExit."""
        if status := self.programs.call(str(self.engine_script), "engine-only", variables={}):
            raise SystemExit(status)  # the script has said why

    def info(self) -> Json:
        """What the engine says about itself; empty where it does not answer."""
        found = "".join(self.programs.read("docker", "info", "--format", "{{json .}}").lines)
        told: Json = json.loads(found or "{}")
        return told

    def prepare(self, options: NodeOptions, registry: str) -> None:
        """Write the settings of a node, and have the engine read them. GPUs are read when it starts; everything else is
        read while containers run. Raises InvalidRequest before anything is changed; ControllerError.
        """
        uuids = self._gpus(options.gpus)
        has_toolkit = bool(uuids) and self._has_toolkit(is_invented=bool(options.gpus))
        self._become_root()
        before = read_settings(ENGINE_SETTINGS, self._text(ENGINE_SETTINGS))
        after = node_settings(before, uuids, registry, has_toolkit=has_toolkit)
        info = self.info()
        restarts = needs_restart(info, uuids)
        running = info.get("ContainersRunning") if restarts and not options.restart else 0
        if running:
            raise InvalidRequest(
                f"the engine has to be restarted for its list of GPUs, and that ends the containers that run here: "
                f"{running}. Stop them first, or repeat with --restart. Nothing was changed."
            )
        if has_toolkit:
            toolkit = self._text(TOOLKIT_SETTINGS)
            self._write(TOOLKIT_SETTINGS, toolkit, toolkit_settings(toolkit))
        self._write(ENGINE_SETTINGS, json.dumps(before), json.dumps(after, indent=2) + "\n" if after != before else "")
        if restarts:
            self._restart()
        else:  # also where the settings are right: a command that was interrupted has not had them read
            self._signal("HUP")
        self._wait(
            lambda: self.info().get("LiveRestoreEnabled") is False,
            f"the engine keeps live-restore on, which a Swarm does not allow, against {ENGINE_SETTINGS}. Remove "
            "--live-restore from the command line of dockerd and repeat.",
        )

    # ------------------------------------------------------------------------------------------------------------ GPUs

    def _gpus(self, named: str) -> list[str] | None:
        """The UUIDs of this machine's GPUs, or those that are named; None = nothing says. Raises InvalidRequest."""
        if named:
            return [] if named == "none" else named.split(",")
        done = self.programs.read("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
        if done.status not in (0, NOT_FOUND):
            raise InvalidRequest(
                f"nvidia-smi does not list this machine's GPUs: {(done.output + done.errors).strip()} Repair it, or "
                "take the machine in without them: --gpus none. Nothing was changed."
            )
        return None if done.status == NOT_FOUND else done.lines

    def _has_toolkit(self, *, is_invented: bool) -> bool:
        """Raises InvalidRequest for one with which every container gets all GPUs, or none."""
        done = self.programs.read(TOOLKIT, "--version")
        if done.status == NOT_FOUND:
            if is_invented:
                return False
            raise InvalidRequest(
                f"this machine has GPUs, and no NVIDIA Container Toolkit ({TOOLKIT} is not on PATH). Install version "
                "1.19 or newer, or take the machine in without its GPUs: --gpus none. Nothing was changed."
            )
        version = re.search(r"version[: ]*v?([0-9][0-9.]*)", done.output)
        if version and version[1].startswith("1.18."):
            raise InvalidRequest(
                f"the NVIDIA Container Toolkit here, {version[1]}, does not give containers the GPUs that Swarm chose "
                "for them (NVIDIA/nvidia-container-toolkit#1599). Upgrade it to 1.19 or newer and repeat. Nothing was "
                "changed."
            )
        return True

    # ------------------------------------------------------------------------------------------------------ the engine

    def _restart(self) -> None:
        failed = f"the Docker Engine did not start with {ENGINE_SETTINGS}."
        if self.has_systemd:
            words = (*self._become_root(), "systemctl", "restart", "docker")
            if not self.programs.step("Restarting the Docker Engine", *words, variables={}, directory=Path("/")):
                raise ControllerError(failed)
        else:
            process = self._signal("TERM")
            self._wait(lambda: _has_ended(process), "the Docker Engine does not end.")
        self.start_engine()

    def _signal(self, name: str) -> str:
        """Signal the engine; its process. `kill` is the shell's own: a small system has no program of that name."""
        process = self._text(ENGINE_PID).strip()
        self._as_root("sh", "-c", 'kill -"$0" "$1"', name, process)
        return process

    def _wait(self, condition: Callable[[], bool], failed: str) -> None:
        deadline = time.monotonic() + ENGINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise ControllerError(failed)
            time.sleep(LOOK_S)

    # ----------------------------------------------------------------------------------------------------------- files

    def _become_root(self) -> tuple[str, ...]:
        """What comes before a command that needs root; sudo may ask for a password once. Raises InvalidRequest."""
        if self._sudo is None:
            self._sudo = () if self.programs.read("id", "-u").output.strip() == "0" else ("sudo",)
            if self._sudo and self.programs.call("sudo", "--validate", variables={}):
                raise InvalidRequest(
                    f"the engine's settings ({ENGINE_SETTINGS}) have to be read and written, and this user may not "
                    "(not root, and no sudo)."
                )
        return self._sudo

    def _text(self, place: str) -> str:
        """Of a file that only root may read; empty where there is none."""
        return self._as_root("sh", "-c", READ, place)

    def _write(self, place: str, before: str, after: str) -> None:
        if after and after != before:
            self._as_root("mkdir", "-p", str(Path(place).parent))
            self._as_root("sh", "-c", WRITE, place, given=after)

    def _as_root(self, *words: str, given: str = "") -> str:
        done = self.programs.read(*self._become_root(), *words, given=given)
        if done.status:
            raise ControllerError(f"`{' '.join(words)}`: {done.errors.strip()}")
        return done.output


def _has_ended(process: str) -> bool:
    """Also where its parent has not waited for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
