"""What makes a version another one: the differences of two definitions of a service, one line each. Pure.

Values of environment variables are not told, as they may be secrets; that they differ is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from controller.model import GpuRequest, ServiceSpec

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
"""The engine's name for something -> what the compose files call it."""
_TOLD_ELSEWHERE = frozenset({"Image", "Env"})


def differences(then: ServiceSpec, now: ServiceSpec, image_then: str, image_now: str) -> tuple[str, ...]:
    """Return what changed from one definition to another, and from one image (id) to another."""
    return (
        *_image(then, now, image_then, image_now),
        *_environment(then.container.get("Env", ()), now.container.get("Env", ())),
        *_settings(then, now),
        *_rest(then.container, now.container),
    )


def _image(then: ServiceSpec, now: ServiceSpec, image_then: str, image_now: str) -> Iterator[str]:
    if then.image != now.image:
        yield f"image: {then.image} -> {now.image}"
    elif image_then != image_now:
        yield f"image: {now.image} was made anew, {_short(image_then)} -> {_short(image_now)}"


def _short(image_id: str) -> str:
    return image_id.removeprefix("sha256:")[:12]


def _environment(then: Iterable[str], now: Iterable[str]) -> Iterator[str]:
    before, after = (dict(_variable(line) for line in lines) for lines in (then, now))
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            yield f"environment.{name}: added"
        elif name not in after:
            yield f"environment.{name}: removed"
        elif before[name] != after[name]:
            yield f"environment.{name}: changed"


def _variable(line: str) -> tuple[str, str]:
    name, _, value = line.partition("=")
    return name, value


def _settings(then: ServiceSpec, now: ServiceSpec) -> Iterator[str]:
    for name in _FIELDS:
        if getattr(then, name) != getattr(now, name):
            yield f"{name}: {getattr(then, name)} -> {getattr(now, name)}"
    if (then.probe.port, then.probe.path) != (now.probe.port, now.probe.path):
        yield f"health.probe: :{then.probe.port}{then.probe.path} -> :{now.probe.port}{now.probe.path}"
    before, after = _gpu_words(then.gpu), _gpu_words(now.gpu)
    if before != after:  # where slots go is no part of a version
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
        if not prefix and key in _TOLD_ELSEWHERE:
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
