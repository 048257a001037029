"""The stack of a project: what it is called, which files it has, and what runs of it.

In the clone the stack's files lie in compose/; a project of the user's own has them in .pierhead/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ControllerError, InvalidRequest
from ...settings import DEFAULT_TOKENS, api_socket
from . import stack_files
from .engines import ProjectEngine, own_program
from .env_file import EnvFile, setting
from .programs import Done, Programs
from .project import Project, engine_of, optional_services

OWN_SERVICES = ("haproxy", "controller", "prometheus", "grafana")
API_PORT, PROMETHEUS_PORT = 8100, 9090
_FILES_OF_THE_CLONE = {engine: f"compose/{engine.stack_file}" for engine in ProjectEngine}
_TLS_OF_THE_CLONE = {"files": ":compose/tls.yaml", "acme": ":compose/tls.yaml:compose/acme.yaml"}
_ALERTS_OF_THE_CLONE = "compose/alerts.yaml"
_PUBLISHED = re.compile(rf"(?P<address>\S+):(?P<port>\d+)->{API_PORT}/tcp")


Say = Callable[[str], None]


class NotUp(ControllerError):
    """The stack does not answer."""

    exit_code = 1


class NoStack(ControllerError):
    """The stack that the command is about does not run, or cannot be asked."""

    exit_code = 3


@dataclass(frozen=True)
class ControllerContainer:
    """The controller's container."""

    id: str
    directory: str
    """Where Compose read its first file."""
    api: str
    """The address of its API on this machine; "" where it is not published."""


@dataclass(frozen=True)
class ProjectStack:
    """The stack of one project."""

    project: Project
    environment: Mapping[str, str]
    programs: Programs
    _file: EnvFile = field(init=False)

    def __post_init__(self) -> None:
        """Raises InvalidRequest for a `.env` that is not text."""
        object.__setattr__(self, "_file", self.project.env_file())

    # -------------------------------------------------------------------------------------------------- what is written

    def setting(self, name: str, default: str = "") -> str:
        """What `docker compose` takes for a variable: the shell's value, else the one in `.env`."""
        return setting(name, self._file, self.environment) or default

    def written(self, name: str) -> str:
        """What `.env` has, whatever the shell has; "" = nothing."""
        return self._file.get(name) or ""

    @property
    def name(self) -> str:
        """The Compose project's."""
        return self.setting("COMPOSE_PROJECT_NAME", "pierhead")

    @property
    def api_socket(self) -> str:
        """Where its API lets in users of this machine, as a URL."""
        return f"unix://{api_socket(self.name)}"

    @property
    def profiles(self) -> str:
        """COMPOSE_PROFILES, and those of the stack's own services that settings ask for."""
        asked = {"registry": self.setting("PIERHEAD_REGISTRY") == "here", "alertmanager": self.sends_alerts}
        return ",".join(filter(None, (self.setting("COMPOSE_PROFILES"), *(name for name in asked if asked[name]))))

    @property
    def engine(self) -> ProjectEngine:
        """What runs its containers."""
        return engine_of(self.project, self.environment)

    @property
    def has_tls(self) -> bool:
        """Whether HTTP and gRPC clients come over TLS."""
        return self.tls in _TLS_OF_THE_CLONE

    @property
    def tls(self) -> str:
        """Where HAProxy's certificates come from: files, acme, or what else is written."""
        return self.setting("PIERHEAD_TLS").lower()

    @property
    def tls_dir(self) -> str:
        """The directory of the project that has the certificates of `tls: files`."""
        return self.setting("PIERHEAD_TLS_DIR", "tls")

    @property
    def jwt_dir(self) -> str:
        """The directory of the project that has the public keys of clients' tokens."""
        return self.setting("PIERHEAD_JWT_DIR", "jwt")

    @property
    def jwt_algorithm(self) -> str:
        """By which these tokens are signed."""
        return self.setting("PIERHEAD_JWT_ALGORITHM", DEFAULT_TOKENS.algorithm).upper()

    @property
    def own_services(self) -> tuple[str, ...]:
        """Those whose logs Compose has."""
        return (*OWN_SERVICES, *optional_services(self.setting))

    @property
    def sends_alerts(self) -> bool:
        """Whether `.env` names a receiver of alerts."""
        return "alertmanager" in optional_services(self.setting)

    @property
    def root(self) -> Path:
        """The project's directory."""
        return self.project.root

    @property
    def own_directory(self) -> str:
        """Where the stack's own compose files are, as seen from the project's directory."""
        return "compose" if self.project.is_clone else f"{stack_files.DIRECTORY}/compose"

    @property
    def files(self) -> str:
        """The COMPOSE_FILE that is named, with the stack's own file for the engine that is chosen."""
        own = _FILES_OF_THE_CLONE if self.project.is_clone else stack_files.STACK_FILES
        usual, of_engine = own[ProjectEngine.DOCKER], own[self.engine]
        if self.has_tls and self.engine is ProjectEngine.DOCKER:
            of_clone = f"{usual}{_TLS_OF_THE_CLONE[self.tls]}"
            of_engine = of_clone if self.project.is_clone else stack_files.TLS_FILES[self.tls]
        named = self.setting("COMPOSE_FILE", usual if self.project.is_clone else f"compose.yaml:{usual}")
        listed = ":".join(of_engine if self._plain(name) == usual else name for name in named.split(":"))
        if self.sends_alerts and self.engine is ProjectEngine.DOCKER:
            listed += f":{_ALERTS_OF_THE_CLONE if self.project.is_clone else stack_files.ALERTS_FILE}"
        return ":".join(dict.fromkeys(listed.split(":")))  # a program that this one starts is given the list

    # ------------------------------------------------------------------------------------------------ what a user types

    def typed(self, make: str, command: str = "") -> str:
        """How a user types it: in the clone as a target of make, in a project as a command."""
        return f"make {make}" if self.project.is_clone else f"pierhead {command or make}"

    @property
    def command(self) -> tuple[str, ...]:
        """What runs this program's other commands."""
        return (str(self.root / "pierhead"),) if self.project.is_clone else own_program("controller.tool")

    @property
    def kind(self) -> str:
        """What a message calls the directory that a stack is started from."""
        return "clone" if self.project.is_clone else "directory"

    @property
    def image_tag(self) -> str:
        """The tag of the stack's images."""
        return self.setting("PIERHEAD_TAG", "latest" if self.project.is_clone else stack_files.release())

    def about_another(self, directory: str) -> str:
        """What a command says about the stack of this name where another directory started it."""
        return (
            f'pierhead: the stack "{self.name}" was started from another {self.kind}, {directory}: what follows is '
            "about that one and its files"
        )

    # -------------------------------------------------------------------------------------------------------- what runs

    def controller(self) -> ControllerContainer | None:
        """The running controller; None where none runs or the engine does not answer."""
        form = '{{.ID}}\t{{.Label "com.docker.compose.project.working_dir"}}\t{{.Ports}}'
        for line in self._containers(form, service="controller").lines[:1]:
            identity, directory, ports = (*line.split("\t"), "", "")[:3]
            published = _PUBLISHED.search(ports)
            return ControllerContainer(identity, directory, _url(published) if published else "")
        return None

    def container(self, service: str) -> str:
        """The id of the running container of one of the stack's own services; "" where there is none."""
        return next(iter(self._containers("{{.ID}}", service=service).lines), "")

    def _containers(self, form: str, *options: str, service: str = "") -> Done:
        """What `docker ps` prints, in this form, of the stack's containers without those of `docker compose run`."""
        labels = (f"project={self.name}", *([f"service={service}"] if service else []), "oneoff=False")
        filters = [word for label in labels for word in ("--filter", f"label=com.docker.compose.{label}")]
        return self.programs.read("docker", "ps", *options, *filters, "--format", form)

    def engine_answers(self) -> bool:
        """Whether this user may ask the Docker Engine, and it answers."""
        return self.programs.read("docker", "ps", "--quiet").status == 0

    def is_elsewhere(self, directory: str) -> bool:
        """Whether the place where Compose read its first file is not of this project. Links are followed."""
        if not directory:
            return False
        place, own = Path(directory).resolve(), self.root.resolve()
        return place != own / "compose" if self.project.is_clone else not place.is_relative_to(own)

    def of_another(self, *options: str) -> str:
        """Another clone, or directory, that started what runs under this stack's name; "" where there is none.

        `options` of `docker ps`. Raises InvalidRequest where that fails.
        """
        listed = self._containers('{{.Label "com.docker.compose.project.working_dir"}}', *options)
        if listed.status:
            raise InvalidRequest(
                f'it is not known whether another {self.kind} started the stack named "{self.name}": `docker ps` '
                f"failed ({listed.reason}). Repeat the command when `docker ps` works. Nothing was changed."
            )
        return next((started_from(place) for place in listed.lines if self.is_elsewhere(place)), "")

    def difference(self, running: str) -> str:
        """In one line, how the files of the running stack and those that are named differ; "" where they do not."""
        runs, named = set(self._listed(running)), set(self._listed(self.files))
        dropped, added = ", ".join(sorted(runs - named)), ", ".join(sorted(named - runs))
        up = self.typed("up")
        words = "pierhead: the running stack has other files than COMPOSE_FILE (.env or the shell)."
        if dropped:
            words += f" Only in the running stack: {dropped}; a plain `{up}` drops this unless COMPOSE_FILE names it."
        if added:
            words += f" Only in COMPOSE_FILE: {added}; `{up}` starts this."
        return words if dropped or added else ""

    def _listed(self, files: str) -> Iterator[str]:
        return (self._plain(name) for name in files.split(":") if name)

    def _plain(self, name: str) -> str:
        """A file's name as seen from the project's directory."""
        return name.removeprefix(f"{self.root}/").removeprefix("./")

    def running_files(self, controller: ControllerContainer) -> str:
        """The COMPOSE_FILE that the running stack was started with."""
        form = "{{range .Config.Env}}{{println .}}{{end}}"
        lines = self.programs.read("docker", "inspect", "--format", form, controller.id).lines
        return next((line.partition("=")[2] for line in lines if line.startswith("COMPOSE_FILE=")), "")


def started_from(directory: str) -> str:
    """The clone, or the project's directory, whose stack has its first file in `directory`."""
    place = Path(directory)
    is_clones = place.name == "compose" and not (place / stack_files.DIRECTORY).is_dir()
    return str(place.parent if is_clones else place)


def reached_at(address: str) -> str:
    """The host by which this machine reaches what listens on an address."""
    return "127.0.0.1" if address in ("0.0.0.0", "::", "[::]") else address


def _url(published: re.Match[str]) -> str:
    return f"http://{reached_at(published['address'])}:{published['port']}"
