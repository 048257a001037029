"""The stack's files: where they are installed, and their copy in a project's `.pierhead/`, in the clone's layout."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pierhead.files import replace_file

from ...errors import ControllerError, InvalidRequest
from .carried import FILES
from .engines import ProjectEngine
from .version import release_of, version_of

DIRECTORY = ".pierhead"
STACK_FILES = {engine: f"{DIRECTORY}/{engine.included_as}" for engine in ProjectEngine}
"""By engine, what COMPOSE_FILE has after the project's own files."""
TLS_FILES = {"files": f"{DIRECTORY}/tls.yaml", "acme": f"{DIRECTORY}/acme.yaml"}
"""What it has in their place on one machine, by PIERHEAD_TLS."""
ALERTS_FILE = f"{DIRECTORY}/alerts.yaml"
"""What it has in addition where alerts are sent."""

_ROOT = Path(__file__).resolve().parents[3]
_BUILD = "build"
"""Written last: which build has last brought everything else."""
_LEFT_OUT = ("__pycache__", ".pytest_cache", ".DS_Store")

_GRAFANA = re.compile(rb"^  grafana:\n(?:    .*\n|\n)+", re.MULTILINE)

_INCLUDE = """\
# Written by pierhead {version}; what COMPOSE_FILE in .env adds to the project's own files.
include:
  - path: {path}
    project_directory: {directory}/compose
"""


class NoStackFiles(ControllerError):
    """This program is installed without them: it is that of the controller's image."""


def is_from(directory: Path) -> bool:
    """Whether this program runs from the clone in `directory`."""
    return directory.resolve() == _ROOT


def machine_scripts() -> Path:
    """Where the scripts are installed. Raises NoStackFiles."""
    return _root() / "compose" / "machine"


def tag() -> str:
    """The tag of the stack's images and of the base of users' images: PIERHEAD_TAG, else the release."""
    return os.environ.get("PIERHEAD_TAG") or release()


def version() -> str:
    """The wheel's version, which names the commit that it was built from. Raises NoStackFiles."""
    root = _root()
    return importlib.metadata.version("pierhead") if root.name == "pierhead_stack" else version_of(root)


def release() -> str:
    """The release that this is a build of. Raises NoStackFiles."""
    return release_of(_root())


def build() -> str:
    """Identifies the installed stack by a digest of its files. Raises NoStackFiles."""
    digest = hashlib.sha256()
    for path, source in sorted(_sources().items()):
        digest.update(f"{path}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def written_build(project: Path) -> str:
    """The build of the project's last complete copy; "" = no copy was completed yet."""
    try:
        return (project / DIRECTORY / _BUILD).read_text().strip()
    except OSError:
        return ""


def write(project: Path, *, has_grafana: bool = False) -> None:
    """Bring `.pierhead/` to the installed build. What is right already is left alone: the controller watches some.

    `has_grafana`: a service of the user's has this name, so the stack has none, which it can do without.
    Raises InvalidRequest where `.pierhead` is a link.
    """
    target = project / DIRECTORY
    if target.is_symlink():
        raise InvalidRequest(f"{target} is a link, and what it leads to is not Pierhead's to write: remove the link")
    wanted = {path: source.read_bytes() for path, source in _sources().items()}
    if has_grafana:
        file = "compose/compose.yaml"
        wanted[file] = _GRAFANA.sub(b"", wanted[file])
    included = {engine.included_as: _own(engine.stack_file) for engine in ProjectEngine}
    with_tls = f"{_own(ProjectEngine.DOCKER.stack_file)}, {_own('tls.yaml')}"
    included |= {"tls.yaml": f"[{with_tls}]", "acme.yaml": f"[{with_tls}, {_own('acme.yaml')}]"}
    included["alerts.yaml"] = _own("alerts.yaml")
    for file, path in included.items():
        wanted[file] = _INCLUDE.format(version=release(), directory=DIRECTORY, path=path).encode()
    wanted["compose/.env"] = f"# The tag of the stack's images.\nPIERHEAD_TAG={release()}\n".encode()
    wanted[".gitignore"] = b"*\n"
    wanted[_BUILD] = f"{build()}\n".encode()
    _remove_others(target, wanted)
    for path, content in wanted.items():
        _write(target / path, content)


def _own(name: str) -> str:
    return f"{DIRECTORY}/compose/{name}"


def _write(file: Path, content: bytes) -> None:
    mode = 0o755 if content.startswith(b"#!") else 0o644
    with contextlib.suppress(OSError):
        if file.read_bytes() == content and file.stat().st_mode & 0o777 == mode:
            return
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, content, mode)


def _remove_others(target: Path, wanted: Mapping[str, bytes]) -> None:
    """Remove files of an earlier build, which would become part of an image."""
    for directory, inside, files in os.walk(target, topdown=False):
        links = [name for name in inside if (Path(directory) / name).is_symlink()]
        for name in (*files, *links):
            file = Path(directory) / name
            if file.relative_to(target).as_posix() not in wanted:
                file.unlink()
        with contextlib.suppress(OSError):  # not empty
            Path(directory).rmdir()


def _root() -> Path:
    if not (_ROOT / "compose" / "machine" / "engine.sh").is_file():
        raise NoStackFiles("this `pierhead` is the controller's own, without the stack's files: type it on the machine")
    return _ROOT


def _sources() -> dict[str, Path]:
    """Every file of the copy by its path there."""
    root = _root()
    found = {path: file for name in FILES for path, file in _below(root / name, name)}
    runtime = _runtime()
    for path, file in _below(runtime, "services/runtime/pierhead"):
        inside = file.relative_to(runtime)
        if file.suffix == ".proto":
            found[f"proto/pierhead/{inside.as_posix()}"] = file
        elif inside.parts[1:2] != ("v1",):  # stubs: an image generates its own
            found[path] = file
    return found


def _runtime() -> Path:
    spec = importlib.util.find_spec("pierhead")
    if spec is None or spec.origin is None:
        raise NoStackFiles("the runtime, `pierhead`, is not installed with its controller: install the wheel again")
    return Path(spec.origin).parent


def _below(place: Path, path: str) -> Iterator[tuple[str, Path]]:
    """(path in the copy, file) of a file, or of every file in a directory."""
    if place.is_file():
        yield path, place
        return
    for file in sorted(place.rglob("*")):
        inside = file.relative_to(place)
        if file.is_file() and file.suffix != ".pyc" and not set(inside.parts) & set(_LEFT_OUT):
            yield f"{path}/{inside.as_posix()}", file
