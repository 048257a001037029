"""The stack of a project on the Swarm that this machine is a manager of: programs of its own do what a user types.

They run in the controller's image: `controller.swarm.up` next to the engine, other commands next to the controller.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...errors import InvalidRequest
from ...tool.project.compose import READ_S, Compose
from ...tool.project.programs import Done
from ...tool.project.stack import NoStack, ProjectStack
from ...tool.project.steps import say
from ..up.settings import CLONE_LABEL, DIGEST_LABEL, FILES_LABEL, VARIABLE, StackSettings
from .forward import FORWARDED_PORT

PASSED_ON = (
    *("_PIERHEAD_COMPLETE", "COMP_WORDS", "COMP_CWORD", "_TYPER_COMPLETE_ARGS", "_TYPER_COMPLETE_FISH_ACTION"),
    "NO_COLOR",
)
"""What a shell asks for completions with, and what decides how things are shown."""
WITH_A_FILE = ("backup", "restore", "bundle")
"""The commands with a file of the user's."""
LOOKS = ("status", "why", "gpus", "nodes", "routes", "plan", "revisions")
"""The commands that ask once and end (controller/tool/commands/look.py)."""
PATIENCE_S = 30
"""Where the controller that acted was just lost, another one acts within half a minute."""


@dataclass(frozen=True)
class SwarmStack:
    """See the module."""

    stack: ProjectStack

    # ---------------------------------------------------------------------------------------------- next to the engine

    def run(self, command: str, *, volumes: bool = False, force: bool = False) -> int:
        """Carry out a command of controller/swarm/up/; its exit status. Raises InvalidRequest, KeyboardInterrupt."""
        stack, root = self.stack, self.stack.root
        given = "" if command in ("trouble", "down") else self._resolved_files()
        options = ["--network", "host", "--volume", "/var/run/docker.sock:/var/run/docker.sock"]
        options += ["--volume", f"{root}:{root}:ro"]
        login = Path(stack.environment.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
        if login.is_file():
            options += ["--volume", f"{login}:/root/.docker/config.json:ro"]
        label = f"pierhead.up={stack.name}:{root}"
        left = stack.programs.read("docker", "ps", "--quiet", "--filter", f"label={label}").lines
        if left and command in ("up", "down"):  # where an `up` was killed, its container continues
            stack.programs.read("docker", "rm", "--force", *left)
        if command == "up":
            options += ["--label", label]
        settings = StackSettings(
            project=stack.name,
            clone=str(root),
            registry=stack.setting("PIERHEAD_REGISTRY"),
            profiles=tuple(self._compose.profiles),
            http_port=int(stack.setting("PIERHEAD_HTTP_PORT", "8000")),
            grpc_port=int(stack.setting("PIERHEAD_GRPC_PORT", "9000")),
            https_port=int(stack.setting("PIERHEAD_HTTPS_PORT", "8443")) if stack.has_tls else 0,
            tls_dir=stack.tls_dir if stack.has_tls else "",
            jwt_dir=stack.jwt_dir,
            jwt_algorithm=stack.jwt_algorithm,
            files=stack.files,
            files_digest=self._digest(stack.files),
            has_force=force,
            has_volumes=volumes,
        )
        options += ["--env", f"{VARIABLE}={json.dumps(asdict(settings))}"]
        program = (self._programs_image(), "python", "-m", "controller.swarm.up", command)
        words = ("docker", "run", "--rm", "--interactive", "--init", *options, *program)
        return stack.programs.call(*words, variables={}, given=given)

    def refuse(self) -> None:
        """Raise InvalidRequest on a machine that is in no Swarm."""
        form = "{{.Swarm.LocalNodeState}}"
        if self.stack.programs.read("docker", "info", "--format", form).output.strip() == "inactive":
            raise InvalidRequest(
                "this machine is in no Swarm.\n"
                "`pierhead node init` makes it the first manager of one. Nothing was started."
            )

    def told(self, question: str) -> str:
        """What an `up` asks: the services that have replicas, the end of the controller's log, or whether the stack is
        removed.
        """
        programs, name = self.stack.programs, f"{self.stack.name}_controller"
        if question == "is-down":
            return "yes" if self._controllers_image().status else "no"
        if question == "log":
            tasks = programs.read("docker", "service", "ps", "--no-trunc", name)
            return tasks.output + programs.read("docker", "service", "logs", "--raw", "--tail", "5", name).output
        label = f"label=pierhead.project={self.stack.name}"
        listed = programs.read("docker", "service", "ls", "--quiet", "--filter", label).lines
        form = '{{index .Spec.Labels "pierhead.service"}}'
        found = programs.read("docker", "service", "inspect", "--format", form, *listed).lines if listed else []
        return "\n".join(found)

    def _programs_image(self) -> str:
        """Raises InvalidRequest."""
        stack = self.stack
        image = f"pierhead/controller:{stack.image_tag}"
        if stack.programs.read("docker", "image", "inspect", image).status == 0:
            return image
        if running := self._controllers_image().lines:
            return running[0]
        raise InvalidRequest(
            f"this needs the program, and this machine does not have the image {image}. Build it: "
            f"{stack.typed('build', 'up')}"
        )

    @property
    def _compose(self) -> Compose:
        """With the profiles of the stack's own services that are asked for."""
        return Compose(self.stack).having(COMPOSE_PROFILES=self.stack.profiles)

    def _resolved_files(self) -> str:
        """What Compose makes of all files, with the services of all profiles. Raises InvalidRequest."""
        compose = self._compose
        done = compose.read("--profile", "*", "config")
        if done.status:
            shown = compose.files.replace(":", ", ")
            raise InvalidRequest(f"Compose cannot read the stack's files ({shown}): {done.errors.strip()}")
        return done.output

    def _digest(self, files: str) -> str:
        """Of the content of the files of a COMPOSE_FILE that are here."""
        digest = hashlib.sha256()
        for name in files.split(":"):
            file = self.stack.root / name
            digest.update(file.read_bytes() if file.is_file() else f"no {name}\n".encode())
        return digest.hexdigest()[:16]

    # ------------------------------------------------------------------------------------------ next to the controller

    def next_to_controller(self, *words: str, patience_s: int = PATIENCE_S) -> tuple[list[str], dict[str, str]]:
        """(words, variables) of a program that runs a command next to the controller that acts, whichever manager that
        is on. Raises NoStack.
        """
        stack, image = self.stack, self._controllers_image()
        words, sees_file = _about_file(words)
        if image.status:
            raise self._not_there(image.errors)
        form = "{{range .Spec.TaskTemplate.ContainerSpec.Env}}{{println .}}{{end}}"
        env = self._inspect("service", form, f"{stack.name}_controller").splitlines()
        token = next((line.partition("=")[2] for line in env if line.startswith("PIERHEAD_API_TOKEN=")), "")
        variables = {
            "PIERHEAD_API_URL": "http://controller:8100",
            "PIERHEAD_API_PATIENCE_S": str(patience_s),
            **{name: stack.environment[name] for name in PASSED_ON if name in stack.environment},
        }
        options = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        # Other users see a program's arguments, and not its variables.
        run = ["docker", "run", "--rm", "--init", "--network", self._network(words), "--env", "PIERHEAD_API_TOKEN"]
        program = [*run, *options, *sees_file, image.output.strip(), "pierhead", *words]
        return program, {"PIERHEAD_API_TOKEN": token}

    def _network(self, words: Sequence[str]) -> str:
        """The stack's. A command that only looks shares the one of this manager's own controller: a container of its
        own is put on the network by Swarm's leader, which takes some 16 s where another manager has just become that. A
        command that waits must outlast this controller.
        """
        label = f"label=com.docker.swarm.service.name={self.stack.name}_controller"
        looks = any(word in LOOKS for word in words[:1]) and not {"--watch", "-w"} & set(words)
        here = self.stack.programs.read("docker", "ps", "--quiet", "--filter", label).lines if looks else ()
        return f"container:{here[0]}" if here else f"{self.stack.name}_default"

    def console(self) -> list[str]:
        """The words of a program that forwards the API to this machine's loopback. Raises NoStack."""
        stack, image = self.stack, self._controllers_image()
        if image.status:
            raise self._not_there(image.errors)
        port = stack.setting("PIERHEAD_API_PORT", "8100")
        self._say_token()
        published = ["--network", f"{stack.name}_default", "--publish", f"127.0.0.1:{port}:{FORWARDED_PORT}"]
        program = [image.output.strip(), "python", "-m", "controller.swarm.tool.forward", port]
        return ["docker", "run", "--rm", "--init", *published, *program]

    def _say_token(self) -> None:
        if self.stack.setting("PIERHEAD_API_TOKEN"):
            say("The page asks for a token: PIERHEAD_API_TOKEN of .env, or one that `pierhead token` has made.")
        else:
            say(
                "The page asks for a token, and .env has none. Write PIERHEAD_API_TOKEN=... into .env "
                f"(`openssl rand -hex 32`), and type {self.stack.typed('up')}."
            )

    def answers(self) -> bool:
        """Whether a controller has the lease of the state, and its API is open."""
        try:
            words, variables = self.next_to_controller("nodes", patience_s=0)
        except NoStack:
            return False
        return self.stack.programs.read(*words, variables=variables, timeout_s=READ_S).status == 0

    def tell_differences(self, warn: Callable[[str], None], *, is_status: bool) -> None:
        """Say where the stack was started from another directory. There is one stack of that name, and in trouble it
        has to be reached from any. Else, with `is_status`, say where other files are here than were stored: on a Swarm
        files are not watched.
        """
        stack = self.stack
        elsewhere = self._inspect("service", _label(CLONE_LABEL), f"{stack.name}_controller").strip()
        if elsewhere and elsewhere != str(stack.root):
            warn(stack.about_another(elsewhere))
        elif is_status:
            form = f"{_label(DIGEST_LABEL)} {_label(FILES_LABEL)}"
            digest, _, files = self._inspect("config", form, f"{stack.name}_pierhead-files").strip().partition(" ")
            if files and self._digest(files) != digest:
                warn(
                    "pierhead: the compose files here differ from those stored in the Swarm "
                    f"({files.replace(':', ', ')}), and on a Swarm files are not watched: what they say now takes "
                    f"effect at `{stack.typed('deploy')}`."
                )

    def _inspect(self, kind: str, form: str, name: str) -> str:
        done = self.stack.programs.read("docker", kind, "inspect", "--format", form, name)
        return done.output if done.status == 0 else ""

    def _controllers_image(self) -> Done:
        """Of the running stack's controller; where there is none, Docker's words."""
        form = "{{.Spec.TaskTemplate.ContainerSpec.Image}}"
        return self.stack.programs.read(
            "docker", "service", "inspect", "--format", form, f"{self.stack.name}_controller"
        )

    def _not_there(self, said: str) -> NoStack:
        stack = self.stack
        if "no such service" in said:
            up = stack.typed("up")
            return NoStack(
                f'the controller of the stack "{stack.name}" does not run on this Swarm. Start it with: {up}'
            )
        return NoStack(
            f"this machine cannot ask the Swarm: {' '.join(said.split())}\n"
            "Running services are not affected. Commands need a manager, and more than half of the Swarm's managers "
            "must be up."
        )


def _about_file(words: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """A command with the whole path of its file, and the options by which its program sees that as the user does.

    Raises InvalidRequest.
    """
    places = [
        place
        for place, word in enumerate(words)
        if place and (word == "-" or not word.startswith("-")) and words[place - 1] not in ("-o", "--output")
    ]
    if words[:1] not in [(each,) for each in WITH_A_FILE] or not places:
        return words, []
    if words[places[0]] == "-":
        return words, ["--interactive"]
    file = Path.cwd() / words[places[0]]
    if not file.parent.is_dir():
        raise InvalidRequest(f"{file}: there is no directory {file.parent}")
    options = ["--user", f"{os.getuid()}:{os.getgid()}", "--volume", f"{file.parent}:{file.parent}"]
    return (*words[: places[0]], str(file), *words[places[0] + 1 :]), options


def _label(name: str) -> str:
    return f'{{{{index .Spec.Labels "{name}"}}}}'
