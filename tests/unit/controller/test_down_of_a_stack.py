"""`down`: what is removed of a stack on one machine, and what is not; decided in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from controller.errors import InvalidRequest
from controller.tool.project.down import NotRemoved, down
from controller.tool.project.programs import TIMED_OUT, Done
from controller.tool.project.project import Project
from controller.tool.project.stack import ProjectStack
from tests.fakes.fake_programs import FakePrograms

ROOT = Path(__file__).resolve().parents[3]
FINE: Mapping[str, Done | str] = {"^docker (info|compose|rm|volume|network|image|ps)": ""}
ANOTHERS = {"ps --all .*working_dir": "\n/home/somebody/pierhead/compose\n"}
SLOW = Done(TIMED_OUT, errors="docker did not end within 10 s")
OF_THE_PROJECT = "--filter label=com.docker.compose.project=pierhead"


def removed(docker: Mapping[str, Done | str], **options: bool) -> tuple[FakePrograms, list[str]]:
    """What was called of docker, and the warnings."""
    programs, warnings = FakePrograms({**docker, **FINE}), list[str]()
    stack = ProjectStack(Project(ROOT), {"COMPOSE_PROJECT_NAME": "pierhead", "COMPOSE_FILE": "a.yaml"}, programs)
    down(stack, warnings.append, **{"volumes": False, "force": False, "images": False, **options})
    return programs, warnings


def calls(programs: FakePrograms, beginning: str) -> list[str]:
    return [call for call in programs.calls if call.startswith(beginning)]


def test_where_nothing_is_left_compose_alone_removes() -> None:
    programs, warnings = removed({})
    assert calls(programs, "docker compose --progress") == ["docker compose --progress plain down"]
    assert (programs.steps, warnings) == (["Stopping and removing the stack"], [])
    assert calls(programs, "docker volume") == calls(programs, "docker image") == []


def test_another_clones_stack_is_left_alone_unless_it_is_forced() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        removed(ANOTHERS)
    words = str(refusal.value)
    assert "is another clone's: /home/somebody/pierhead. Nothing was removed." in words
    assert "cd /home/somebody/pierhead && make down; where that clone is gone, here: make down FORCE=1" in words
    assert removed(ANOTHERS, force=True)[0].steps == ["Stopping and removing the stack"]


def test_what_compose_does_not_know_goes_by_the_projects_label() -> None:
    left = {"ps --all --quiet": "4f1d\n5e2c\n", "network ls": "n1\n", "volume ls": "p_state\np_llm-cache\n"}
    programs, _ = removed(left, volumes=True)
    assert calls(programs, "docker compose --progress") == ["docker compose --progress plain down --volumes"]
    assert calls(programs, "docker rm") == ["docker rm --force --volumes 4f1d 5e2c"]
    assert calls(programs, "docker network rm") == ["docker network rm n1"]
    assert calls(programs, "docker volume") == [
        f"docker volume ls --quiet {OF_THE_PROJECT}",
        "docker volume rm p_state p_llm-cache",
    ]


def test_images_that_were_built_for_the_project_go_where_they_are_asked_for() -> None:
    named, nameless = r"reference=pierhead-\*", "dangling=true"
    programs, _ = removed({named: "pierhead-web:latest\n", nameless: "4f1d\n"}, images=True)
    assert calls(programs, "docker image rm") == ["docker image rm --force pierhead-web:latest 4f1d"]


def test_with_a_broken_file_of_the_users_the_stack_is_removed_by_its_own_file() -> None:
    programs, warnings = removed({"config --quiet": Done(15)})
    assert warnings == ["Compose cannot read a.yaml: removing what carries the project's label instead."]
    assert programs.steps == ["Stopping and removing the stack"]
    assert programs.variables[-1] == {"COMPOSE_FILE": "compose/compose.yaml", "COMPOSE_PROJECT_NAME": "pierhead"}


@pytest.mark.parametrize(
    ("docker", "kind", "words"),
    [
        ({"info": Done(1)}, InvalidRequest, "the Docker Engine does not answer, and what is left"),
        ({"compose --progress": Done(1)}, NotRemoved, "Fix that, then run `make down` again."),
        ({"volume ls": "v\n", "volume rm": Done(1)}, NotRemoved, "Fix that, then run `make down VOLUMES=1` again."),
        ({"ps --all --quiet": SLOW}, NotRemoved, f"`docker ps --all --quiet` failed ({SLOW.errors}). Repeat"),
        ({"network ls": Done(125)}, NotRemoved, "`docker network ls --quiet` failed (exit status 125). Repeat"),
        ({"volume ls": SLOW}, NotRemoved, "`docker volume ls --quiet` failed (docker did not end"),
        ({"image ls .*dangling": SLOW}, NotRemoved, "`docker image ls --quiet --filter dangling=true` failed (docker"),
        ({"ps --all .*working_dir": SLOW}, InvalidRequest, "Nothing was changed."),
    ],
)
def test_what_is_in_the_way_is_reported(docker: dict[str, Done | str], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as refusal:
        removed(docker, volumes=True, images=True)
    assert words in str(refusal.value)
