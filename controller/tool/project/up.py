"""From any state of this machine to a stack that answers.

A second `up` changes nothing. After Ctrl-C, the next `up` continues.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import images, machine, resolved
from .compose import Compose
from .on_machine import OnMachine
from .on_nodes import OnNodes
from .resolved import ServiceRoute, Services
from .stack import NotUp, ProjectStack, Say

READY_S = "300"
CONTROLLER_S = 30.0
_TIMED_OUT, _BAD_FILES = 4, 2
"""Exit codes of `wait-ready`."""


@dataclass(frozen=True)
class StackUp:
    """One `up` of a stack."""

    stack: ProjectStack
    place: OnMachine | OnNodes
    say: Say
    warn: Say

    def run(self) -> None:
        """Raises InvalidRequest before anything is started; NotBuilt, NotUp, Told."""
        images.see_to(self.stack, "engine.sh")
        with self._alone():
            compose = Compose(self.stack)
            services = compose.every_service()
            machine.refuse_wrong_settings(self.stack, services)
            for warning in machine.refuse_wrong_certificates(self.stack):
                self.warn(f"warning: {warning}")
            machine.refuse_wrong_public_keys(self.stack, services)
            self.place.refuse(compose, services)
            compose = self._with_images(compose)
            self._tell_what_goes(services)
            self.place.start(compose)
            routes = resolved.routes(services)
            self._wait(compose, routes)
            self._print_addresses(compose, routes)
            self._advise_against_proxy()
            self.place.tell_trouble(compose)
            self._call("status", compose=compose)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Two `up` of the same directory: the second waits. The lock is on the directory itself and leaves no file."""
        place = os.open(self.stack.root, os.O_RDONLY)
        try:
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                up, kind = self.stack.typed("up"), self.stack.kind
                self.say(f"Another `{up}` of this {kind} is running: waiting for it.")
                fcntl.flock(place, fcntl.LOCK_EX)
            yield
        finally:
            os.close(place)

    # ------------------------------------------------------------------------------------------------ build, and start

    def _with_images(self, compose: Compose) -> Compose:
        stack = self.stack
        builds = compose.setting("PIERHEAD_BUILD", "1") != "0"
        if builds:  # in a project Grafana is there only where it is asked for
            needs_grafana = stack.project.is_clone or machine.has_grafana(compose)
            images.see_to(stack, "base-images.sh", *([] if needs_grafana else ["debian-only"]))
        compose = self.place.prepare(images.with_inputs(compose), builds=builds)
        if builds:
            images.build(compose)
        return compose

    def _tell_what_goes(self, services: Services) -> None:
        """The controller removes what the files do not have any more, whatever profile is chosen. A user who forgot to
        name an app reads it here first.
        """
        gone = sorted({*self.place.replicated()} - {*services, ""})
        if gone:
            apps = ', or their apps: make up APPS="..."' if self.stack.project.is_clone else ""
            self.warn(
                f"These run and are not among the chosen files, so they are removed: {' '.join(gone)}. "
                f"To keep them, name their files in COMPOSE_FILE (.env){apps}"
            )

    # ---------------------------------------------------------------------------------------------------------- waiting

    def _wait(self, compose: Compose, routes: Sequence[ServiceRoute]) -> None:
        ready_s = self.stack.environment.get("PIERHEAD_UP_TIMEOUT_S") or READY_S
        self._wait_for_controller(compose)
        self._wait_for_services(compose, ready_s)
        if self.stack.project.is_clone:
            self._wait_for_apps(compose, routes, ready_s)

    def _wait_for_controller(self, compose: Compose) -> None:
        """Replicas serve without it, so that apps answer says nothing about the controller."""
        if self.stack.programs.wait("Waiting for the controller", self.place.missing_of_controller, CONTROLLER_S):
            return
        self.warn(self.place.controllers_log(compose).rstrip())
        logs = self.stack.typed("logs SERVICE=controller", "logs controller")
        raise NotUp(
            f"the controller does not answer after {CONTROLLER_S:g} s; above are the last lines of its log ({logs}).\n"
            "Running services keep serving; nothing is scaled or healed until then."
        )

    def _wait_for_services(self, compose: Compose, ready_s: str) -> None:
        """Each serves, in the version that the files ask for or on the way to it, or has a reason that waiting does not
        change: also those in files of the user's own.
        """
        text, began = "Waiting until every service serves", time.monotonic()
        self.say(f"{text} ...")
        done = self.stack.programs.read(
            *self.stack.command, "wait-ready", "--serving", "--quiet", "--timeout", ready_s,
            timeout_s=None, variables=compose.own, directory=self.stack.root, complains=True,
        )  # fmt: skip
        if done.status == 0:
            self.say(f"{text}: done ({time.monotonic() - began:.0f} s)")
            for line in done.lines[1:]:  # rollouts in progress; the status says what the first line does
                self.say(line)
            return
        self._refuse_where_it_is_down()
        stack = self.stack
        if done.status == _BAD_FILES:
            raise NotUp("the compose files cannot be used: the lines above say why. Running services are not affected.")
        self._call("status", compose=compose)
        if done.status == _TIMED_OUT:
            why, events = stack.typed("why SERVICE=...", "why SERVICE"), stack.typed("events")
            raise NotUp(
                f"not every service serves after {ready_s} s. The stack keeps trying; see why with `{why}`, `{events}`."
            )
        raise NotUp(
            "not every service serves as the files say, and waiting does not help: the lines above say why.\n"
            "The rest of the stack runs, and running services are not affected."
        )

    def _refuse_where_it_is_down(self) -> None:
        """A `down` ends the waiting of an `up`."""
        if self.place.is_down():
            raise NotUp(f"the stack was taken down while it started, perhaps by `{self.stack.typed('down')}`.")

    def _wait_for_apps(self, compose: Compose, routes: Sequence[ServiceRoute], ready_s: str) -> None:
        """The apps of the clone also answer a request. What a service of the user's own answers is not known."""
        silent = [route.first_request for route in routes if route.first_request]

        def missing() -> str:
            while silent:
                status = self.stack.programs.status(machine.http_address(self.stack, silent[0]))
                if status not in (200, 401):  # a service may ask for a key
                    return f"GET {silent[0]}: {status or 'no answer'}"
                silent.pop(0)
            return ""

        if self.stack.programs.wait("Waiting until every app answers", missing, float(ready_s)):
            return
        self._refuse_where_it_is_down()
        self._call("status", compose=compose)
        status, events, logs = map(self.stack.typed, ("status", "events", "logs"))
        raise NotUp(
            f"an app does not answer after {ready_s} s. The stack keeps trying; see why with `{status}`, `{events}`, "
            f"`{logs}`."
        )

    # ----------------------------------------------------------------------------------------------------- what is said

    def _print_addresses(self, compose: Compose, routes: Sequence[ServiceRoute]) -> None:
        stack = self.stack
        rows = [
            (
                one.service,
                machine.http_address(stack, one.shown(of_clone=stack.project.is_clone))
                + (f"  (Host: {one.host})" if one.host else ""),
            )
            for one in routes
        ]
        rows.append(("gRPC", machine.address(stack, "PIERHEAD_GRPC_PORT").removeprefix("http://")))
        rows += self.place.addresses(compose)
        self.say("\n".join(["", *(f"  {name:<12} {address}" for name, address in rows), ""]))
        if words := self.place.who_reaches_it():
            self.say(words)

    def _advise_against_proxy(self) -> None:
        if machine.carries_ports_by_processes(self.stack):
            self.say(
                "Published ports refuse connections for as long as the Docker Engine is down, because docker-proxy "
                'carries them. With "userland-proxy": false in /etc/docker/daemon.json (and one restart of the engine) '
                "they refuse only for a moment when the engine starts, and a request costs about a fifth less.\n"
            )

    def _call(self, *words: str, compose: Compose) -> None:
        self.stack.programs.call(*self.stack.command, *words, variables=compose.own, directory=self.stack.root)
