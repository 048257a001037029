"""Ray Serve's states and records, as far as they mean something here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pierhead.settings import import_path

EXPORTER = "PIERHEAD_TRACE_EXPORTER"
RATIO = "parentbased_traceidratio"
"""The sampler by which a caller decides for its requests, and a ratio for the others."""


class EncodingType(str, Enum):  # noqa: UP042 - its str() is that of Ray Serve
    """How a log line is written."""

    TEXT = "TEXT"
    JSON = "JSON"


@dataclass
class LoggingConfig:
    """The logging of a deployment: x-serve.logging. `logs_dir` has no effect: Docker keeps the logs."""

    encoding: str = "TEXT"
    log_level: str | int = "INFO"
    logs_dir: str | None = None
    enable_access_log: bool = True
    additional_log_standard_attrs: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for words that are none."""
        if self.encoding not in list(EncodingType):
            raise ValueError(f"encoding: expected TEXT or JSON, found {self.encoding!r}")
        level = logging.getLevelName(self.log_level)
        if not (isinstance(level, int) or level in _LEVELS):
            raise ValueError(f"log_level: expected one of {', '.join(_LEVELS)}, found {self.log_level!r}")


_LEVELS = tuple(logging.getLevelNamesMapping())


@dataclass
class TracingConfig:
    """Which requests have a trace that is exported, where an exporter or a collector is named. In containers,
    failed and slow ones are kept without it, too."""

    enabled: bool = False
    exporter_import_path: str | None = None
    """`module:function`, which returns a list of OpenTelemetry's span processors."""
    sampling_ratio: float = 0.01

    def __post_init__(self) -> None:
        """Raise ValueError for a ratio that is none, and for a path that names no function."""
        if self.exporter_import_path:
            try:
                import_path(self.exporter_import_path)
            except ValueError:
                found = self.exporter_import_path
                raise ValueError(f"exporter_import_path: expected module:function, found {found!r}") from None
        if not 0 <= self.sampling_ratio <= 1:
            raise ValueError(f"sampling_ratio: expected a number from 0 to 1, found {self.sampling_ratio!r}")

    def variables(self) -> dict[str, str]:
        """The environment of replicas that does the same."""
        if not self.enabled:
            return {}
        path = {EXPORTER: self.exporter_import_path} if self.exporter_import_path else {}
        return {"OTEL_TRACES_SAMPLER": RATIO, "OTEL_TRACES_SAMPLER_ARG": f"{self.sampling_ratio:g}", **path}


class ReplicaState(str, Enum):  # noqa: UP042 - its str() is that of Ray Serve
    """The state of a replica."""

    STARTING = "STARTING"
    UPDATING = "UPDATING"
    RECOVERING = "RECOVERING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


class DeploymentStatus(str, Enum):  # noqa: UP042 - its str() is that of Ray Serve
    """The status of a deployment."""

    UPDATING = "UPDATING"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    UPSCALING = "UPSCALING"
    DOWNSCALING = "DOWNSCALING"


class DeploymentStatusTrigger(str, Enum):  # noqa: UP042 - its str() is that of Ray Serve
    """What has led to a deployment's status."""

    UNSPECIFIED = "UNSPECIFIED"
    CONFIG_UPDATE_STARTED = "CONFIG_UPDATE_STARTED"
    CONFIG_UPDATE_COMPLETED = "CONFIG_UPDATE_COMPLETED"
    REPLICA_STARTUP_FAILED = "REPLICA_STARTUP_FAILED"
    HEALTH_CHECK_FAILED = "HEALTH_CHECK_FAILED"
    DELETING = "DELETING"


class ApplicationStatus(str, Enum):  # noqa: UP042 - its str() is that of Ray Serve
    """The status of an application."""

    NOT_STARTED = "NOT_STARTED"
    DEPLOYING = "DEPLOYING"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"
    DELETING = "DELETING"


class ProxyStatus(str, Enum):  # noqa: UP042 - its str() is that of Ray Serve
    """The status of the HTTP server."""

    STARTING = "STARTING"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DRAINING = "DRAINING"
    DRAINED = "DRAINED"


@dataclass
class DeploymentStatusOverview:
    """A deployment in `serve.status()`."""

    status: DeploymentStatus
    status_trigger: DeploymentStatusTrigger
    replica_states: dict[str, int]
    message: str


@dataclass
class ApplicationStatusOverview:
    """An application in `serve.status()`."""

    status: ApplicationStatus
    message: str
    last_deployed_time_s: float
    deployments: dict[str, DeploymentStatusOverview]


@dataclass
class ServeStatus:
    """What `serve.status()` returns."""

    proxies: dict[str, ProxyStatus] = field(default_factory=dict)
    applications: dict[str, ApplicationStatusOverview] = field(default_factory=dict)
    target_capacity: float | None = None


@dataclass(frozen=True)
class ReplicaRank:
    """The replica's number among its deployment's."""

    rank: int
    node_rank: int
    local_rank: int

    def model_dump(self) -> dict[str, Any]:
        """As a mapping."""
        return {"rank": self.rank, "node_rank": self.node_rank, "local_rank": self.local_rank}
