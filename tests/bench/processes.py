"""Process trees of the bench: started under a keeper, counted by role, ended without remains."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench.keeper import GRACE_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
MEGABYTE = 1e6
SERVER_PORTS = (20_000, 30_000)

ANY_CERTIFICATE = ssl.create_default_context()
"""Takes that of a server which the bench has started."""
ANY_CERTIFICATE.check_hostname, ANY_CERTIFICATE.verify_mode = False, ssl.CERT_NONE

Member = tuple[str, psutil.Process]
"""A role and a process that has it."""


class BenchError(Exception):
    """Something that is measured did not start or does not answer; the message says what and shows its last words."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of all processes of one role, in MB of 10^6 bytes."""

    processes: int
    rss_mb: float
    """Resident, summed: pages that processes share count in each."""
    pss_mb: float
    """Proportional: shared pages are divided among those that share them. Sums of it mean something."""
    largest_rss_mb: float


NOT_INHERITED = frozenset(("PYTHONDONTWRITEBYTECODE",))
"""Of a shell that has it, every process would compile all it imports: 5 MB that no image of ours or of theirs pays."""


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """What measured programs see of the bench's own environment."""
    return {name: value for name, value in environ.items() if name not in NOT_INHERITED}


class Kept:
    """One command under a keeper (keeper.py), its output in a file."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, grace_s: float) -> None:
        self.name, self.log = name, log
        with log.open("wb") as output:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.keeper", "--", *command],
                cwd=ROOT,
                env={**inherited(os.environ), **env, GRACE_VARIABLE: str(grace_s)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C goes to the bench alone, which then ends these in order
            )

    @property
    def process(self) -> psutil.Process:
        """The keeper: its descendants are the command's processes."""
        return psutil.Process(self._keeper.pid)

    def ended(self) -> bool:
        """Whether the command is over."""
        return self._keeper.poll() is not None

    def last_words(self, lines: int = 15) -> str:
        """The end of its output."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(f"  | {line[:2000]}" for line in text)

    def stop(self) -> None:
        """End every process of the tree and wait for it."""
        self._keeper.terminate()
        try:
            self._keeper.wait(timeout=30)
        except subprocess.TimeoutExpired:
            for process in [*self.process.children(recursive=True), self.process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._keeper.wait()


def wait_for(look: Callable[[], object], what: str, within_s: float, of: Sequence[Kept]) -> None:
    """Look until it is true; raises BenchError when time is up or a process of `of` has ended."""
    deadline = time.monotonic() + within_s
    while not look():
        for kept in of:
            if kept.ended():
                raise BenchError(f"{kept.name} ended before {what}. Its last words:\n{kept.last_words()}")
        if time.monotonic() > deadline:
            words = "\n".join(f"{kept.name}:\n{kept.last_words(8)}" for kept in of)
            raise BenchError(f"not within {within_s:g} s: {what}.\n{words}")
        time.sleep(0.05)


def listens(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex((host, port)) == 0


def get(url: str, timeout_s: float = 10.0, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Status and body of one GET; status 0 where nothing answers. Whose certificate it is does not matter."""
    try:
        asked = urllib.request.Request(url, headers=dict(headers or {}))
        with urllib.request.urlopen(asked, timeout=timeout_s, context=ANY_CERTIFICATE) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError:
        return 0, b""


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses on any address at the moment, below those that the kernel gives to clients."""
    found: set[int] = set()
    for port in random.sample(range(*SERVER_PORTS), SERVER_PORTS[1] - SERVER_PORTS[0]):
        with socket.socket() as each, contextlib.suppress(OSError):
            each.bind(("", port))
            found.add(port)
        if len(found) == count:
            return sorted(found)
    raise BenchError(f"no {count} free ports from {SERVER_PORTS[0]} to {SERVER_PORTS[1]}")


# ----------------------------------------------------------------------------------------------------------- accounts


def members_of(roots: Iterable[Member], classify: Callable[[str, psutil.Process], str]) -> Iterator[Member]:
    """Every descendant of the roots with its role: `classify(role of the root, process)`."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            children.setdefault(process.ppid(), []).append(process)
    for role, root in roots:
        found = list(children.get(root.pid, ()))
        for process in found:  # which grows during the loop
            found += children.get(process.pid, ())
            with contextlib.suppress(psutil.NoSuchProcess):
                yield classify(role, process), process


def cpu_seconds(members: Iterable[Member]) -> dict[str, float]:
    """CPU seconds so far, by role: user and system, of the processes and of the children they have reaped."""
    seconds: dict[str, float] = {}
    for role, process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used = times.user + times.system + times.children_user + times.children_system
            seconds[role] = seconds.get(role, 0.0) + used
    return seconds


def memory(members: Iterable[Member]) -> dict[str, Memory]:
    """Memory at this moment, by role."""
    found: dict[str, list[tuple[float, float]]] = {}
    for role, process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            info = process.memory_full_info()
            found.setdefault(role, []).append((info.rss / MEGABYTE, info.pss / MEGABYTE))
    return {
        role: Memory(
            processes=len(pairs),
            rss_mb=round(sum(rss for rss, _ in pairs), 1),
            pss_mb=round(sum(pss for _, pss in pairs), 1),
            largest_rss_mb=round(max(rss for rss, _ in pairs), 1),
        )
        for role, pairs in found.items()
    }


@dataclass(frozen=True, slots=True)
class MachineTime:
    """CPU seconds of the whole machine since it started."""

    busy: float
    stolen: float
    """Taken by the hypervisor while this machine wanted to run."""

    @classmethod
    def now(cls) -> MachineTime:
        times = psutil.cpu_times()
        return cls(times.user + times.nice + times.system + times.irq + times.softirq, times.steal)
