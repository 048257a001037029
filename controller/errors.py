"""The controller's exceptions. Each class has its HTTP status and the command's exit code."""

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
    """The compose files cannot be used; nothing is changed. `problems` has one sentence for each mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class UnknownService(InvalidRequest):
    """No service of that name carries an x-serve block."""

    http_status = 404


class UnknownKey(InvalidRequest):
    """There is no key of that name."""

    http_status = 404


class NoReadyReplica(ControllerError):
    """No replica of the service is ready for what was asked; nothing was changed."""

    http_status = 409


class SettingsError(ControllerError):
    """An environment variable of the controller has a value that it cannot use; it does not start."""

    exit_code = 2


class StoreError(ControllerError):
    """The state file cannot be read or written; the value is not stored."""


class NewerState(ControllerError):
    """The state is of a newer build: this one does not start, and changes nothing."""


class StateChanged(StoreError):
    """The state was written by another controller, or a command, since it was read: read it again."""


class StateTooLarge(StoreError):
    """The state does not fit into the place where it is kept, even without events."""


class StateUnreachable(StoreError):
    """The place of the state does not answer. A write may have been carried out all the same."""

    http_status = 503


class NotActing(ControllerError):
    """Another controller may act in place of this one: the action was not begun."""

    http_status = 503


class PolicyError(ControllerError):
    """The user's autoscaling policy returned no number; the target is held."""


class PrometheusError(ControllerError):
    """Prometheus did not answer a query, or not as the query needs it."""

    http_status = 502


class AlertmanagerError(ControllerError):
    """Alertmanager did not answer, or refused what it was asked."""

    http_status = 502


class NoAlertmanager(InvalidRequest):
    """The stack has none: no receiver of alerts is named."""

    http_status = 409


class WebhookError(ControllerError):
    """The operator's webhook does not take a message."""

    http_status = 502


class AnotherController(ControllerError):
    """Another controller has this project; this one ends. Its exit code 3 is documented."""

    exit_code = 3


class BeginsAgain(ControllerError):
    """Another state was put in the place of this controller's: it ends, and Docker starts the next one."""

    exit_code = 4


class NotYet(ControllerError):
    """The controller was just started and has not seen the world yet: the same request works soon."""

    http_status = 503


class TooMany(ControllerError):
    """As many callers as may be at a time are there already: the request works once one of them has gone."""

    http_status = 503


class Forbidden(ControllerError):
    """The caller may not ask for a change."""

    http_status = 403


class UnknownHost(ControllerError):
    """The request is for a host of another name than the API's."""

    http_status = 421


class EngineError(ControllerError):
    """The Docker Engine refused a call."""

    http_status = 502


class EngineUnreachable(EngineError):
    """The Docker Engine does not answer."""

    http_status = 503


class EngineSocketGone(EngineUnreachable):
    """The engine's socket file is deleted: only a restarted controller reaches the next engine."""


class EngineLeaderless(EngineError):
    """The engine answers, and its managers have no leader at the moment: nothing can be read or changed until then."""

    http_status = 503


class ImageNotFound(EngineError):
    """The image is not on this machine and cannot be pulled."""


class RoutingError(ControllerError):
    """HAProxy refused a runtime command; the message quotes it."""

    http_status = 502


class RoutingUnreachable(RoutingError):
    """HAProxy's socket does not answer."""

    http_status = 503


class ReplicaError(ControllerError):
    """A replica's admin port refused a request or does not answer."""

    http_status = 502
