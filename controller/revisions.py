"""How versions of a service are made: what the store keeps of each, so that an earlier one can be had back. Pure.

A version is made of a definition and an image. The definition is kept as it was; the image by its id, since its name
may stand for another one by now. What needs no new container (replicas, route, rollout settings, HAProxy's limits of a
foreign image) is not part of a version and stays as the files say now; the limits of a managed service are, as its
replicas have them from their environment. A user_config is not part of a version, but it comes back with the last one
that the files had for it: what they say for another version may be nothing that it knows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

from pydantic import TypeAdapter, ValidationError

from controller.model import Revision, ServiceRollout, ServiceSpec


@cache
def _spec_adapter() -> TypeAdapter[ServiceSpec]:
    return TypeAdapter(ServiceSpec)


@cache
def _rollout_adapter() -> TypeAdapter[ServiceRollout]:
    return TypeAdapter(ServiceRollout)


def recorded(spec: ServiceSpec, version: str, image_id: str, now: float) -> Revision:
    """What to keep of a version that the files and this image give."""
    text = _spec_adapter().dump_json(spec).decode()
    return Revision(spec.name, version, now, spec.image, image_id, text)


def made_as(spec: ServiceSpec, revision: Revision) -> ServiceSpec | None:
    """The service as its files describe it now, but made as that version; None when the record cannot be read."""
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
        managed=then.managed,
        user_config=then.user_config,
        container={**then.container, "Image": revision.image_id},
        definition_hash=then.definition_hash,
    )


@lru_cache(maxsize=1024)
def written(revision: Revision) -> ServiceSpec | None:
    """The service as the files described that version; None when the record cannot be read. Asked for every tick."""
    try:
        return _spec_adapter().validate_json(revision.spec)
    except ValidationError:
        return None  # an older controller's record of a field that means something else now


def state_text(state: ServiceRollout) -> str:
    """Where a service stands, as the store keeps it."""
    return _rollout_adapter().dump_json(state, exclude_defaults=True).decode()


def state_of(text: str | None) -> ServiceRollout:
    """Read it back; what cannot be read is begun anew: replicas that serve then count as proved."""
    if text is None:
        return ServiceRollout()
    try:
        return _rollout_adapter().validate_json(text)
    except ValidationError:
        return ServiceRollout()
