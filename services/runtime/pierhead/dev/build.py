"""`python -m pierhead build shop:shop`: the compose file of an application, and a Dockerfile."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pierhead.classes.service import Bound, serves_http
from pierhead.classes.target import TARGET, TARGET_HELP, bound_at
from pierhead.compose_names import RESERVED, own_image
from pierhead.files import replace_file
from pierhead.rayserve.pickles import SECRET, write_secret
from pierhead.runner.graph import check_routes, graph_of
from pierhead.runner.options import check_kind, options_of
from pierhead.runner.runner import NoApplication

DOCKERFILE: Final = "Dockerfile"
IGNORED: Final = ".dockerignore"
_IGNORE: Final = ".*\n**/.venv\n**/__pycache__\n"

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
"""Text that YAML takes for itself without quotes, but for `_WORDS`."""
_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null"))
_NO_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON leaves unescaped and YAML refuses."""


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    words = "print the compose file of an application"
    command: argparse.ArgumentParser = commands.add_parser("build", help=words, description=words)
    command.add_argument("target", nargs="?", default=TARGET, help=TARGET_HELP)
    command.add_argument("-o", "--output", type=Path, help="write the compose file there in place of printing it")
    command.add_argument(
        "--dockerfile", nargs="?", const=Path(DOCKERFILE), type=Path,
        help="write the image's Dockerfile as well, and a .dockerignore where there is none (default: ./Dockerfile)",
    )  # fmt: skip
    command.add_argument("--image", help="name of the image (default: the project's name and the module's)")
    command.add_argument("--force", action="store_true", help="overwrite files that exist")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print or write the files. Exits with 2 for a graph that cannot be served, and for a file that exists."""
    with contextlib.redirect_stdout(sys.stderr):  # what the module prints is no part of the file
        bound = bound_at(arguments.target)
    try:
        text = compose_text(bound, arguments.target, arguments.image or own_image(arguments.target.partition(":")[0]))
        files = {arguments.output: text} if arguments.output else {}
        if arguments.dockerfile:
            files[arguments.dockerfile] = dockerfile_text(arguments.target, Path("requirements.txt").exists())
            ignored = arguments.dockerfile.with_name(IGNORED)
            if not ignored.exists():
                files[ignored] = _IGNORE
        _write(files, force=arguments.force)
        if arguments.output and any(SECRET in each.cls.__environment__ for each in graph_of(bound).values()):
            env_file = arguments.output.with_name(".env")
            if write_secret(env_file):
                sys.stderr.write(f"wrote {SECRET} into {env_file}\n")
    except NoApplication as error:
        sys.stderr.write(f"pierhead build: {error}\n")
        raise SystemExit(2) from None
    if arguments.output is None:
        sys.stdout.write(text)


def compose_text(bound: Bound, target: str, image: str) -> str:
    """The compose file of a graph. Raises NoApplication."""
    graph = graph_of(bound)
    has_http = {name: serves_http(each.cls) for name, each in graph.items()}
    check_routes({name: options_of(each, {}) for name, each in graph.items()}, has_http)
    lines = [f"# The services of {target}, made by `python -m pierhead build {target}`. Edit it as you like."]
    lines.append("services:")
    for name, each in graph.items():
        if name in RESERVED["docker"]:
            own = ", ".join(RESERVED["docker"])
            raise NoApplication(
                f"class {each.cls.__name__}: the stack has a service called {name} ({own} are its own); call the class "
                "otherwise"
            )
        lines += [f"  {name}:", *(f"    {line}" for line in _service(name, each, image, builds=each is bound)), ""]
    return "\n".join(lines)


def _service(name: str, bound: Bound, image: str, *, builds: bool) -> Iterator[str]:
    yield f"image: {image}"
    if builds:  # Compose names an image after the service that builds it, so only one does
        yield "build: ."
    yield "scale: 0 # Compose builds the image; the controller starts the replicas"
    uses = list(dict.fromkeys(each.name for each in bound.uses()))
    if uses:
        yield f"depends_on: [{', '.join(uses)}] # a new version is rolled out after theirs"
    if bound.cls.__environment__:
        yield "environment:"
        yield from (f"  {name}: {json.dumps(value)}" for name, value in bound.cls.__environment__.items())
    words = options_of(bound, {})
    yield "x-serve:" if words else "x-serve: {}"
    for key, value in words.items():
        try:
            check_kind(key, value)
            yield f"  {key}: {yaml_flow(value)}"
        except ValueError as error:
            raise NoApplication(f"class {bound.cls.__name__} ({name}): {key}: {error}") from None


def dockerfile_text(target: str, has_requirements: bool) -> str:
    """The Dockerfile of an application's image."""
    release = metadata.version("pierhead").partition(".dev")[0]  # what follows names the commit
    lines = [f"FROM pierhead/python:{release}"]
    if has_requirements:
        lines += ["COPY requirements.txt .", "RUN pip install --no-cache-dir -r requirements.txt"]
    command = json.dumps(["python", "-m", "pierhead", "serve", target])
    lines += ["COPY . .", f"RUN python -m pierhead contract {shlex.quote(target)}", "USER pierhead", f"CMD {command}"]
    return "\n".join(lines) + "\n"


def yaml_flow(value: Any) -> str:
    """A value of JSON as YAML in one line, dollar signs twice as Compose wants them. Raises ValueError for others."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(_key(key))}: {yaml_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_flow, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float) and math.isfinite(value):
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")  # 1e+16 is text to YAML 1.1
    raise ValueError(f"expected a value that JSON can hold, found {value!r:.60}")


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise ValueError(f"expected text as keys, found {key!r:.60}")  # noqa: TRY004 - of its content
    return key


def _text(text: str) -> str:
    text = text.replace("$", "$$")
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _NO_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)


def _write(files: Mapping[Path, str], *, force: bool) -> None:
    """Write all of them, or none where one exists. Raises NoApplication for one that exists or cannot be written."""
    there = [str(file) for file in files if file.exists()]
    if there and not force:
        raise NoApplication(f"{' and '.join(there)} exists; nothing was written (--force overwrites)")
    for file, text in files.items():
        try:
            replace_file(file, text.encode())
        except OSError as error:
            raise NoApplication(f"{file} cannot be written: {error.strerror}") from None
        sys.stderr.write(f"wrote {file}\n")
