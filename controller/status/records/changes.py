"""The documents that ask for a change, and the answers to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .answers import Backup, KeyDocument, SilenceDocument
from .document import Document

LLMOperation = Literal["sleep", "wake", "reset_prefix_cache"]


@dataclass(frozen=True, slots=True)
class Scale(Document):
    """The number of replicas that a service should have."""

    replicas: int | Literal["auto"]
    """0 to 1000; "auto" removes a number that was set."""


@dataclass(frozen=True, slots=True)
class Scaled(Document):
    """The change was accepted; the controller carries it out."""

    service: str
    replicas: int | Literal["auto"]
    message: str = ""
    wanted: int | None = None
    """The files' own number, with "auto" and without an autoscaler."""


@dataclass(frozen=True, slots=True)
class Deploy(Document):
    """Which services to roll out; without `services` all of them. `now`: without `bake_s`."""

    services: tuple[str, ...] | None = None
    now: bool = False


@dataclass(frozen=True, slots=True)
class Deployed(Document):
    """A sentence for each service: which rollout begins, or why none does."""

    services: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Rollback(Document):
    """The version to go back to; without `to` the one before."""

    to: str | None = None


@dataclass(frozen=True, slots=True)
class Nothing(Document):
    """An empty object, or no body."""


@dataclass(frozen=True, slots=True)
class Asked(Document):
    """The change was accepted; the controller carries it out."""

    service: str
    message: str


@dataclass(frozen=True, slots=True)
class Operate(Document):
    """What every ready replica of a language model is to do."""

    operation: LLMOperation
    level: int = 1
    """Of `sleep`: 1 moves the weights to the machine's memory, 2 drops them."""
    timeout_s: float = 300.0
    """0.1 to 3600: the longest wait for a replica. After a sleep of level 2 the weights are read from disk again."""


@dataclass(frozen=True, slots=True)
class ReplicaOperated(Document):
    """What one replica answered."""

    name: str
    done: bool
    message: str
    """Why it was not done."""
    late: bool
    """It did not answer in time."""


@dataclass(frozen=True, slots=True)
class Operated(Document):
    """The answers of all replicas that were ready."""

    service: str
    operation: LLMOperation
    replicas: tuple[ReplicaOperated, ...]


TryMethod = Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "gRPC"]


@dataclass(frozen=True, slots=True)
class Try(Document):
    """One request to HAProxy, as a client sends it."""

    path: str
    """With the query, within the service's route; of gRPC "/shop.Ranker/rank"."""
    method: TryMethod = "GET"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: str = field(default="", repr=False)
    """Of gRPC the message, as JSON."""
    key: str = field(default="", repr=False)
    """A key or token of a client, which is sent as `Authorization: Bearer`. It is kept nowhere."""
    timeout_s: float = 60.0
    """0.1 to 600: how long the answer may take, its end included."""


@dataclass(frozen=True, slots=True)
class Mark(Document):
    """Why a GPU is not to be used; null removes the mark."""

    fault: str | None


@dataclass(frozen=True, slots=True)
class Marked(Document):
    """The mark of a GPU."""

    gpu: str
    fault: str | None


@dataclass(frozen=True, slots=True)
class Drain(Document):
    """With `force`, replicas for which no other node has room end as well."""

    force: bool = False


@dataclass(frozen=True, slots=True)
class Labels(Document):
    """Labels to set; null takes one away."""

    labels: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class NodeAsked(Document):
    """The change was made; the controller carries out what follows of it."""

    node: str
    message: str


@dataclass(frozen=True, slots=True)
class MakeKey(Document):
    """A key to make. A limit of 0 is none; no services, or no models: every one."""

    name: str
    services: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0
    days: int = 0
    """How long it is in force; 0 = for ever."""


@dataclass(frozen=True, slots=True)
class MadeKey(Document):
    """A new key."""

    key: str
    """What its owner sends; it is shown this once."""
    about: KeyDocument
    in_force: bool
    """Whether HAProxy knows it."""


@dataclass(frozen=True, slots=True)
class Revoked(Document):
    """The key is forgotten."""

    name: str
    in_force: bool
    """Whether HAProxy knows that: the key opens nothing any more."""


@dataclass(frozen=True, slots=True)
class MakeSilence(Document):
    """What not to send: an alert of a service, or all of one of them. One of both is needed."""

    service: str = ""
    alert: str = ""
    for_s: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Silenced(Document):
    """The new silence."""

    about: SilenceDocument


@dataclass(frozen=True, slots=True)
class SilenceEnded(Document):
    """Alerts are sent again."""

    id: str


@dataclass(frozen=True, slots=True)
class Restore(Document):
    """A backup, to be put in the place of the controller's state. `force`: also of another project."""

    backup: Backup
    force: bool = False


@dataclass(frozen=True, slots=True)
class Restored(Document):
    """The state is that of the backup, and the controller begins again with it."""

    project: str
    at: float
    """When the backup was made."""
    rows: int
    events: int
