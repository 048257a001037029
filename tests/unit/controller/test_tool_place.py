"""Where a command runs: decided in memory, from what is in a directory and what Docker says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from controller.errors import ControllerError, InvalidRequest
from controller.tool.bundle import NO_API
from controller.tool.place import Here, There, decide
from controller.tool.project import stack_files
from controller.tool.project.engines import ProjectEngine
from controller.tool.project.programs import Done
from controller.tool.project.project import Project
from controller.tool.project.stack import NoStack, ProjectStack, started_from
from tests.fakes.fake_programs import FakePrograms

ROOT = Path(__file__).resolve().parents[3]
OURS, ANOTHERS = f"{ROOT}/compose", "/home/somebody/pierhead/compose"
ECHO, SHOP, NIGHT = (f"compose/apps/{name}.yaml" for name in ("echo", "shop", "night"))
API = "http://127.0.0.1:18100"
SOCKET = "unix:///run/pierhead/pierhead.sock"


def runs(directory: str = OURS, ports: str = "127.0.0.1:18100->8100/tcp, 8101/tcp") -> dict[str, Done | str]:
    """What Docker says where a controller runs."""
    return {r"ps --filter .*service=controller": f"4f1d\t{directory}\t{ports}\n", "ps --quiet": ""}


@dataclass
class Typing:
    """A user of the clone, or of a project, in whose shell these variables are."""

    docker: Mapping[str, Done | str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    start: Path = ROOT
    listening: frozenset[str] = frozenset()
    warnings: list[str] = field(default_factory=list)

    def types(self, words: str) -> Here | There:
        environment = {"COMPOSE_PROJECT_NAME": "pierhead", **self.variables}
        return decide(
            words.split(" "), self.start, environment, FakePrograms(self.docker, self.listening), self.warnings.append
        )

    def refused(self, words: str, kind: type[ControllerError] = NoStack) -> str:
        with pytest.raises(kind) as refusal:
            self.types(words)
        return str(refusal.value)


def test_a_command_asks_the_port_that_the_controller_has_on_this_machine() -> None:
    user = Typing(runs())
    for words in ("scale ranker 4", "status", "events -f"):
        where = user.types(words)
        assert isinstance(where, Here)
        assert where.variables["PIERHEAD_API_URL"] == API, "whatever .env says by now"
        assert where.variables["PIERHEAD_OWN_STACK"] == "clone"
    assert user.warnings == []


def test_a_command_has_the_stacks_token() -> None:
    where = Typing(runs(), variables={"PIERHEAD_API_TOKEN": "of the project"}).types("status")
    assert isinstance(where, Here)
    assert where.variables["PIERHEAD_API_TOKEN"] == "of the project"


def test_a_command_asks_at_the_socket_that_lets_the_user_in_and_shows_no_token_there() -> None:
    token = {"PIERHEAD_API_TOKEN": "of the project"}
    for docker in (runs(), runs(ports="8100/tcp"), {}):  # the last: the user may not ask Docker
        where = Typing(docker, token, listening=frozenset({SOCKET, API})).types("status")
        assert isinstance(where, Here)
        assert where.variables["PIERHEAD_API_URL"] == SOCKET
        assert "PIERHEAD_API_TOKEN" not in where.variables
    where = Typing(runs(), token, listening=frozenset({SOCKET, API})).types("console")
    assert isinstance(where, Here)
    assert where.variables["PIERHEAD_API_URL"] == API, "a browser opens no socket"
    where = Typing(runs(), {"COMPOSE_PROJECT_NAME": "shop"}, listening=frozenset({SOCKET})).types("status")
    assert isinstance(where, Here)
    assert where.variables["PIERHEAD_API_URL"] == API, "the socket is another stack's"
    where = Typing(runs(), {"DOCKER_HOST": "tcp://gpu-box:2376"}, listening=frozenset({SOCKET})).types("status")
    assert isinstance(where, Here)
    assert where.variables["PIERHEAD_API_URL"] == API, "the socket is this machine's, and the stack another's"
    down = Typing({"ps": ""}, listening=frozenset({SOCKET}))
    assert "is not running" in down.refused("status"), "what listens there is no stack of this engine"


@pytest.mark.parametrize(
    ("published", "api"),
    [("0.0.0.0:8100->8100/tcp", "http://127.0.0.1:8100"), ("[::]:8100->8100/tcp", "http://127.0.0.1:8100")],
)
def test_a_port_on_every_address_is_asked_on_the_loopback(published: str, api: str) -> None:
    controller = ProjectStack(Project(ROOT), {}, FakePrograms(runs(ports=published))).controller()
    assert controller is not None
    assert controller.api == api


def test_an_address_that_is_named_is_used_and_docker_is_not_asked() -> None:
    user = Typing(variables={"PIERHEAD_API_URL": "http://gpu-box:8100"})
    where = user.types("status")
    assert isinstance(where, Here)
    assert "PIERHEAD_API_URL" not in where.variables


@pytest.mark.parametrize(
    ("words", "services"),
    [("logs", "haproxy controller prometheus"), ("logs haproxy", "haproxy"), ("logs grafana", "grafana")],
)
def test_logs_of_the_stacks_own_services_are_composes(words: str, services: str) -> None:
    where = Typing(runs(), {"COMPOSE_FILE": ECHO}).types(words)
    assert where == There(
        ("docker", "compose", "logs", "--tail", "200", *services.split()), {"COMPOSE_FILE": ECHO}, ROOT
    )


def test_logs_of_a_service_of_the_users_are_the_controllers() -> None:
    for words in ("logs registry", "logs acme", "logs ranker"):  # the stack has a registry on a Swarm only
        assert isinstance(Typing(runs()).types(words), Here)
    for words in ("logs ranker --grep haproxy", "logs --grep haproxy ranker"):
        assert isinstance(Typing(runs()).types(words), Here), "haproxy is the pattern"
    where = Typing(runs(), {"PIERHEAD_TLS": "acme"}).types("logs acme")
    assert isinstance(where, There)
    assert where.words[-1] == "acme"


@pytest.mark.parametrize("words", ["logs haproxy --grep X", "logs --grep X haproxy", "logs haproxy --grep=X"])
def test_logs_of_the_stacks_own_services_have_composes_options(words: str) -> None:
    said = Typing(runs()).refused(words, InvalidRequest)
    assert said.endswith("type: docker compose logs haproxy | grep PATTERN")


def test_another_clones_stack_is_named_and_obeyed(tmp_path: Path) -> None:
    user = Typing(runs(ANOTHERS))
    assert isinstance(user.types("scale ranker 4"), Here)
    (line,) = user.warnings
    assert line.startswith('pierhead: the stack "pierhead" was started from another clone, /home/somebody/pierhead: ')
    (tmp_path / "link").symlink_to(ROOT)
    user = Typing(runs(f"{tmp_path}/link/compose"))
    user.types("scale ranker 4")
    assert user.warnings == [], "this clone's by another name"


def test_what_needs_no_stack_reads_the_files_of_this_clone() -> None:
    for docker in (runs(ANOTHERS), {}):
        user = Typing(docker, {"COMPOSE_FILE": "compose.yaml"})
        for words in ("validate", "llm build --model m"):
            where = user.types(words)
            assert isinstance(where, Here)
            assert (where.variables["COMPOSE_FILE"], where.variables["PIERHEAD_PROJECT_DIR"]) == (
                "compose.yaml",
                str(ROOT),
            )
        assert user.warnings == []


@pytest.mark.parametrize(
    ("docker", "words"),
    [
        ({"ps": ""}, 'the controller of the stack "pierhead" is not running. Start it with: make up'),
        ({}, "the Docker Engine does not answer, so it is not known what runs. Start it with: make up"),
        (runs(ports="8100/tcp"), "the controller's API has no port on this machine"),
    ],
)
def test_without_a_controller_it_says_what_to_do(docker: dict[str, Done | str], words: str) -> None:
    user = Typing(docker)
    assert words in user.refused("status")
    assert NoStack.exit_code == 3, "as the command itself ends where no controller answers"
    asked = Typing(docker, {"_PIERHEAD_COMPLETE": "complete_bash"}).types("")
    assert isinstance(asked, Here), "a shell's question makes no noise"
    assert user.warnings == []


@pytest.mark.parametrize("docker", [{"ps": ""}, {}, runs(ports="8100/tcp")])
def test_a_bundle_is_made_without_an_api_and_has_the_reason(docker: dict[str, Done | str]) -> None:
    where = Typing(docker).types("bundle stack.txt")
    assert where == Here({"PIERHEAD_PROJECT_DIR": str(ROOT), NO_API: Typing(docker).refused("status")})


def test_a_bundle_of_a_project_that_was_never_started_has_the_reason(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    where = Typing(start=tmp_path).types("bundle stack.txt")
    assert isinstance(where, Here)
    assert where.variables[NO_API].endswith("does not run. Start it with: pierhead up")


def test_where_docker_does_not_let_the_user_in_the_port_is_asked() -> None:
    user = Typing(variables={"PIERHEAD_API_PORT": "18100"}, listening=frozenset({API}))
    where = user.types("status")
    assert isinstance(where, Here)
    assert where.variables["PIERHEAD_API_URL"] == API


def test_a_word_that_is_no_command_gets_the_command_lines_answer() -> None:
    assert isinstance(Typing({"ps": ""}).types("statsu"), Here)


def test_empty_words_of_make_are_reported_with_an_example() -> None:
    user = Typing(runs())
    assert "Example: make scale SERVICE=ranker N=4" in user.refused("scale ranker ", InvalidRequest)
    assert "why: name a service. Example: make why SERVICE=ranker" in user.refused("why ", InvalidRequest)


# ----------------------------------------------------------------------------- files that run, and files that are named

DIFFERENCE = (
    "pierhead: the running stack has other files than COMPOSE_FILE (.env or the shell). "
    f"Only in the running stack: {SHOP}; a plain `make up` drops this unless COMPOSE_FILE names it. "
    f"Only in COMPOSE_FILE: {NIGHT}; `make up` starts this."
)


def with_files(files: str) -> dict[str, Done | str]:
    return {**runs(), "inspect .*Env": f"PATH=/bin\nCOMPOSE_FILE={files}\nHOME=/\n"}


def test_a_deployment_says_the_difference_and_nothing_where_there_is_none() -> None:
    named = {"COMPOSE_FILE": f"compose/compose.yaml:{ECHO}:{NIGHT}"}
    user = Typing(with_files(f"compose/compose.yaml:{ROOT}/{ECHO}:{SHOP}"), named)
    user.types("deploy echo")
    assert user.warnings == [DIFFERENCE]
    user = Typing(with_files(f"./compose/compose.yaml:{ROOT}/{NIGHT}:{ECHO}"), named)
    user.types("deploy echo")
    assert user.warnings == []


def test_a_check_reads_the_running_stacks_files_as_well() -> None:
    docker = {**with_files(f"compose/compose.yaml:{SHOP}"), "exec 4f1d pierhead validate": Done(2, "wrong\n")}
    user = Typing(docker, {"COMPOSE_FILE": "compose/compose.yaml"})
    where = user.types("validate")
    assert isinstance(where, Here)
    assert where.status == 2, "also where the named files are right"
    assert user.warnings[1:] == ["The running stack's files:", "wrong", "The files that COMPOSE_FILE names:"]
    assert Typing(docker, {"COMPOSE_FILE": "compose/compose.yaml"}).types("validate other.yaml") == Here(
        {"PIERHEAD_PROJECT_DIR": str(ROOT), "COMPOSE_FILE": "compose/compose.yaml", "COMPOSE_PROJECT_NAME": "pierhead"}
    )


# ------------------------------------------------------------------------------------------------------ other programs


def test_commands_about_a_stack_on_a_swarm_run_next_to_its_controller() -> None:
    user = Typing(variables={"PIERHEAD_ENGINE": "swarm"})
    for words in ("status", "node init --restart"):
        assert user.types(words) == There(ProjectEngine.SWARM.program(*words.split()))
    for named in (ECHO, f"compose/compose.yaml:{ECHO}", f"./compose/compose.yaml:{ECHO}"):
        where = Typing(variables={"PIERHEAD_ENGINE": "swarm", "COMPOSE_FILE": named}).types("validate")
        assert isinstance(where, Here)
        assert where.variables["COMPOSE_FILE"] == named.replace("./", "").replace("compose/compose", "compose/swarm")


def test_the_program_that_knows_swarm_starts_wherever_it_is_typed(tmp_path: Path) -> None:
    program = ProjectEngine.SWARM.program("node", "token", "--restarts")
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(program, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "pierhead: node: there is no option --restarts.\n")


def test_the_stack_of_a_project_that_was_never_started_is_reported(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    user = Typing(runs(), start=tmp_path)
    assert user.refused("status") == f"the stack of {tmp_path} does not run. Start it with: pierhead up"
    assert isinstance(user.types("validate"), Here)
    assert user.types("node token")


def test_where_a_stack_was_started(tmp_path: Path) -> None:
    assert started_from("/home/somebody/pierhead/compose") == "/home/somebody/pierhead"
    (tmp_path / "compose" / stack_files.DIRECTORY).mkdir(parents=True)
    assert started_from(f"{tmp_path}/compose") == f"{tmp_path}/compose", "a project that is called compose"
