"""Reading the project: Compose's words made helpful, its YAML, the command's ends, and which files count."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

import pytest

from controller.errors import ControllerError, SpecError
from controller.files.compose import ComposeProject
from controller.files.messages import MessageContext, explain, explain_warning, split_output
from controller.files.places import with_places
from controller.files.project_files import Fingerprint, ProjectFiles, compose_files
from controller.files.yaml import load_resolved
from controller.swarm.files.kept import KeptProject
from controller.swarm.state.configs import compose_files_of
from controller.swarm.state.text import KeptText
from tests.fakes.fake_swarm_configs import FakeSwarm
from tests.harness.waiting import PATIENCE_S
from tests.unit.controller.control import until

SETTING = MessageContext(Path("/shop"), (Path("/shop/compose.yaml"),))
VARIABLES = (
    "the controller takes variables from /shop/.env and from its own environment, not from the shell that ran "
    "`docker compose up`"
)


NO_FILE = (
    "no such file; relative names start at /shop (COMPOSE_FILE) or at the file that names it (include, extends, "
    "env_file), and the controller sees what lies in /shop only"
)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "error while interpolating services.a.image: required variable TAG is missing a value: set it",
            f'services.a.image: variable "TAG" has no value (set it): {VARIABLES}; write TAG=... into /shop/.env',
        ),
        (
            "required variable TAG is missing a value",
            f'/shop/compose.yaml: variable "TAG" has no value: {VARIABLES}; write TAG=... into /shop/.env',
        ),
        ("stat /shop/apps/b.yaml: no such file or directory", f"/shop/apps/b.yaml: {NO_FILE}"),
        ("env file /shop/x.env not found: stat /shop/x.env: no such file or directory", f"/shop/x.env: {NO_FILE}"),
        (
            'service "a" refers to undefined network nope: invalid compose project',
            '/shop/compose.yaml: service "a" refers to undefined network nope',
        ),
        ("services.a: can't set distinct values: invalid compose project", "services.a: can't set distinct values"),
        ("something\n  nobody has seen", "/shop/compose.yaml: something nobody has seen"),
        ("yaml: line 4: unreadable", "/shop/compose.yaml: not valid YAML: line 4: unreadable"),
    ],
)
def test_failures_say_where_why_and_what_to_do(said: str, told: str) -> None:
    assert explain(said, SETTING) == told


def test_broken_yaml_is_found_in_the_right_file(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.yaml", tmp_path / "b.yaml"
    good.write_text("services: {a: {image: !override x}, b: &b {image: y}, c: {<<: *b, command: [=]}}")
    bad.write_text("services:\n  a:\n    image: b\n  c: [\n")
    told = explain("yaml: line 4: did not find expected node content", MessageContext(tmp_path, (good, bad)))
    assert told == f"{bad}: not valid YAML: line 5, column 1: did not find expected node content"


def test_warnings_are_kept_apart_from_the_error() -> None:
    stderr = (
        'time="2026-11-21T08:45:53Z" level=warning msg="The \\"TAG\\" variable is not set. Defaulting to a blank '
        'string."\n WARN[0000] the attribute `version` is obsolete\n'
        "services must be a mapping\n"
    )
    message, warnings = split_output(stderr)
    assert message == "services must be a mapping"
    assert [explain_warning(warning, SETTING) for warning in warnings] == [
        f'variable "TAG" is not set and became empty: {VARIABLES}',
        "the attribute `version` is obsolete",
    ]


def test_yaml_as_compose_prints_it() -> None:
    text = (
        "a: 1e+06\nb: =\nc: <<\nd: 2020-01-01T00:00:00Z\ne: on\nf: ~\ng: $$x$$$$\nh: '08'\ni: -5\nj: true\nk: 1.5\nl:"
    )
    assert list(load_resolved(text).values()) == [
        *(1_000_000.0, "=", "<<", "2020-01-01T00:00:00Z", "on", None, "$x$$", "08", -5, True, 1.5, None)
    ]


# -------------------------------------------------------------------------------------------------- running the command


def project(directory: Path, script: str, *, timeout_s: float = 20.0) -> ComposeProject:
    """A project whose "docker compose config" is this Python program."""
    environment = {"COMPOSE_FILE": "compose.yaml", "PATH": os.environ["PATH"]}
    return ComposeProject(directory, environment, command=(sys.executable, "-c", script), timeout_s=timeout_s)


CONFIG = """
name: shop
services:
  ranker: {image: shop/ranker, scale: 0, command: [echo, $$HOME], x-serve: {replicas: 2}}
"""


async def test_loads_a_spec_with_the_warnings(tmp_path: Path) -> None:
    script = (
        f"import sys; print({CONFIG!r}); "
        'print(\'time="x" level=warning msg="The \\\\"A\\\\" variable is not set. B."\', file=sys.stderr)'
    )
    spec = await project(tmp_path, script).load()
    assert (spec.project, spec.services["ranker"].replicas) == ("shop", 2)
    assert spec.services["ranker"].container["Cmd"] == ["echo", "$HOME"]
    assert [warning.split(":")[0] for warning in spec.warnings] == ['variable "A" is not set and became empty']


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("import sys; sys.exit('services must be a mapping')", "services must be a mapping"),
        ("raise SystemExit(9)", "Compose ended with code 9"),
    ],
)
async def test_a_failure_is_a_spec_error(tmp_path: Path, script: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        await project(tmp_path, script).load()
    assert caught.value.problems == (f"{tmp_path}/compose.yaml: {problem}",)


BASE = """\
x-common: &common
  x-serve: {rout: /a}
services:
  web:
    <<: *common
    image: a
  ranker:
    image: b
    x-serve:
      autoscale:
        min: 2
        max: one
"""
OVERRIDE = """\
services:
  ranker:

    x-serve: {autoscale: {max: one}, "odd key": 1}
    volumes: [a:/a, b]
"""


@pytest.mark.parametrize(
    ("problem", "place"),
    [
        ("services.ranker.x-serve.autoscale.max: expected", "more/over.yaml:4"),
        ("services.ranker.x-serve.autoscale.min: expected", "compose.yaml:11"),
        ("services.ranker.x-serve.autoscale: expected x: y", "more/over.yaml:4"),
        ('services.ranker.x-serve."odd key": unknown', "more/over.yaml:4"),
        ("services.ranker.volumes[1].source: expected", "more/over.yaml:5"),
        ("services.ranker.x-serve.replicas: expected", "more/over.yaml:4"),
        ("services.web.x-serve.rout: unknown", "compose.yaml:2"),
        ("services.other.x-serve.rout: unknown", None),
        ("PIERHEAD_PROJECT_DIR: no directory", None),
    ],
)
def test_a_problem_has_the_file_and_the_line_of_its_key(tmp_path: Path, problem: str, place: str | None) -> None:
    files = [tmp_path / "compose.yaml", tmp_path / "more" / "over.yaml", tmp_path / "none.yaml", tmp_path / "bad.yaml"]
    files[1].parent.mkdir()
    for file, text in ((files[0], BASE), (files[1], OVERRIDE), (files[3], "a: [")):
        file.write_text(text)
    assert with_places([problem], files, tmp_path) == [f"{problem} ({place})" if place else problem]


async def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    # As with the real one, the work is done by a child that holds the pipes.
    script = (
        "import os, subprocess; child = subprocess.Popen(['sleep', '600']); open('p', 'w').write(str(child.pid)); "
        "os.rename('p', 'pid'); child.wait()"
    )
    for timeout_s in (2, 10, 60):  # one that was ended before it came to hang has shown nothing
        with pytest.raises(ControllerError, match=rf"did not answer within {timeout_s} s in "):
            await project(tmp_path, script, timeout_s=timeout_s).load()
        if (tmp_path / "pid").exists():
            break
    await ended(tmp_path / "pid")


async def ended(pid_file: Path) -> None:
    """Wait until the process has ended."""
    await until(lambda: not is_there(pid_file))


def is_there(pid_file: Path) -> bool:
    """Whether a process runs; an orphan may stay a zombie until its new parent looks."""
    try:
        return Path("/proc", pid_file.read_text(), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_machine_without_the_command(tmp_path: Path) -> None:
    nowhere = ComposeProject(tmp_path, {"PATH": ""}, command=("docker-that-is-not-there",))
    with pytest.raises(ControllerError, match=r"^cannot run `docker-that-is-not-there`: No such file or directory; "):
        await nowhere.load()


async def test_a_project_directory_that_is_not_mounted(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"PIERHEAD_PROJECT_DIR: .*/x is not a directory here; mount it at its own abs"):
        await project(tmp_path / "x", "").load()


async def test_output_that_is_no_yaml(tmp_path: Path) -> None:
    with pytest.raises(ControllerError, match="printed what is not YAML"):
        await project(tmp_path, "print('a: [')").load()


# ---------------------------------------------------------------------------------------------------- files and changes


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A project of several files in two directories."""
    include = "include: [more/inc.yaml, {path: more/other.yaml, project_directory: elsewhere}]"
    a, d = "{image: a, env_file: a.env, label_file: a.labels}", "{image: d, label_file: [b.labels]}"
    write(tmp_path / "compose" / "compose.yaml", f"{include}\nservices: {{a: {a}, d: {d}}}")
    write(tmp_path / "compose" / "more" / "inc.yaml", "services: {b: {extends: {file: base.yaml, service: b}}}")
    write(tmp_path / "compose" / "more" / "other.yaml", "services: {c: {image: c, env_file: c.env}}")
    write(tmp_path / "compose" / "more" / "base.yaml", "services: {b: {image: b, env_file: [{path: b.env}, '${X}']}}")
    write(tmp_path / "compose" / "a.env", "A=1")
    write(tmp_path / ".env", "COMPOSE_FILE=compose/compose.yaml:compose/apps/echo.yaml\nX=1\n")
    return tmp_path


@pytest.mark.parametrize(
    "changed",
    [
        ".env",
        "compose/compose.yaml",
        "compose/apps/echo.yaml",  # named, does not exist yet
        "compose/a.env",
        "compose/more/inc.yaml",
        "compose/more/base.yaml",
        "compose/more/b.env",
        "compose/.env",
        "compose/a.labels",
        "compose/b.labels",
        "compose/elsewhere/.env",
        "compose/elsewhere/c.env",
    ],
)
def test_the_fingerprint_follows_every_file(shop: Path, changed: str) -> None:
    files = ProjectFiles(shop, {})
    before = files.fingerprint()
    assert files.fingerprint() == before
    write(shop / changed, "services: {}\n# changed\n")
    assert files.fingerprint() != before


def test_files_that_include_each_other_end(tmp_path: Path) -> None:
    write(tmp_path / "compose.yaml", "include: [b.yaml]")
    write(tmp_path / "b.yaml", "include: compose.yaml")
    assert {Path(row[0]).name for row in ProjectFiles(tmp_path, {}).fingerprint()} >= {"compose.yaml", "b.yaml"}


@pytest.mark.parametrize(
    "text",
    [
        *("a: [", "[1, 2]", "\0", "services: [a]", "services: {a: 3}", "include: {path: 3}", 'include: ["a\\0b"]'),
        *("x: !!bool maybe", "x: !!timestamp hello", "x: !!timestamp 2001-99-99", 'x: !!int ""', "x: !!float one"),
    ],
)
def test_files_that_are_broken_are_watched(tmp_path: Path, text: str) -> None:
    write(tmp_path / "compose.yaml", text)
    files = ProjectFiles(tmp_path, {"COMPOSE_FILE": "compose.yaml"})
    before = files.fingerprint()
    write(tmp_path / "compose.yaml", "services: {}")
    assert files.fingerprint() != before


def test_which_files_the_project_consists_of(tmp_path: Path) -> None:
    write(tmp_path / "compose.yaml", "")
    write(tmp_path / "compose.override.yaml", "")
    assert compose_files(tmp_path, {}) == [tmp_path / "compose.yaml", tmp_path / "compose.override.yaml"]
    assert compose_files(tmp_path, {"COMPOSE_FILE": "x/a.yaml:/b.yaml"}) == [tmp_path / "x/a.yaml", Path("/b.yaml")]
    separated = {"COMPOSE_FILE": "a.yaml,b.yaml", "COMPOSE_PATH_SEPARATOR": ","}
    assert compose_files(tmp_path, separated) == [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for line in ("COMPOSE_FILE='c.yaml'", "export COMPOSE_FILE = c.yaml # mine"):
        write(tmp_path / ".env", f"# COMPOSE_FILE=no\n{line}\n")
        assert compose_files(tmp_path, {}) == [tmp_path / "c.yaml"], line


async def test_a_slow_disk_does_not_hold_up_the_event_loop(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, may_end = ProjectFiles.fingerprint, threading.Event()

    def slow(files: ProjectFiles) -> Fingerprint:
        may_end.wait(PATIENCE_S)
        return stat(files)

    monkeypatch.setattr(ProjectFiles, "fingerprint", slow)
    asked = asyncio.create_task(ComposeProject(shop, {}).fingerprint())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not asked.done()
    may_end.set()
    assert await asked == stat(ProjectFiles(shop, {}))


async def test_stored_files_are_read_where_the_files_themselves_are_not() -> None:
    """On Swarm; damaged ones, or none, are a problem of the files and not the controller's end."""
    swarm = FakeSwarm()
    document = compose_files_of(swarm.manager(), "shop")
    text = KeptText(document)
    project = KeptProject("shop", text)
    with pytest.raises(SpecError, match="pierhead up"):
        await project.load()
    editions = [await project.fingerprint()]
    for image in ("web:1", "web:2"):
        await text.write(f"name: shop\nservices: {{web: {{image: {image}, scale: 0, x-serve: {{}}}}}}")
        assert (await project.load()).services["web"].image == image
        editions.append(await project.fingerprint())
    assert len(set(editions)) == 3
    head = await document.head()
    assert head is not None
    await document.replace(head, {}, b"damaged")
    with pytest.raises(ControllerError, match="pierhead deploy"):
        await project.load()
