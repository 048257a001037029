"""The controller's exception tree. Each class carries its HTTP status and the CLI's exit code.

ControllerError                500  1
|-- InvalidRequest             400  2   a wrong argument of an API or CLI call
|   |-- SpecError              400  2   the compose files; `problems` lists "path: expected ..., found ..."
|   `-- UnknownService         404  2
|-- SettingsError              500  2   an environment variable of the controller has a value it cannot use
|-- StoreError                 500  1   the state file cannot be read or written
|-- PolicyError                500  1   an autoscaling policy of the user's gives no number; the target is held
|-- NotYet                     503  1   the controller does not know the world yet; the same request works soon
|-- Forbidden                  403  2   a change asked for from where no change may be asked for
|-- EngineError                502  1   the Docker Engine refused or does not answer
|   |-- EngineUnreachable      503  1
|   |   `-- EngineSocketGone   503  1   its socket file is deleted; a controller that starts anew has the new one
|   `-- ImageNotFound          502  1
|-- RoutingError               502  1   HAProxy refused a command
|   `-- RoutingUnreachable     503  1
`-- ReplicaError               502  1   a replica does not take what it is given
"""

from __future__ import annotations

from collections.abc import Sequence


class ControllerError(Exception):
    """Base of every error the controller raises on purpose; the message says what, where, why and what to do."""

    http_status = 500
    exit_code = 1


class InvalidRequest(ControllerError):
    """An argument of an API or CLI call is wrong; nothing was changed."""

    http_status = 400
    exit_code = 2


class SpecError(InvalidRequest):
    """The compose files cannot be used; nothing running is touched. `problems` holds one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class UnknownService(InvalidRequest):
    """No service of that name carries an x-serve block."""

    http_status = 404


class SettingsError(ControllerError):
    """Environment variables of the controller hold values it cannot use; it does not start."""

    exit_code = 2


class StoreError(ControllerError):
    """The state file cannot be read or written; what was to be kept is not kept."""


class PolicyError(ControllerError):
    """An autoscaling policy of the user's gives no number: what it did instead, and where."""


class AnotherController(ControllerError):
    """Another controller has this project; this one ends. Its exit code is documented: 3."""

    exit_code = 3


class NotYet(ControllerError):
    """The controller was just started, or has not looked at something yet: the same request works soon."""

    http_status = 503


class Forbidden(ControllerError):
    """A change was asked for by somebody who may not ask for it."""

    http_status = 403
    exit_code = 2


class EngineError(ControllerError):
    """The Docker Engine refused a call."""

    http_status = 502


class EngineUnreachable(EngineError):
    """The Docker Engine does not answer."""

    http_status = 503


class EngineSocketGone(EngineUnreachable):
    """The Docker Engine does not answer, and never will at the socket file that this process has."""


class ImageNotFound(EngineError):
    """The image is neither on this machine nor to be pulled."""


class RoutingError(ControllerError):
    """HAProxy refused a runtime command; the message quotes it."""

    http_status = 502


class RoutingUnreachable(RoutingError):
    """HAProxy's socket does not answer."""

    http_status = 503


class ReplicaError(ControllerError):
    """A replica's admin port refused a request, or does not answer."""

    http_status = 502
