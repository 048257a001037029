"""What an `up` asks of this machine: which ports are taken and by what, and whether there are GPUs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...errors import InvalidRequest, SettingsError
from ...files.acme import check_authority
from ...files.certificates import CERTIFICATES
from ...files.pem import PemFiles, PemKind, WrongFiles, read_files
from ...files.public_keys import public_keys
from ...settings import Settings
from . import resolved
from .compose import Compose
from .engines import ProjectEngine
from .ports import PORTS
from .resolved import Services
from .stack import ProjectStack, reached_at

GRAFANA = "PIERHEAD_GRAFANA_PORT"
HTTPS = "PIERHEAD_HTTPS_PORT"
_USUAL = {**PORTS, GRAFANA: 3000, HTTPS: 8443}
BIND = "PIERHEAD_BIND"
ACME_CA = "PIERHEAD_ACME_CA"
_OPENED = ("PIERHEAD_HTTP_PORT", "PIERHEAD_GRPC_PORT", HTTPS)
"""Ports of which BIND has the address."""
_LOOPBACK = "127.0.0.1"
_CDI = "/etc/cdi:/var/run/cdi"
"""Where Docker looks for devices."""
_PROCESS = re.compile(r'users:\(\("(?P<name>[^"]*)",pid=(?P<pid>\d+)')


def has_grafana(compose: Compose) -> bool:
    """Whether Grafana is asked for."""
    return "grafana" in compose.profiles


def address(stack: ProjectStack, name: str, path: str = "") -> str:
    """Of one of the stack's own ports, which the variable `name` has, on this machine."""
    host = bound_to(stack) if name in _OPENED else _LOOPBACK
    return f"http://{reached_at(host)}:{_port(stack, name)}{path}"


def http_address(stack: ProjectStack, path: str) -> str:
    """Where HTTP clients on this machine reach a path."""
    if not stack.has_tls:
        return address(stack, "PIERHEAD_HTTP_PORT", path)
    return address(stack, HTTPS, path).replace("http:", "https:", 1)


def bound_to(stack: ProjectStack) -> str:
    """The address on which HTTP and gRPC listen."""
    return stack.setting(BIND, _LOOPBACK)


def is_closed(stack: ProjectStack) -> bool:
    """Whether only clients on this machine reach HTTP and gRPC."""
    return bound_to(stack).startswith("127.") or bound_to(stack) == "[::1]"


def _port(stack: ProjectStack, name: str) -> str:
    return stack.setting(name, str(_USUAL[name]))


def refuse_foreign_address(stack: ProjectStack) -> None:
    """Raise InvalidRequest where this machine has no such address: Compose would stop HAProxy before it finds out."""
    host = bound_to(stack)
    if not stack.programs.has_address(host.strip("[]")):
        raise InvalidRequest(
            f"{BIND}: this machine has no address {host} (`ip address` lists those that it has). Write one of them, or "
            "0.0.0.0 for all, into .env. Nothing was started."
        )


def refuse_wrong_settings(stack: ProjectStack, services: Services) -> None:
    """Raise InvalidRequest for settings with which the controller would end at its start, after the former one has been
    stopped.
    """
    own = services.get("controller", {}).get("environment") or {}
    # Which engine there is has been found out, and a stack on many nodes gets its token later.
    given = {**own, "COMPOSE_PROJECT_NAME": stack.name, "PIERHEAD_PROJECT_DIR": str(stack.root), "PIERHEAD_ENGINE": ""}
    try:
        Settings.from_env(given)
    except SettingsError as error:
        raise InvalidRequest(
            f"the controller could not start with these settings:\n{error}\nCorrect them in .env (or in the shell) and "
            "repeat. Nothing was started; running services are not affected."
        ) from None


def refuse_wrong_certificates(stack: ProjectStack) -> Sequence[str]:
    """Warnings about the certificates for clients. Raises InvalidRequest where they cannot be used."""
    if not stack.has_tls:
        return ()
    if stack.tls == "acme":
        if stack.engine is not ProjectEngine.DOCKER:
            raise InvalidRequest(
                f"PIERHEAD_TLS=acme is for one machine, not for PIERHEAD_ENGINE={stack.engine}, where an ACME server's "
                "question may reach any node: write PIERHEAD_TLS=files, and have a program of your own ask for the "
                "certificate. Nothing was started."
            )
        return _acme_warnings(stack)
    now = time.time()
    return _read(stack, CERTIFICATES, stack.tls_dir, now).ending(now)


def _acme_warnings(stack: ProjectStack) -> Sequence[str]:
    """Raises InvalidRequest where the authority of a private ACME server cannot be used."""
    if name := stack.setting(ACME_CA):
        try:
            check_authority(stack.root, name)
        except WrongFiles as error:
            raise InvalidRequest(f"{ACME_CA}: {error}\nNothing was started.") from None
    if _port(stack, "PIERHEAD_HTTP_PORT") == "80" and not is_closed(stack):
        return ()
    place = f"{bound_to(stack)}:{_port(stack, 'PIERHEAD_HTTP_PORT')}"
    warning = (
        f"an ACME server asks at port 80 of each name, and HTTP listens at {place}: write PIERHEAD_HTTP_PORT=80 and "
        f"{BIND}=0.0.0.0, unless something in front of this machine forwards port 80 to it"
    )
    return (warning,)


def refuse_wrong_public_keys(stack: ProjectStack, services: Services) -> None:
    """Raise InvalidRequest where a service takes tokens, and the keys by which HAProxy checks them cannot be used."""
    if resolved.takes_tokens(services):
        _read(stack, public_keys(stack.jwt_algorithm), stack.jwt_dir, time.time())


def _read(stack: ProjectStack, kind: PemKind, directory: str, now: float) -> PemFiles:
    try:
        return read_files(kind, stack.root, directory, now)
    except WrongFiles as error:
        raise InvalidRequest(f"{error}\nNothing was started; running services are not affected.") from None


def refuse_taken_ports(compose: Compose) -> None:
    """Raise InvalidRequest where something that is not this stack's listens at a port that the stack publishes."""
    taken = {port: name for port, name in _wanted(compose).items() if _is_taken(compose.stack, name, port)}
    if not taken:
        return
    lines = [f"port {port} ({name}) is taken by {_listener(compose.stack, port)}." for port, name in taken.items()]
    first, stack = next(iter(taken.values())), compose.stack
    if first.startswith("services."):
        lines.append("Stop that, or write another port there. Nothing was started.")
    else:
        once = f"make up {first}=..." if stack.project.is_clone else f"{first}=... pierhead up"
        lines.append(f"Stop that, or choose another port: in .env, or for this time: {once}.")
    raise InvalidRequest("\n".join(lines))


def _wanted(compose: Compose) -> dict[int, str]:
    """What names each port. The stack's own come twice, and are named by their variables."""
    own = [*PORTS, *([GRAFANA] if has_grafana(compose) else []), *([HTTPS] if compose.stack.has_tls else [])]
    written = [(name, _port(compose.stack, name)) for name in own]
    named = [(name, int(text)) for name, text in written if text.isdigit()]
    named += resolved.ports(compose.services())
    return {port: name for name, port in reversed(named)}


def _is_taken(stack: ProjectStack, name: str, port: int) -> bool:
    if not stack.programs.listens(address(stack, name) if name in _USUAL else f"http://{_LOOPBACK}:{port}"):
        return False
    own = ("--filter", f"label=com.docker.compose.project={stack.name}")
    return not stack.programs.read("docker", "ps", "--quiet", "--filter", f"publish={port}", *own).lines


def _listener(stack: ProjectStack, port: int) -> str:
    form = "container {{.Names}}"
    for line in stack.programs.read("docker", "ps", "--filter", f"publish={port}", "--format", form).lines:
        return line
    found = _PROCESS.search(stack.programs.read("ss", "-Hltnp", f"sport = :{port}").output)
    return f"process {found['name']} ({found['pid']})" if found else "another program"


def has_gpus(stack: ProjectStack) -> bool:
    """Whether Docker knows any. PIERHEAD_CDI_DIRS: for tests, where to look for devices."""
    directories = (Path(name) for name in stack.environment.get("PIERHEAD_CDI_DIRS", _CDI).split(":"))
    if any(any(each.glob("*")) for each in directories):
        return True
    return "nvidia" in stack.programs.read("docker", "info", "--format", "{{json .Runtimes}}").output


def carries_ports_by_processes(stack: ProjectStack) -> bool:
    """Whether the engine runs a process for each published port, as it does unless its settings say not to.

    PIERHEAD_PROC: for tests, another /proc.
    """
    found = Path(stack.environment.get("PIERHEAD_PROC", "/proc")).glob("[0-9]*/comm")
    return "docker-proxy" in _texts(found)


def _texts(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        try:
            yield file.read_text(errors="replace").strip()
        except OSError:  # it has ended
            continue
