"""A Docker Engine that a test may stop: dockerd with mounts, a network and processes of its own, on the same kernel.

What it runs finds it at /var/run/docker.sock, as everywhere, so the stack's files need no change for it. All of it ends
with one process, and that one with the test's own, however that ends. What is left then, a directory and control
groups, is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from tests.harness.waiting import eventually

CLONE_NEWNET = 0x40000000
STARTED_WITHIN_S = 120.0
ENDED_WITHIN_S = 90.0
"""dockerd gives its containers their own grace periods."""
ALL_ENDED_WITHIN_S = 90.0
CONTROL_GROUPS = Path("/sys/fs/cgroup")
# The first process of the new namespaces. It ends with its input, and with it everything in them.
# The machine's engine may be at work: copies of its mounts must not outlive the containers that they are of.
FIRST_PROCESS = """
set -e
tac /proc/self/mounts | while read -r _ target _; do
  case $target in /var/lib/docker/*/* | /run/docker/*)
    umount --lazy "$target" || ! mountpoint --quiet "$target" # the engine may have removed it by then
  esac
done
mount --bind "$1/run" /run
ip link set lo up
echo ready
read -r _ || true
"""


def missing() -> str:
    """Why there can be no such engine here; "" where there can."""
    if os.geteuid() != 0:
        return "namespaces and dockerd take root"
    programs = ("dockerd", "containerd", "unshare", "nsenter", "ip", "iptables")
    absent = [name for name in programs if shutil.which(name) is None]
    return f"not on PATH: {', '.join(absent)}" if absent else ""


class OwnEngine:
    """See the module. `host` is its DOCKER_HOST, as seen from outside."""

    def __init__(self) -> None:
        self.work = Path(tempfile.mkdtemp(prefix="pierhead-engine-"))
        self.host = f"unix://{self.work}/run/docker.sock"
        self.log = self.work / "dockerd.log"
        self._group = f"pierhead-test-{secrets.token_hex(4)}"
        self._config = self.work / "daemon.json"
        self._daemon: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def running(self, *, live_restore: bool = True) -> Iterator[OwnEngine]:
        """Start it; end it and everything it ran, and remove what is left."""
        for name in ("run", "data"):
            (self.work / name).mkdir()
        self._configure(live_restore=live_restore)
        new = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "slave"]
        command = ["unshare", *new, "bash", "-c", FIRST_PROCESS, "first", str(self.work)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as namespaces:
            try:
                assert namespaces.stdout is not None
                assert namespaces.stdout.readline() == b"ready\n", "no namespaces for an engine of its own"
                self._first = int(Path(f"/proc/{namespaces.pid}/task/{namespaces.pid}/children").read_text())
                self.start()
                yield self
            finally:
                try:
                    namespaces.communicate(timeout=ALL_ENDED_WITHIN_S)  # its input ends; it is the last one to be gone
                finally:
                    namespaces.kill()  # where it is not gone, this takes all of them along
                if self._daemon is not None:
                    self._daemon.wait(ALL_ENDED_WITHIN_S)
                self._remove_left()

    # ---------------------------------------------------------------------------------------------- what happens to it

    def start(self) -> None:
        """Start dockerd and wait until it answers."""
        self._spawn()
        eventually(self._answers, "dockerd answers", STARTED_WITHIN_S)

    def stop(self, signal_name: str = "TERM") -> None:
        """End dockerd, as `systemctl stop docker` does (KILL: as a crash), and wait for its end."""
        assert self._daemon is not None
        self._signal(signal_name)
        self._daemon.wait(ENDED_WITHIN_S)

    def set_live_restore(self, on: bool) -> None:
        """Change the setting of the running dockerd."""
        self._configure(live_restore=on)
        self._signal("HUP")
        wanted = str(on).lower()
        eventually(lambda: self._info("LiveRestoreEnabled") == wanted, f"live-restore is {on}", STARTED_WITHIN_S)

    def load(self, images: Iterable[str]) -> None:
        """Bring images over from the machine's own engine."""
        with subprocess.Popen(["docker", "save", *images], stdout=subprocess.PIPE) as saving:
            load = ["docker", "--host", self.host, "load", "--quiet"]
            subprocess.run(load, stdin=saving.stdout, stdout=subprocess.DEVNULL, check=True, timeout=600)
        assert saving.returncode == 0, f"docker save {' '.join(images)}"

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Within: this thread, and the processes that it starts, are in the engine's network, where its ports are."""
        with Path("/proc/thread-self/ns/net").open() as own, Path(f"/proc/{self._first}/ns/net").open() as other:
            _enter(other)
            try:
                yield
            finally:
                _enter(own)

    # ------------------------------------------------------------------------------------------------------- the rest

    def _signal(self, name: str) -> None:
        pid = (self.work / "run/docker.pid").read_text().strip()
        subprocess.run(["nsenter", *self._inside(), "kill", f"-{name}", pid], check=True, timeout=60)

    def _inside(self) -> list[str]:
        return ["--target", str(self._first), "--mount", "--net", "--pid", "--"]

    def _configure(self, *, live_restore: bool) -> None:
        settings = {
            "live-restore": live_restore,
            "userland-proxy": False,  # as compose/machine/engine.sh sets it where it installs an engine
            "data-root": str(self.work / "data"),
            "features": {"cdi": True},
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "cgroup-parent": f"/{self._group}",
        }
        self._config.write_text(json.dumps(settings))

    def _spawn(self) -> None:
        command = ["nsenter", *self._inside(), "dockerd", "--config-file", str(self._config)]
        with self.log.open("ab") as log:
            self._daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _answers(self) -> bool:
        """Whether dockerd answers. It ends if its containerd takes more than 15 s to start, and is then started again,
        as systemd does.
        """
        assert self._daemon is not None
        if self._daemon.poll() is not None:
            said = self.log.read_text()[-2000:]
            self._spawn()
            raise AssertionError(f"dockerd has ended: {said}")
        return bool(self._info("ServerVersion"))

    def _info(self, key: str) -> str:
        """One field of `docker info`; "" while the daemon does not answer."""
        command = ["docker", "--host", self.host, "info", "--format", f"{{{{.{key}}}}}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    def _remove_left(self) -> None:
        shutil.rmtree(self.work)
        eventually(self._groups_are_gone, "its control groups are gone")

    def _groups_are_gone(self) -> bool:
        """Remove them. One whose last process has just ended is busy for a moment yet, which is an error."""
        for top in (*CONTROL_GROUPS.glob(self._group), *CONTROL_GROUPS.glob(f"*/{self._group}")):
            for directory, _, _ in os.walk(top, topdown=False):
                os.rmdir(directory)
        return True


def _enter(namespace: IO[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
