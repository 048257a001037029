"""Writes and reads the records of versions, from which a rollback restores a version. Pure.

A version consists of a definition and an image. The definition is kept unchanged. The image is kept by its id, since
its name may refer to another image by now. Settings that need no new container (replicas, route, rollout settings,
HAProxy's limits of a foreign image) are not part of a version: their current values in the files apply. The limits of a
managed service are part of a version, as its replicas have them from their environment. A user_config is not part of a
version, but a rollback restores the last one that the files had for the version: the version may not understand a
user_config that was written for another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..model.desired import Revision, ServiceRollout
from ..model.spec import GpuRequest, ServiceSpec


@cache
def _spec_adapter() -> TypeAdapter[ServiceSpec]:
    return TypeAdapter(ServiceSpec)


@cache
def _rollout_adapter() -> TypeAdapter[ServiceRollout]:
    return TypeAdapter(ServiceRollout)


def recorded(spec: ServiceSpec, version: str, image_id: str, now: float) -> Revision:
    """Return the record of the version that the files and this image define."""
    text = _spec_adapter().dump_json(spec).decode()
    return Revision(spec.name, version, now, spec.image, image_id, text)


def made_as(spec: ServiceSpec, revision: Revision) -> ServiceSpec | None:
    """The service as the files describe it now, but made as that version; None when the record cannot be read."""
    then = written(revision)
    if then is None:
        return None
    limits = then if then.managed else spec
    return replace(
        spec,
        max_ongoing_requests=limits.max_ongoing_requests,
        backpressure=limits.backpressure,
        request_timeout_s=limits.request_timeout_s,
        graceful_shutdown_timeout_s=limits.graceful_shutdown_timeout_s,
        stop_grace_period_s=limits.stop_grace_period_s,
        protocol=then.protocol,
        port=then.port,
        probe=replace(spec.probe, port=then.probe.port, path=then.probe.path),
        metrics_port=then.metrics_port,
        metrics_path=then.metrics_path,
        gpu=then.gpu,
        has_socket=then.has_socket,
        managed=then.managed,
        user_config=then.user_config,
        container={**then.container, "Image": revision.image_id},
        definition_hash=then.definition_hash,
        files=then.files,
    )


@lru_cache(maxsize=1024)
def written(revision: Revision) -> ServiceSpec | None:
    """The service as the files described that version; None when the record cannot be read. Cached: used every tick."""
    try:
        return _spec_adapter().validate_json(revision.spec)
    except ValidationError:
        return None  # the record of an older controller, with a field whose meaning has changed


def state_text(state: ServiceRollout) -> str:
    """A service's rollout state as the store keeps it."""
    return _rollout_adapter().dump_json(state, exclude_defaults=True).decode()


def state_of(text: str | None) -> ServiceRollout:
    """Read a stored state. An unreadable one becomes an empty state: replicas that serve then count as proven."""
    if text is None:
        return ServiceRollout()
    try:
        return _rollout_adapter().validate_json(text)
    except ValidationError:
        return ServiceRollout()


def latest_time(texts: Iterable[str]) -> float:
    """The latest time in stored states that a deadline counts from; 0 without deadlines."""
    states = [state_of(text) for text in texts]
    times = [time for state in states if (one := state.rollout) for time in (one.since, one.stuck_since)]
    return max((time for time in (*times, *(state.tried_since for state in states)) if time), default=0.0)


# ----------------------------------------------------------------------------------------------------
# The differences between two versions of a service, one line each.


LONGEST = 60
_FIELDS = ("protocol", "port", "managed", "metrics_port", "metrics_path")
_NAMES = {
    "Cmd": "command",
    "Entrypoint": "entrypoint",
    "User": "user",
    "WorkingDir": "working_dir",
    "StopTimeout": "stop_grace_period",
    "HostConfig.Binds": "volumes",
    "HostConfig.Mounts": "volumes",
    "HostConfig.Memory": "deploy.resources.limits.memory",
    "HostConfig.NanoCpus": "deploy.resources.limits.cpus",
}
"""The engine's name of a setting -> its name in the compose files."""
_SHOWN_APART = frozenset({"Image", "Env"})


def differences(then: ServiceSpec, now: ServiceSpec, image_then: str, image_now: str) -> tuple[str, ...]:
    """Return what changed from one definition to another, and from one image (id) to another."""
    return (
        *_image(then, now, image_then, image_now),
        *_environment(then.container.get("Env", ()), now.container.get("Env", ())),
        *_settings(then, now),
        *_rest(then.container, now.container),
        *(f"{target}: changed" for target in sorted(now.files) if then.files.get(target) != now.files[target]),
    )


def _image(then: ServiceSpec, now: ServiceSpec, image_then: str, image_now: str) -> Iterator[str]:
    if then.image != now.image:
        yield f"image: {then.image} -> {now.image}"
    elif image_then != image_now:
        yield f"image: {now.image} changed, {_short(image_then)} -> {_short(image_now)}"


def _short(image_id: str) -> str:
    return image_id.removeprefix("sha256:")[:12]


def _environment(then: Iterable[str], now: Iterable[str]) -> Iterator[str]:
    before, after = (dict(line.partition("=")[::2] for line in lines) for lines in (then, now))
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            yield f"environment.{name}: added"
        elif name not in after:
            yield f"environment.{name}: removed"
        elif before[name] != after[name]:
            yield f"environment.{name}: changed"


def _settings(then: ServiceSpec, now: ServiceSpec) -> Iterator[str]:
    for name in _FIELDS:
        if getattr(then, name) != getattr(now, name):
            yield f"{name}: {getattr(then, name)} -> {getattr(now, name)}"
    if (then.probe.port, then.probe.path) != (now.probe.port, now.probe.path):
        yield f"health.probe: :{then.probe.port}{then.probe.path} -> :{now.probe.port}{now.probe.path}"
    before, after = _gpu_words(then.gpu), _gpu_words(now.gpu)
    if before != after:  # the placement of slots is not part of a version
        yield f"gpu: {before} -> {after}"


def _gpu_words(request: GpuRequest | None) -> str:
    if request is None:
        return "nothing"
    which = [request.kind] if request.kind else []
    which += [", ".join(request.device_ids)] if request.device_ids else []
    which += [", ".join(request.capabilities)] if request.capabilities != ("gpu",) else []
    amount = str(request.count) if request.slot is None else str(request.slot).replace(":", " ")
    return _shown(f"{amount} ({'; '.join(which)})" if which else amount)


def _rest(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    before, after = (dict(_flat(body, "")) for body in (then, now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{_NAMES.get(key, key)}: {_shown(before.get(key))} -> {_shown(after.get(key))}"


def _flat(body: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in body.items():
        if not prefix and key in _SHOWN_APART:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    words = " ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}..."
