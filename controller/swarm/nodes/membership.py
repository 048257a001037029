"""`pierhead node init`, `join` and `token`: a machine comes into a Swarm. A second time changes nothing.

With a token any machine can join the Swarm, and as a manager it controls all the others. So these commands ask the
engine for the token, and the controller's API does not give one out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest
from .engine_settings import free_pool
from .machine import NodeMachine
from .options import NodeOptions

SWARM_PORT, GOSSIP_PORT, REGISTRY_PORT = 2377, 7946, 5000
JOIN_S = 120.0
"""The engine gives a join up earlier."""
ROUTES = Path("/proc/net/route")
Say = Callable[[str], None]


@dataclass
class Membership:
    """The commands. `typed`: how a user types `pierhead`; `project`, `has_registry`: of the stack here, if any."""

    machine: NodeMachine
    options: NodeOptions
    say: Say
    warn: Say
    typed: str = "pierhead"
    project: str = "pierhead"
    has_registry: bool = False
    """Whether the stack starts a registry of its own (PIERHEAD_REGISTRY=here)."""

    def run(self, words: Sequence[str]) -> None:
        """Carry one out. Raises InvalidRequest before anything is changed; ControllerError."""
        match words:
            case ["init"]:
                self.init()
            case ["join", address, token]:
                self.join(address, token)
            case ["token"]:
                self.print_join_command()
            case _:
                raise InvalidRequest(
                    "node: expected init, join ADDRESS TOKEN, or token [--manager]. On a manager, "
                    f"{self.typed} node token prints the command for a new machine."
                )

    def init(self) -> None:
        """Make this machine the first manager of a Swarm."""
        self.machine.start_engine()
        self._refuse_unusable_membership(lambda: self._is_manager)
        registry = self.options.registry
        self.machine.prepare(self.options, registry)
        if not self._is_manager:
            pool = self.options.address_pool or free_pool(ROUTES.read_text())
            # Room for several networks of 4094 addresses; Swarm's own size, 254, is soon the number of replicas.
            size = ("--default-addr-pool-mask-length", "20") if int(pool.partition("/")[2] or 32) <= 16 else ()
            self._change("", "init", "--default-addr-pool", pool, *size)
        if not registry and self.has_registry:
            self.machine.prepare(self.options, self._own_registry())
        self.say(f"This machine, {self.machine.info().get('Name')}, is a manager of a Swarm. For another machine:\n")
        self.print_join_command()

    def join(self, address: str, token: str) -> None:
        """Take this machine into a Swarm."""
        address = self._with_port(address)
        if not re.fullmatch(r"SWMTKN-1-[^-]+-[^-]+", token):
            raise InvalidRequest(
                f'join: "{token}" is no token of a Swarm (SWMTKN-1-...). On a manager, {self.typed} node token prints '
                "the command."
            )
        self.machine.start_engine()
        self._refuse_unusable_membership(lambda: self._is_of_a_manager(address))
        if self._state == "inactive":
            self._refuse_unreachable(address)
        self.machine.prepare(self.options, self.options.registry)
        if self._state == "inactive":
            self._change(address, "join", "--token", token, address)
        role = "manager" if self._is_manager else "worker"
        self.say(f"This machine, {self.machine.info().get('Name')}, is a {role} of the Swarm at {address}.")

    def print_join_command(self) -> None:
        """Print what is to be typed on a new machine."""
        if not self._is_manager:
            raise InvalidRequest(
                "token: this machine is no manager of a Swarm. Run it on one (docker node ls lists them), or make this "
                f"machine the first: {self.typed} node init"
            )
        role = "manager" if self.options.manager else "worker"
        token = self._docker_says("swarm", "join-token", "--quiet", role)
        if not token:
            raise InvalidRequest(
                "token: the Swarm has no quorum: more than half of its managers must be up. docker node ls lists them."
            )
        registry = self.options.registry or (self._own_registry() if self.has_registry else "")
        more = f" --registry {registry}" if registry else ""
        self.say(f"  {self.typed} node join {self._swarm('NodeAddr')}:{SWARM_PORT} {token}{more}")
        where = "With the tool" if self.typed == "pierhead" else "In a clone of this repository"
        self.warn(
            f"({where} there. Keep the token to yourself; `docker swarm join-token --rotate {role}` makes it void.)"
        )

    # ------------------------------------------------------------------------------- the Swarm, as this engine knows it

    def _swarm(self, name: str) -> Any:
        return (self.machine.info().get("Swarm") or {}).get(name) or ""

    @property
    def _state(self) -> str:
        return str(self._swarm("LocalNodeState"))

    @property
    def _is_manager(self) -> bool:
        return bool(self._swarm("ControlAvailable"))

    @property
    def _managers(self) -> list[str]:
        return [one["Addr"] for one in self._swarm("RemoteManagers")]

    def _is_of_a_manager(self, address: str) -> bool:
        """Also where it has the name of a host: the engine knows managers by their IP addresses."""
        host, _, port = address.rpartition(":")
        found = self.machine.programs.addresses_of(host.strip("[]"))
        return any((f"[{one}]:{port}" if ":" in one else f"{one}:{port}") in self._managers for one in found)

    def _own_registry(self) -> str:
        """Of the stack, on the node that `up` has put it on, else on this one."""
        form = "{{index .Spec.TaskTemplate.Placement.Constraints 0}}"
        found = self._docker_says("service", "inspect", "--format", form, f"{self.project}_registry")
        form = "{{if .ManagerStatus}}{{.ManagerStatus.Addr}}{{else}}{{.Status.Addr}}:{{end}}"
        node = found.rpartition("= ")[2]
        address = self._docker_says("node", "inspect", "--format", form, node).rpartition(":")[0] if node else ""
        return f"{address or self._swarm('NodeAddr')}:{REGISTRY_PORT}"

    def _docker_says(self, *words: str) -> str:
        return "".join(self.machine.programs.read("docker", *words).lines)

    def _change(self, manager: str, *words: str) -> None:
        """`docker swarm init` or `join`. Raises InvalidRequest with what the engine says, and what to do."""
        own = self.options.advertise_addr
        more = ("--advertise-addr", own) if own else ()
        done = self.machine.programs.read("docker", "swarm", *words[:1], *more, *words[1:], timeout_s=JOIN_S)
        if not done.status:
            return
        if self._state != "inactive":  # a join continues, and would be in the way of the next one
            self._docker_says("swarm", "leave", "--force")
        said = done.output + done.errors
        for pattern, remedy in _EXPLAINED.items():
            if re.search(pattern, said):
                raise InvalidRequest(remedy.format(address=manager, typed=self.typed, now=time.ctime()))
        plain = " ".join(said.removeprefix("Error response from daemon: ").split())
        raise InvalidRequest(f"the Docker Engine says: {plain}")

    # -------------------------------------------------------------------------------------------------------- refusals

    def _refuse_unusable_membership(self, is_wanted: Callable[[], bool]) -> None:
        """Raises InvalidRequest where this machine is in another Swarm, or in one that it does not reach."""
        state = self._state
        if state == "active" and not is_wanted():
            raise InvalidRequest(
                f"this machine is in a Swarm already, whose managers are {' '.join(self._managers)}. If that is the "
                "one, there is nothing to do. To change to another: docker swarm leave, and repeat. Nothing was "
                "changed."
            )
        if state not in ("active", "inactive"):
            raise InvalidRequest(
                f"this machine is in a Swarm whose managers it does not reach: {state} {self._swarm('Error')} Bring "
                "those managers up, or leave that Swarm (docker swarm leave --force) and repeat. Nothing was changed."
            )

    def _refuse_unreachable(self, address: str) -> None:
        """Before anything is changed. What UDP does (7946, 4789) cannot be seen from here."""
        host, _, port = address.rpartition(":")
        for each in (port, str(GOSSIP_PORT)):
            if not self.machine.programs.listens(f"http://{host}:{each}"):
                raise InvalidRequest(
                    f"the manager does not answer at {host.strip('[]')}, port {each}. Check the address, and that its "
                    "firewall lets this machine in: 2377/tcp, 7946/tcp and udp, 4789/udp. Nothing was changed."
                )

    def _with_port(self, address: str) -> str:
        if re.fullmatch(r"\[.*\]:[0-9]+|[^:\[]*:[0-9]+", address):
            return address
        if ":" in address:
            raise InvalidRequest(f"join: an IPv6 address is written [address]:{SWARM_PORT}.")
        return f"{address}:{SWARM_PORT}"


_EXPLAINED = {
    "join token": (
        "the manager at {address} does not take this token: it is incomplete, or void since another was made. On a "
        "manager, {typed} node token prints the command."
    ),
    "fingerprint": (
        "the token is of another Swarm than the manager at {address}. On a manager, {typed} node token prints the "
        "command."
    ),
    "not yet valid|has expired": (
        "the certificates of the Swarm at {address} are not valid by this machine's clock: {now}. Set the clock and "
        "repeat."
    ),
    "Timeout|DeadlineExceeded|does not have a leader": (
        "the manager at {address} did not take this machine in within its time: its Swarm has no quorum (docker node "
        "ls there), or it is overloaded. Repeat when it has one."
    ),
    "could not choose an IP|multiple addresses|could not find the system|must specify a listening address": (
        "this machine has several addresses, or none that others reach: name one with --advertise-addr ADDRESS (ip "
        "-brief address lists them)."
    ),
}
"""What the engine says -> what to do."""
