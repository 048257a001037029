"""Swarm's secrets and configs of a stack: certificates of the TLS between controller and edges, and the files' own.

A secret cannot be read back, so its labels say what must be known of it later: the public certificates. Its name ends
with a hash of its content, so a new content is a new name, which Swarm rolls out node by node.

The authority's private key is nowhere: it signs the two certificates and is forgotten. A renewal makes a new authority.
While its certificates come to the nodes one by one, old and new ones must be trusted everywhere, so `ca.pem` with both
authorities is rolled out first (docs/decisions/swarm.md).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import certificates
from ..names import LONGEST_NAME

PROJECT_LABEL = "pierhead.project"
CERTIFICATE_LABEL = "pierhead.certificate"
AUTHORITY_LABEL = "pierhead.authority"
OWN_LABEL = "pierhead.own"
"""Of what the compose files do not have."""
CA, EDGE, CONTROLLER = "ca.pem", "edge.pem", "controller.pem"
"""Keys of compose/swarm.yaml."""
ROLES: Mapping[str, certificates.Role] = {EDGE: "edge", CONTROLLER: "controller"}


@dataclass(frozen=True, slots=True)
class Kept:
    """A secret or config as Swarm has it, or is to have it: `data` is None for one that is there."""

    name: str
    labels: Mapping[str, str]
    data: bytes | None = field(default=None, repr=False)


Set = Mapping[str, Kept]
"""By key (CA, EDGE, CONTROLLER), one secret each."""


def steps(project: str, used: Set, now: float) -> list[Set]:
    """The sets of secrets to roll out, one after the other; the last one is to stay.

    `used`: what the stack's services have, without `CA` where they have different ones, as after an `up` that was
    killed. Without both certificates: of a first `up`, or of one that was killed before there was a stack.
    """
    if not ROLES.keys() <= used.keys():
        made = _made(project, now)
        return [{CA: _bundle(project, made.values()), **made}]
    pair = {key: used[key] for key in ROLES}
    if not any(certificates.is_due(one.labels[CERTIFICATE_LABEL], now) for one in pair.values()):
        trusted = used[CA].labels[AUTHORITY_LABEL] if CA in used else ""
        is_complete = all(one.labels[AUTHORITY_LABEL] in trusted for one in pair.values())
        return [used if is_complete else {CA: _bundle(project, pair.values()), **pair}]
    made = _made(project, now)
    both = _bundle(project, [*pair.values(), *made.values()])
    return [{CA: both, **pair}, {CA: both, **made}]


def with_files(rollout: list[Set], files: Set, leaving: Set) -> list[Set]:
    """The same sets with further files. `leaving`: files that are not to stay, and that the HAProxys' routes name until
    the controller has published others. They go in a step of their own.
    """
    first: list[Set] = [{**one, **leaving, **files} for one in rollout]
    return [*first, {**rollout[-1], **files}] if leaving else first


def kept(project: str, key: str, data: bytes, labels: Mapping[str, str] | None = None) -> Kept:
    """What is to be kept under a name with the hash of its content."""
    digest = hashlib.sha256(data).hexdigest()[:12]
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{project}_{key.removesuffix('.pem')}")[: LONGEST_NAME - 13]
    return Kept(f"{stem}-{digest}", {**(labels or {}), PROJECT_LABEL: project, OWN_LABEL: key}, data)


def read(found: Iterable[Mapping[str, Any]]) -> dict[str, Kept]:
    """By name, what the API lists."""
    specs = (one["Spec"] for one in found)
    return {spec["Name"]: Kept(spec["Name"], dict(spec.get("Labels") or {})) for spec in specs}


def _made(project: str, now: float) -> dict[str, Kept]:
    authority = certificates.make_authority(now)
    made = {}
    for key, role in ROLES.items():
        identity = certificates.make(role, authority, now)
        labels = {CERTIFICATE_LABEL: identity.certificate, AUTHORITY_LABEL: authority.certificate}
        made[key] = kept(project, key, identity.pem.encode(), labels)
    return made


def _bundle(project: str, of: Iterable[Kept]) -> Kept:
    authorities = "".join(dict.fromkeys(one.labels[AUTHORITY_LABEL] for one in of))
    return kept(project, CA, authorities.encode(), {AUTHORITY_LABEL: authorities})
