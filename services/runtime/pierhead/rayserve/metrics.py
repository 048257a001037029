"""Ray Serve's metrics for user code: counters, gauges and histograms, in the replica's /metrics."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import prometheus_client

from pierhead.metrics import PROCESS
from pierhead.rayserve.context import current_replica

logger = logging.getLogger("ray.serve")

_OWN: Final = ("deployment", "replica", "application")


class _Metric:
    """One metric. Objects of one name share the series, as replicas of one process do; other tags start it again."""

    _made: Final[dict[str, tuple[Any, tuple[str, ...]]]] = {}
    """Each with the tags of all objects of its name. A tag that an object lacks is empty."""
    _lock: Final = threading.Lock()
    _kind: Any
    _more: Mapping[str, Any] = {}

    def __init__(self, name: str, description: str = "", tag_keys: Sequence[str] | None = None) -> None:
        if isinstance(tag_keys, str):
            raise TypeError(f"tag_keys should be a tuple type, got: {type(tag_keys)}")
        for key in tag_keys or ():
            if key in _OWN:
                raise ValueError(f"'{key}' tag is reserved for Ray Serve metrics")
        self._name = name
        self._keys = (*_OWN, *(tag_keys or ()))
        self._default: dict[str, str] = {}
        self._id = f"{type(self).__name__}:{name}"
        with self._lock:
            former, known = self._made.get(self._id, (None, ()))
            keys = tuple(dict.fromkeys((*known, *self._keys)))
            if keys != known:  # the first of its name, or one with other tags
                # It raises for a tag that Prometheus does not take.
                made = self._kind(name, description or name, keys, registry=None, **self._more)
                if former is not None:
                    PROCESS.unregister(former)
                PROCESS.register(made)
                self._made[self._id] = made, keys

    def set_default_tags(self, default_tags: Mapping[str, str]) -> Any:
        """Values of tags that calls do not name. Raises ValueError for unknown tags, TypeError for what is no text."""
        for key in default_tags:
            if key not in self._keys:
                raise ValueError(f"Unrecognized tag key {key}.")
        self._default = _texts(default_tags)
        return self

    @property
    def info(self) -> dict[str, Any]:
        """Name, tags and defaults."""
        return {"name": self._name, "tag_keys": self._keys, "default_tags": self._default}

    def _series(self, tags: Mapping[str, str] | None) -> Any:
        replica = current_replica()
        values = dict.fromkeys(_OWN, "")
        if replica is not None:
            values.update(deployment=replica.deployment, replica=replica.replica_tag, application=replica.app_name)
        values.update(self._default)
        values.update(_texts(tags or {}))
        for key in set(values) - set(self._keys):  # as in Ray Serve, no error
            logger.warning("metric %s: %s is none of its tags", self._name, key)
            del values[key]
        if missing := [key for key in self._keys if key not in values]:
            raise ValueError(f"Missing value for tag key(s): {','.join(missing)}.")
        made, keys = self._made[self._id]
        return made.labels(**dict.fromkeys(keys, "") | values)


def _texts(tags: Mapping[str, str]) -> dict[str, str]:
    for value in tags.values():
        if not isinstance(value, str):
            raise TypeError(f"Tag values must be str, got {type(value)}.")
    return dict(tags)


def _number(value: float) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"value must be int or float, got {type(value)}.")
    return value


class ServeCounter(_Metric):
    """A number that grows."""

    _kind = prometheus_client.Counter

    def inc(self, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        """Add to it. Raises ValueError for a number that is not above 0, and for tags without a value."""
        if _number(value) <= 0:
            raise ValueError(f"value must be >0, got {value}")
        self._series(tags).inc(value)


class ServeGauge(_Metric):
    """A number that goes up and down."""

    _kind = prometheus_client.Gauge

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Set it. Raises ValueError for tags without a value."""
        self._series(tags).set(_number(value))


class ServeHistogram(_Metric):
    """Counts of values by bucket."""

    _kind = prometheus_client.Histogram

    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: Sequence[float] | None = None,
        tag_keys: Sequence[str] | None = None,
    ) -> None:
        if not boundaries or min(boundaries) <= 0:
            raise ValueError("boundaries: expected a list of numbers above 0")
        self._more = {"buckets": sorted(boundaries)}
        super().__init__(name, description, tag_keys)

    def observe(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Count a value. Raises ValueError for tags without a value."""
        self._series(tags).observe(_number(value))


Counter, Gauge, Histogram = ServeCounter, ServeGauge, ServeHistogram
