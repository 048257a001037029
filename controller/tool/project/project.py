"""A project: a directory with compose files of the user's own. What it is called, which files it has, and what is
refused before anything is written or started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pierhead.compose_names import DEFAULT_NAMES, RESERVED

from ...errors import InvalidRequest, SpecError
from ...files.project_files import OVERRIDE_NAMES, ProjectFiles
from ...files.yaml import load_written
from ...settings import ALERT_RECEIVERS, PROJECT_NAME
from . import choices, ports, stack_files
from .engines import ProjectEngine
from .env_file import EnvFile, setting
from .programs import Programs

NAME, FILES = "COMPOSE_PROJECT_NAME", "COMPOSE_FILE"

_MANAGE_NOTHING = """\
nothing to manage: no service of {files} has an x-serve block. Add one to a service, for example

services:
  {service}:
    ...
    scale: 0            # Pierhead starts the replicas
    x-serve:
      replicas: 2
      route: /          # HTTP from outside; without a route, gRPC for other services

Services without x-serve stay Compose's. `pierhead new NAME` writes a project to begin with."""


class NoProject(InvalidRequest):
    """There is no compose file where the command was typed, nor above."""


@dataclass(frozen=True)
class Project:
    """A directory with the user's compose files."""

    root: Path

    @property
    def is_clone(self) -> bool:
        """Whether it is Pierhead's own repository, which needs no `.pierhead/`."""
        return (self.root / "compose" / "machine" / "engine.sh").is_file()

    def env_file(self) -> EnvFile:
        """Its `.env`. Raises InvalidRequest."""
        return EnvFile(self.root / ".env")


def find(start: Path, environment: Mapping[str, str] = os.environ) -> Project:
    """The project that `start` is in: the nearest directory that has compose files. Raises NoProject.

    The command of a clone (`./pierhead`) is about that clone, wherever it is typed.
    """
    if clone := environment.get("PIERHEAD_CLONE"):  # its own command was typed
        return Project(Path(clone))
    first = Path(environment.get(FILES, "").partition(":")[0])
    for directory in (start, *start.parents):
        is_stacks = directory.name == stack_files.DIRECTORY or (directory / "machine" / "engine.sh").is_file()
        is_named = (directory / first).is_file() and (directory / first).parent == directory
        if not is_stacks and (is_named or _named(directory) or Project(directory).is_clone):
            return Project(directory)
    raise NoProject(
        f"there is no compose file in {start}, nor in a directory above it. Type the command in a project's directory, "
        "or begin one: pierhead new NAME"
    )


def _named(directory: Path) -> bool:
    if any((directory / name).is_file() for name in DEFAULT_NAMES):
        return True
    with contextlib.suppress(InvalidRequest):
        return bool(EnvFile(directory / ".env").get(FILES))
    return False


def own_files(project: Project, environment: Mapping[str, str]) -> list[str]:
    """The user's compose files, as COMPOSE_FILE names them. Raises NoProject where there are none."""
    named = setting(FILES, project.env_file(), environment) or ""
    stacks = (*stack_files.STACK_FILES.values(), *stack_files.TLS_FILES.values(), stack_files.ALERTS_FILE)
    files = [name for name in named.split(":") if name and name not in stacks]
    if not files:
        files = [name for name in DEFAULT_NAMES if (project.root / name).is_file()][:1]
        files += [name for name in OVERRIDE_NAMES if files and (project.root / name).is_file()][:1]
    if not files:
        raise NoProject(f"there is no compose file in {project.root}; begin a project with: pierhead new NAME")
    if missing := [name for name in files if not (project.root / name).is_file()]:
        raise InvalidRequest(f"{FILES}: there is no file {', '.join(missing)} in {project.root}")
    if (project.root / files[0]).parent != project.root:
        raise InvalidRequest(
            f"{FILES}: its first file, {files[0]}, is not in {project.root}, and Compose reads .env where the first "
            f"file is: type the command in {(project.root / files[0]).parent}. Nothing was changed."
        )
    return files


def check(project: Project, files: Iterable[str], environment: Mapping[str, str]) -> None:
    """Refuse files that the controller would not see, files without a service to manage, and names of the stack's.

    It reads the text as written; what only Compose can tell is the controller's reader's to say. Raises InvalidRequest.
    """
    files = list(files)
    written = _all_files(project, files)
    services = _services(written)
    refuse_outside(project, files, environment)
    file = project.env_file()
    optional = optional_services(lambda name: setting(name, file, environment))
    reserved = (*RESERVED[engine_of(project, environment)], *optional)
    if clash := [name for name in reserved if name in services]:
        raise InvalidRequest(
            f"services.{clash[0]}: the stack has a service of this name ({', '.join(reserved)} are its own); "
            "rename yours. Nothing was changed."
        )
    if not any("x-serve" in text for text in written.values()):
        shown = ", ".join(files)
        raise InvalidRequest(_MANAGE_NOTHING.format(files=shown, service=services[0] if services else "web"))


def optional_services(value_of: Callable[[str], str | None]) -> tuple[str, ...]:
    """The services that the stack has by the values of some settings."""
    acme = ("acme",) if (value_of("PIERHEAD_TLS") or "").lower() == "acme" else ()
    return (*acme, "alertmanager") if any(map(value_of, ALERT_RECEIVERS)) else acme


def engine_of(project: Project, environment: Mapping[str, str]) -> ProjectEngine:
    """The project's PIERHEAD_ENGINE; this machine's where it names none that there is."""
    named = setting("PIERHEAD_ENGINE", project.env_file(), environment)
    return next((engine for engine in ProjectEngine if engine == named), ProjectEngine.DOCKER)


def refuse_outside(project: Project, files: Iterable[str], environment: Mapping[str, str]) -> None:
    """Raise InvalidRequest for a file that the controller would not see."""
    if engine_of(project, environment) is not ProjectEngine.DOCKER:
        return
    if outside := _outside(project.root, _all_files(project, files)):
        raise InvalidRequest(
            f"{outside} lies outside of {project.root}, and the controller reads the files in its container, which has "
            "that directory only: keep the file, or a copy of it, in there. Nothing was changed."
        )


def _all_files(project: Project, files: Iterable[str]) -> dict[Path, str]:
    """The text of the user's compose files, and of those that they include or extend."""
    environment = {FILES: os.pathsep.join(files)}
    found = {}
    for path, *_ in ProjectFiles(project.root, environment).fingerprint():
        file = Path(path)
        if file.name != ".env" and stack_files.DIRECTORY not in file.parts:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found[file] = file.read_text(encoding="utf-8")
    return found


def _outside(root: Path, files: Iterable[Path]) -> Path | None:
    """The place of the first file that is not below `root`, links followed."""
    files = list(files)
    inside = [file for file in files if file.resolve().is_relative_to(root.resolve())]

    def is_meant(file: Path) -> bool:
        """Of `../base.yaml` in sub/a.yaml two places are among the files: as seen from sub, and from the project."""
        name = os.path.relpath(file, root)
        return not any(Path(os.path.normpath(each.parent / name)) in inside for each in inside)

    return next((file.resolve() for file in files if file not in inside and is_meant(file)), None)


def _services(written: Mapping[Path, str]) -> list[str]:
    found: list[str] = []
    for text in written.values():
        file = _load(text)
        services = file.get("services") if isinstance(file, Mapping) else None
        found += map(str, services) if isinstance(services, Mapping) else []
    return found


def _load(text: str) -> Any:
    """None for what is no YAML: Compose says so better."""
    with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
        return load_written(text)
    return None


# ------------------------------------------------------------------------------------------------ names and ports


def settle(project: Project, files: list[str], environment: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Write `.pierhead/`, and into `.env` what is not chosen yet: name, files, ports. Says what was chosen.

    Raises InvalidRequest for files that the controller would refuse; then `.env` is unchanged, and there is no
    `.pierhead/` where there was none.
    """
    with choices.alone(project.root) as others:
        chosen = _choose(project, files, environment, others)
        is_new = not (project.root / stack_files.DIRECTORY).exists()
        stack_files.write(project.root, has_grafana="grafana" in _services(_all_files(project, files)))
        engine = engine_of(project, environment)
        try:
            if not engine.has_own_reader and _docker("compose", "version"):  # `up` installs a missing one
                listed = ":".join([*files, stack_files.STACK_FILES[engine]])
                validate(project.root, {**environment, **chosen, FILES: listed})
        except InvalidRequest:
            if is_new:
                shutil.rmtree(project.root / stack_files.DIRECTORY)
            raise
        _keep(project.env_file(), chosen, say, _ports_of(others))


def _choose(
    project: Project, files: list[str], environment: Mapping[str, str], others: Mapping[Path, EnvFile]
) -> dict[str, str]:
    """The lines that `.env` lacks. `others`: projects that have just chosen."""
    file = project.env_file()
    chosen: dict[str, str] = {}
    name = setting(NAME, file, environment)
    if not name:
        name = chosen[NAME] = _free_name(project, files, {each.get(NAME) for each in others.values()})
    if not PROJECT_NAME.fullmatch(name):
        where = f"name ({', '.join(files)})" if NAME in chosen else NAME
        raise InvalidRequest(
            f'{where}: expected lower-case letters, digits, "-" and "_", a letter or digit first, found "{name}". '
            "Nothing was changed."
        )
    # Where another engine is chosen, `Stack.files` names its file instead.
    listed = ":".join([*files, stack_files.STACK_FILES[ProjectEngine.DOCKER]])
    if FILES not in environment and file.get(FILES) != listed:
        chosen[FILES] = listed
    open_ports = [each for each in ports.PORTS if setting(each, file, environment) is None]
    if engine_of(project, environment) is ProjectEngine.DOCKER and open_ports:
        taken = [int(text) for each in ports.PORTS if (text := setting(each, file, environment) or "").isdigit()]
        numbers = ports.choose(open_ports, [*taken, *_ports_of(others)], ports.is_free, _published(name))
        chosen |= {each: str(number) for each, number in numbers.items()}
    return chosen


def _ports_of(projects: Mapping[Path, EnvFile]) -> dict[int, Path]:
    """The ports that these projects have, and which has it."""
    written = ((file.get(name) or "", place) for place, file in projects.items() for name in ports.PORTS)
    return {int(text): place for text, place in written if re.fullmatch("[0-9]{1,5}", text)}


def validate(root: Path, environment: Mapping[str, str]) -> Sequence[str]:
    """Read the files in `root`, with these variables, as the controller does; returns its warnings.

    Raises InvalidRequest for files that it would refuse.
    """
    from ...files.compose import ComposeProject

    reading = ComposeProject(root, {**environment, "PWD": str(root)}).load()
    try:
        with ThreadPoolExecutor(1) as thread:  # `up --watch` calls this within an event loop
            return thread.submit(asyncio.run, reading).result().warnings
    except SpecError as error:
        raise InvalidRequest(
            f"the compose files cannot be used:\n{error}\nCorrect them and repeat. Nothing was written or started; "
            "running services are not affected."
        ) from None


def _keep(file: EnvFile, chosen: Mapping[str, str], say: Callable[[str], None], elsewhere: Mapping[int, Path]) -> None:
    if not chosen:
        return
    if any(file.get(name) is None for name in chosen):
        file.append("# Chosen once by pierhead; change what you like.")
    for name, value in chosen.items():
        file.set(name, value)
    file.save()
    say(f"In .env: {', '.join(f'{name}={value}' for name, value in chosen.items())}")
    for name, value in chosen.items():
        usual = ports.PORTS.get(name)
        if usual and int(value) != usual:
            other = elsewhere.get(usual)
            why = f"the project {other} has" if other else "something else listens at"
            say(f"{name} is {value}, as {why} port {usual}.")


def _free_name(project: Project, files: Iterable[str], just_chosen: Iterable[str | None]) -> str:
    """Compose's own name for the project, so that its volumes stay; another one where a project elsewhere has it."""
    own = name = _written_name(project, files) or normal_name(project.root.name)
    taken = {*_names_elsewhere(project.root), *just_chosen}
    number = 2
    while name in taken:
        name, number = f"{own}-{number}", number + 1
    return name


def _written_name(project: Project, files: Iterable[str]) -> str:
    """The last `name:` of the files, where it is plain."""
    found = ""
    for file in files:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            written = _load((project.root / file).read_text(encoding="utf-8"))
            name = written.get("name") if isinstance(written, Mapping) else None
            found = name if isinstance(name, str) and "$" not in name else found
    return found


def normal_name(directory: str) -> str:
    """As Compose derives a project's name from its directory's."""
    return re.sub(r"[^a-z0-9_-]", "", directory.lower()).lstrip("_-") or "pierhead"


def _names_elsewhere(root: Path) -> set[str]:
    """Names of projects that other directories have on this machine's engine; empty where it does not answer."""
    form = '{{.Label "com.docker.compose.project"}}\t{{.Label "com.docker.compose.project.working_dir"}}'
    rows = [line.partition("\t") for line in _docker("ps", "--all", "--format", form)]
    return {name for name, _, place in rows if name and place and not Path(place).is_relative_to(root)}


def _published(name: str) -> set[int]:
    """The ports of this machine that the project's own containers have."""
    of_ours = f"label=com.docker.compose.project={name}"
    lines = _docker("ps", "--filter", of_ours, "--format", "{{.Ports}}")
    return {int(port) for line in lines for port in re.findall(r":(\d+)->", line)}


def _docker(*arguments: str) -> list[str]:
    return Programs().read("docker", *arguments).lines
