"""Ray Serve's configuration objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from enum import Enum
from typing import Any

from pierhead.rayserve.context import DeploymentID as DeploymentID  # Ray Serve's guides import it from here

logger = logging.getLogger("ray.serve")


class ProxyLocation(str, Enum):  # noqa: UP042 - its str() is that of Ray Serve
    """Accepted and without effect: HAProxy stands before all replicas."""

    Disabled = "Disabled"
    HeadOnly = "HeadOnly"
    EveryNode = "EveryNode"


class AggregationFunction(str, Enum):  # noqa: UP042 - its str() is that of Ray Serve
    """How the load of a time window becomes one number."""

    MEAN = "mean"
    MAX = "max"
    MIN = "min"


def number_of(value: Any, kind: str) -> Any:
    """A number that was written as text, or 2.0 for 2, as pydantic reads it; anything else unchanged.

    `kind`: the field's annotation.
    """
    make = int if kind.startswith("int") else float if kind.startswith("float") else None
    if make is None or (not isinstance(value, str) and not (isinstance(value, float) and value.is_integer())):
        return value
    try:
        return make(value)
    except ValueError:
        return value


class _Config:
    """What pydantic's models have and users of these call. Unknown fields are ignored, as Ray Serve does."""

    _strict = False
    """Unknown fields are a ValueError."""

    def __init__(self, **given: Any) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            default = each.default if each.default_factory is MISSING else each.default_factory()
            setattr(self, each.name, number_of(given.pop(each.name, default), str(each.type)))
        for name in given:
            if self._strict:
                raise ValueError(f"{type(self).__name__}: {name} is none of its fields")
            logger.warning("%s: %s is none of its fields and has no effect", type(self).__name__, name)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Raise ValueError for values that cannot be."""

    def dict(self, **_: Any) -> Mapping[str, Any]:
        """As a mapping."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def model_dump(self, **_: Any) -> Mapping[str, Any]:
        """As a mapping."""
        return self.dict()


class AutoscalingContext:
    """For annotations alone: the controller calls a policy with one situation; see the guide of autoscaling."""


@dataclass(init=False)
class AutoscalingPolicy(_Config):
    """What decides on the number of replicas; None = Ray Serve's formula."""

    policy_function: str | Callable[..., Any] | None = None
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)


_ABOVE_0 = (
    "target_ongoing_requests",
    "metrics_interval_s",
    "look_back_period_s",
    "smoothing_factor",
    "upscale_smoothing_factor",
    "downscale_smoothing_factor",
    "upscaling_factor",
    "downscaling_factor",
)
"""Of AutoscalingConfig."""


@dataclass(init=False)
class AutoscalingConfig(_Config):
    """x-serve.autoscale: the number of replicas by load. Raises ValueError for bounds that contradict each other."""

    min_replicas: int = 1
    initial_replicas: int | None = None
    max_replicas: int = 1
    target_ongoing_requests: float | None = 2
    metrics_interval_s: float = 10.0
    look_back_period_s: float = 30.0
    smoothing_factor: float = 1.0
    upscale_smoothing_factor: float | None = None
    downscale_smoothing_factor: float | None = None
    upscaling_factor: float | None = None
    downscaling_factor: float | None = None
    downscale_delay_s: float = 600.0
    downscale_to_zero_delay_s: float | None = None
    upscale_delay_s: float = 30.0
    aggregation_function: str = "mean"
    policy: AutoscalingPolicy | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in _ABOVE_0:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}: expected a number > 0, found {value!r}")
        for name in ("downscale_delay_s", "downscale_to_zero_delay_s", "upscale_delay_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}: expected a number >= 0, found {value!r}")
        if self.min_replicas < 0 or self.max_replicas < 1:
            raise ValueError(
                f"expected min_replicas >= 0 and max_replicas >= 1, found {self.min_replicas} and {self.max_replicas}"
            )
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas ({self.max_replicas}) must be greater than or equal to min_replicas "
                f"({self.min_replicas})!"
            )
        if self.initial_replicas is not None and not self.min_replicas <= self.initial_replicas <= self.max_replicas:
            raise ValueError(
                f"expected initial_replicas from min_replicas ({self.min_replicas}) to max_replicas "
                f"({self.max_replicas}), found {self.initial_replicas}"
            )

    @classmethod
    def default(cls) -> AutoscalingConfig:
        """That of num_replicas="auto"."""
        return cls(min_replicas=1, max_replicas=100, target_ongoing_requests=2.0)

    @property
    def first(self) -> int:
        """How many replicas there are at the start."""
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas


@dataclass(init=False)
class BackpressureConfig(_Config):
    """The HTTP answer to a request that finds the line full."""

    _strict = True

    status_code: int = 503
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.status_code not in (503, 429):
            raise ValueError(f"status_code: expected 503 or 429, found {self.status_code}")


@dataclass(init=False)
class RequestRouterConfig(_Config):
    """x-serve.router: a policy's name, or `my_package.routing:MyPolicy`. The other fields have no effect."""

    request_router_class: str | Callable[..., Any] = "power_of_two"
    request_router_kwargs: Mapping[str, Any] = field(default_factory=dict)
    request_routing_stats_period_s: float = 10.0
    request_routing_stats_timeout_s: float = 30.0
    initial_backoff_s: float = 0.025
    backoff_multiplier: float = 2.0
    max_backoff_s: float = 0.5


@dataclass(init=False)
class HTTPOptions(_Config):
    """Where `serve.run` listens. In containers HAProxy listens, at PIERHEAD_HTTP_PORT."""

    host: str | None = "127.0.0.1"
    port: int = 8000
    middlewares: Sequence[Any] = ()
    location: ProxyLocation | str | None = None
    num_cpus: int = 0
    root_url: str = ""
    root_path: str = ""
    request_timeout_s: float | None = None
    keep_alive_timeout_s: int = 90
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None

    def __post_init__(self) -> None:
        if (self.ssl_keyfile is None) is not (self.ssl_certfile is None):
            raise ValueError("Both ssl_keyfile and ssl_certfile must be provided together to enable HTTPS.")


@dataclass(init=False)
class gRPCOptions(_Config):  # noqa: N801 - Ray Serve's name
    """Where `serve.run` listens for gRPC, and for which services."""

    port: int = 9000
    grpc_servicer_functions: Sequence[str] = ()
    request_timeout_s: float | None = None
    enable_reflection: bool = True


@dataclass(init=False)
class ControllerOptions(_Config):
    """Accepted and without effect."""

    _strict = True
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


@dataclass(init=False)
class GangSchedulingConfig(_Config):
    """Refused by `deployment`: nothing here places groups of replicas together."""


@dataclass(init=False)
class DeploymentActorConfig(_Config):
    """Refused by `deployment`: there are no actors."""


def made(kind: type[Any], value: Any, name: str) -> Any:
    """The object of a configuration class that a mapping or such an object is. Raises ValueError."""
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        text = f"{name}: expected a {kind.__name__} or a dict, found {value!r:.100}"
        raise ValueError(text)  # noqa: TRY004 - Ray Serve's is one
    try:
        return kind(**value)
    except TypeError as error:  # a dataclass without that field
        raise ValueError(f"{name}: {error}") from None
