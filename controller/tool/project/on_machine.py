"""A stack on one machine: what is in its way there, and how it is started."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import InvalidRequest
from . import machine, resolved
from .compose import Compose
from .resolved import Services
from .stack import NotUp, ProjectStack, Say

Reader = Callable[[Path, Mapping[str, str]], Sequence[str]]
"""Reads the files in a directory, with these variables, as the controller does: its warnings. Raises InvalidRequest."""


@dataclass(frozen=True)
class OnMachine:
    """See the module."""

    stack: ProjectStack
    read_files: Reader
    say: Say
    warn: Say

    def refuse(self, compose: Compose, services: Services) -> None:
        """Raise InvalidRequest for what is in the way, before anything is built; `services`: of all profiles."""
        self._refuse_another_directorys()
        machine.refuse_foreign_address(self.stack)
        machine.refuse_taken_ports(compose)
        self._warn_about_missing_gpus(services)
        self._refuse_unusable_files(services)

    def prepare(self, compose: Compose, *, builds: bool) -> Compose:
        """What is needed before all other images are built: without Grafana where its image is missing."""
        if not machine.has_grafana(compose):
            return compose
        image = str(compose.services().get("grafana", {}).get("image") or "")
        if not image.startswith("grafana/") or self._has_image(image):
            return compose
        others = ",".join(name for name in compose.profiles if name != "grafana")
        self.say(
            f"Continuing without Grafana: no registry gives {image} "
            f"(plain Compose: COMPOSE_PROFILES={others} docker compose up)."
        )
        return compose.having(COMPOSE_PROFILES=others)

    def replicated(self) -> Sequence[str]:
        """The services that have replicas now."""
        label = f"label=pierhead.project={self.stack.name}"
        form = '{{.Label "pierhead.service"}}'
        return self.stack.programs.read("docker", "ps", "--filter", label, "--format", form).lines

    def start(self, compose: Compose) -> None:
        """Start the stack. Raises InvalidRequest, NotUp."""
        machine.refuse_taken_ports(compose)  # a build takes minutes
        plain_up = ("--progress", "plain", "up", "--detach", "--no-build")
        replaced = not self._replaces_haproxy(compose) or self._replace_haproxy(compose, *plain_up)
        if replaced and compose.step("Starting the stack", *plain_up):
            self._remove_optional_services()
            return
        machine.refuse_taken_ports(compose)  # by what was started at the same time
        missing = [name for name in sorted({*compose.read("config", "--images").lines}) if not self._has_image(name)]
        words = "the stack did not start; the lines above say why."
        if missing:
            words += (
                f" Not on this machine: {' '.join(missing)}. Check the names; for a private registry: docker login."
            )
        raise NotUp(words)

    def missing_of_controller(self) -> str:
        """Why the controller cannot be asked yet; "" where it can."""
        status = self.stack.programs.status(machine.address(self.stack, "PIERHEAD_API_PORT", "/healthz"))
        return "" if status == 200 else f"GET /healthz: {status or 'no answer'}"

    def controllers_log(self, compose: Compose) -> str:
        """The end of it."""
        return compose.read("logs", "--no-log-prefix", "--tail", "5", "controller").output

    def is_down(self) -> bool:
        """Whether the stack is removed, or on its way: then it has no Prometheus."""
        return not (self.stack.container("controller") and self.stack.container("prometheus"))

    def addresses(self, compose: Compose) -> Sequence[tuple[str, str]]:
        """What answers in addition to services, and where."""
        names = {
            "console": "PIERHEAD_API_PORT",
            "HAProxy": "PIERHEAD_STATS_PORT",
            "Prometheus": "PIERHEAD_PROMETHEUS_PORT",
        }
        if machine.has_grafana(compose):
            names["Grafana"] = machine.GRAFANA
        return [(name, machine.address(self.stack, variable)) for name, variable in names.items()]

    def who_reaches_it(self) -> str:
        """How clients on other machines get access, where they have none."""
        if not machine.is_closed(self.stack):
            return ""
        return (
            f"Only this machine reaches HTTP and gRPC. The line {machine.BIND}=0.0.0.0 in .env opens them to others, "
            "who may then use every service that asks for no key (x-serve.auth).\n"
        )

    def tell_trouble(self, compose: Compose) -> None:
        """Nothing is wrong where the stack answers."""

    # ------------------------------------------------------------------------------------------ before anything changes

    def _refuse_another_directorys(self) -> None:
        if place := self.stack.of_another():
            stack, kind = self.stack, self.stack.kind
            raise InvalidRequest(
                f'a stack named "{stack.name}" runs from another {kind}: {place}.\n'
                f"Stop it there ({stack.typed('down')}; where that {kind} is gone, here: "
                f"{stack.typed('down FORCE=1', 'down --force')}),\n"
                "or give this one a name and ports of its own in .env (COMPOSE_PROJECT_NAME, PIERHEAD_*_PORT)."
            )

    def _warn_about_missing_gpus(self, services: Services) -> None:
        """Before minutes and gigabytes go into images for GPUs."""
        asking = resolved.with_gpus(services)
        if asking and not machine.has_gpus(self.stack):
            self.warn(
                f"Docker knows no GPU here, and these services ask for one: {' '.join(asking)}. They will stay "
                "PENDING. Without a GPU: stop this (Ctrl-C), and leave GPU=1 out, or take the request out of the file "
                "(deploy.resources.reservations.devices, x-serve.gpu; `pierhead llm build --gpus 0` writes none). With "
                "one: the NVIDIA Container Toolkit makes it known to Docker (nvidia-ctk cdi generate "
                "--output=/etc/cdi/nvidia.yaml)."
            )

    def _refuse_unusable_files(self, services: Services) -> None:
        """What the controller would refuse, with the variables that it will have."""
        own = services.get("controller", {}).get("environment") or {}
        machines = {name: value for name, value in self.stack.environment.items() if name in ("PATH", "HOME")}
        for warning in self.read_files(self.stack.root, {**machines, **own}):
            self.warn(f"warning: {warning}")

    # ------------------------------------------------------------------------------------------------------------ start

    def _has_image(self, name: str) -> bool:
        return self.stack.programs.read("docker", "image", "inspect", name).status == 0

    def _remove_optional_services(self) -> None:
        """What is left of settings that asked for them, by its image: a user's service may have its name."""
        for name in {"acme", "alertmanager"} - {*self.stack.own_services}:
            named = ("--filter", f"name=^{self.stack.name}-{name}-1$", "--format", "{{.ID}} {{.Image}}")
            for line in self.stack.programs.read("docker", "ps", "--all", *named).lines:
                container, _, image = line.partition(" ")
                if image.startswith(f"pierhead/{name}:"):
                    self.stack.programs.read("docker", "rm", "--force", container)

    def _replaces_haproxy(self, compose: Compose) -> bool:
        """Two containers cannot publish one port, so Compose stops the old one first."""
        if not compose.read("ps", "--quiet", "haproxy").lines:
            return False
        planned = compose.read("--dry-run", "--progress", "plain", "up", "--no-build", "--detach")
        return re.search("haproxy-1 +Recreate$", planned.output + planned.errors, re.MULTILINE) is not None

    def _replace_haproxy(self, compose: Compose, *plain_up: str) -> bool:
        """Alone: among others it would not start before the last of them has been replaced."""
        self.say(
            "This replaces HAProxy's container: new connections are refused until requests in flight have ended, "
            "for 11 seconds at most."
        )
        return compose.step("Replacing HAProxy", *plain_up, "--no-deps", "haproxy")
