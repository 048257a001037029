"""Commands about a stack on a Swarm, on programs in memory: where each runs, and what is said before."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest
from typer import Typer
from typer.main import get_command

from controller.errors import InvalidRequest
from controller.swarm.tool import __main__ as tool
from controller.swarm.up.settings import VARIABLE, StackSettings
from controller.tool.commands import look
from controller.tool.project.programs import Done
from controller.tool.project.stack import NoStack
from tests.fakes.fake_programs import FakePrograms

FILES = "compose/swarm.yaml:compose/apps/echo.yaml"
A_STACK: Mapping[str, Done | str] = {
    r"ContainerSpec.Image}} pierhead_controller": "registry/controller@sha256:00\n",
    r"ContainerSpec.Env": "PATH=/bin\nPIERHEAD_API_TOKEN=secret\n",
    "image inspect": "",
    "compose --profile": "services: {}\n",
    "docker run": "",
}


class Became(Exception):
    """A program that took this process's place."""

    def __init__(self, words: tuple[str, ...], variables: Mapping[str, str]) -> None:
        super().__init__(words)
        self.words, self.variables = " ".join(words), variables


@dataclass
class Programs(FakePrograms):
    answers: Mapping[str, Done | str] = field(default_factory=lambda: dict(A_STACK))

    def become(self, *words: str, variables: Mapping[str, str], directory: Path | None) -> NoReturn:
        raise Became(words, variables)

    def stored(self) -> StackSettings:
        """The input of the program that ran next to the engine."""
        call = next(call for call in self.calls if call.startswith("docker run") and VARIABLE in call)
        return StackSettings(**json.loads(call.partition(f"{VARIABLE}=")[2].partition("} ")[0] + "}"))


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "compose" / "apps").mkdir(parents=True)
    (tmp_path / "compose" / "machine").mkdir()
    (tmp_path / "compose" / "machine" / "engine.sh").touch()
    (tmp_path / "compose" / "swarm.yaml").write_text("services: {}\n")
    (tmp_path / "compose" / "apps" / "echo.yaml").write_text("services: {echo: {}}\n")
    monkeypatch.chdir(tmp_path)
    for name in ("PIERHEAD_CLONE", "PIERHEAD_REGISTRY", "COMPOSE_PROFILES", "PIERHEAD_TAG", "COMPOSE_PROJECT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIERHEAD_ENGINE", "swarm")
    monkeypatch.setenv("COMPOSE_FILE", FILES.replace("swarm", "compose"))
    return tmp_path


def became(programs: Programs, *words: str) -> Became:
    with pytest.raises(Became) as end:
        tool.run(list(words), programs)
    return end.value


def looks() -> list[str]:
    app = Typer()
    look.register(app)
    return list(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("clone")
def test_commands_run_next_to_the_controller_on_any_node() -> None:
    ran = became(Programs(), "status")
    assert "--network pierhead_default" in ran.words
    assert ran.words.endswith("registry/controller@sha256:00 pierhead status")
    assert ran.variables == {"PIERHEAD_API_TOKEN": "secret"}
    assert "secret" not in ran.words, "other users see a program's arguments"


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize("command", looks())
def test_a_command_that_looks_needs_no_leader_to_be_on_the_network(command: str) -> None:
    programs = Programs({**A_STACK, "docker ps .*service.name=pierhead_controller": "c0ffee\n"})
    assert "--network container:c0ffee" in became(programs, command, "web").words
    assert "--network pierhead_default" in became(programs, "scale", "web", "2").words, "it may outlast that controller"


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("", "and .env has none. Write PIERHEAD_API_TOKEN=..."),
        ("secret", "a token: PIERHEAD_API_TOKEN of .env, or one"),
    ],
)
def test_the_console_has_a_port_on_this_machine_while_its_command_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], token: str, said: str
) -> None:
    monkeypatch.setenv("PIERHEAD_API_PORT", "8123")
    monkeypatch.setenv("PIERHEAD_API_TOKEN", token)
    programs = Programs()
    assert tool.run(["console"], programs) == 0
    assert said in "".join(capsys.readouterr())
    (ran,) = (call for call in programs.calls if call.startswith("docker run"))
    assert "--network pierhead_default --publish 127.0.0.1:8123:8100 " in ran
    assert ran.endswith("registry/controller@sha256:00 python -m controller.swarm.tool.forward 8123")
    with pytest.raises(NoStack, match="does not run on this Swarm"):
        tool.run(["console"], Programs({r"ContainerSpec.Image}}": Done(1, "", "no such service")}))


def test_a_command_with_a_file_sees_that_of_this_machine(clone: Path) -> None:
    me = f"--user {os.getuid()}:{os.getgid()}"
    for words, file in (
        (("backup", "state.json"), clone / "state.json"),
        (("restore", "-o", "json", "kept/state.json", "--force"), clone / "kept" / "state.json"),
        (("backup", "--force", f"{clone}/kept/state.json"), clone / "kept" / "state.json"),
    ):
        (clone / "kept").mkdir(exist_ok=True)
        ran = became(Programs(), *words).words
        assert f" {me} --volume {file.parent}:{file.parent} registry/controller@sha256:00 pierhead {words[0]} " in ran
        assert f" {file}" in ran.partition(" pierhead ")[2]
    piped = became(Programs(), "restore", "-").words
    assert piped.endswith(" --interactive registry/controller@sha256:00 pierhead restore -")
    assert "--volume" not in became(Programs(), "backup", "--help").words
    assert "--volume" not in became(Programs(), "why", "web").words
    with pytest.raises(InvalidRequest, match=f"there is no directory {clone}/none"):
        tool.run(["backup", "none/state.json"], Programs())


@pytest.mark.usefixtures("clone")
def test_a_deployment_first_stores_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIERHEAD_REGISTRY", "here")
    programs = Programs()
    assert became(programs, "deploy").words.endswith("pierhead deploy")
    (stored,) = (call for call in programs.calls if call.endswith("controller.swarm.up files"))
    assert programs.given[stored] == "services: {}\n", "what Compose makes of them"
    told = programs.stored()
    assert (told.files, told.registry, told.profiles) == (FILES, "here", ["registry"])
    assert (told.https_port, told.tls_dir, told.jwt_dir, told.jwt_algorithm) == (0, "", "jwt", "RS256")
    monkeypatch.setenv("PIERHEAD_TLS", "Files")
    monkeypatch.setenv("PIERHEAD_JWT_ALGORITHM", "es256")
    with_tls = Programs()
    became(with_tls, "deploy")
    told = with_tls.stored()
    assert (told.https_port, told.tls_dir, told.jwt_algorithm) == (8443, "tls", "ES256")
    monkeypatch.setenv("COMPOSE_PROFILES", "metrics, debug,")
    became(programs := Programs(), "deploy")
    assert programs.stored().profiles == ["metrics", "debug", "registry"], "as Compose reads them"
    programs = Programs({**A_STACK, "docker run": Done(2)})
    assert tool.run(["deploy"], programs) == 2, "files that are wrong are not deployed"


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("Error: no such service: pierhead_controller", "does not run on this Swarm. Start it with: make up"),
        ("the swarm does not\nhave a leader", "cannot ask the Swarm: the swarm does not have a leader\n"),
    ],
)
def test_without_a_controller_it_says_why(monkeypatch: pytest.MonkeyPatch, says: str, words: str) -> None:
    programs = Programs({"service inspect": Done(1, errors=says)})
    with pytest.raises(NoStack) as refusal:
        tool.run(["status"], programs)
    assert words in str(refusal.value)
    assert NoStack.exit_code == 3
    assert tool.run(["stack", "answers"], programs) == 1
    monkeypatch.setenv("_PIERHEAD_COMPLETE", "complete_bash")
    assert tool.run([""], programs) == 0, "a shell's question makes no noise"


def test_status_says_where_files_were_edited_after_they_were_stored(
    clone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Swarm's controller has the files that were stored, and looks at none."""
    words = "the compose files here differ from those stored in the Swarm"

    def told(**more: Done | str) -> str:
        became(Programs({**A_STACK, **more}), "status")
        return capsys.readouterr().err

    programs = Programs()
    became(programs, "deploy")
    digest = programs.stored().files_digest
    assert words not in told(), "a former stack, without labels"
    labels = {"config inspect": f"{digest} {FILES}\n"}
    monkeypatch.setenv("COMPOSE_FILE", "compose/compose.yaml")
    assert words not in told(**labels), "what is stored counts"
    app = clone / "compose" / "apps" / "echo.yaml"
    app.write_text("services: {echo: {image: other}}\n")
    edited = told(**labels)
    assert f"{words} (compose/swarm.yaml, compose/apps/echo.yaml)" in edited
    assert "`make deploy`" in edited
    app.unlink()
    assert words in told(**labels)
    elsewhere = told(**labels, **{"pierhead.clone": "/home/somebody/pierhead\n"})
    assert 'the stack "pierhead" was started from another clone, /home/somebody/pierhead: ' in elsewhere
    assert words not in elsewhere, "that one's files are not these"


@pytest.mark.usefixtures("clone")
def test_down_reads_no_compose_file() -> None:
    programs = Programs()
    assert tool.run(["down", "--volumes", "--force"], programs) == 0
    assert not any(call.startswith("docker compose") for call in programs.calls)
    told = programs.stored()
    assert (told.has_volumes, told.has_force, told.project) == (True, True, "pierhead")


def test_an_up_that_was_killed_ends_before_the_next_one(clone: Path) -> None:
    programs = Programs({f"ps --quiet --filter label=pierhead.up=pierhead:{clone}": "4f1d\n", **A_STACK})
    for command in (["stack", "up"], ["down"]):
        programs.calls.clear()
        tool.run(command, programs)
        assert "docker rm --force 4f1d" in programs.calls
    programs.calls.clear()
    tool.run(["stack", "check"], programs)
    assert "docker rm --force 4f1d" not in programs.calls


@pytest.mark.usefixtures("clone")
def test_logs_of_the_stacks_own_services_are_swarms() -> None:
    programs = Programs()
    tool.run(["logs"], programs)
    assert [call.rpartition(" ")[2] for call in programs.calls] == [f"pierhead_{name}" for name in tool.LOGS]
    assert became(Programs(), "logs", "ranker").words.endswith("pierhead logs ranker"), "the controller's"
