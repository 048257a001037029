"""Where a stack is brought up: this machine, or several nodes. `StackUp` asks it for what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...errors import ControllerError
from .compose import Compose
from .resolved import Services

Say = Callable[[str], None]


class NotUp(ControllerError):
    """The stack does not answer."""

    exit_code = 1


class Place(Protocol):
    """See the module."""

    def refuse(self, compose: Compose, services: Services) -> None:
        """Raise InvalidRequest for what is in the way, before anything is built; `services`: of all profiles."""
        ...

    def prepare(self, compose: Compose, *, builds: bool) -> Compose:
        """See to what an `up` needs before all other images are built. Raises InvalidRequest, NotBuilt."""
        ...

    def replicated(self) -> Sequence[str]:
        """The services that have replicas now."""
        ...

    def start(self, compose: Compose) -> None:
        """Start the stack. Raises InvalidRequest, NotUp."""
        ...

    def missing_of_controller(self) -> str:
        """Why the controller cannot be asked yet; "" where it can."""
        ...

    def controllers_log(self, compose: Compose) -> str:
        """The end of it."""
        ...

    def is_down(self) -> bool:
        """Whether the stack is removed, or on its way."""
        ...

    def addresses(self, compose: Compose) -> Sequence[tuple[str, str]]:
        """What answers in addition to services, and where."""
        ...

    def tell_trouble(self, compose: Compose) -> None:
        """Say what is wrong although the stack answers."""
        ...
