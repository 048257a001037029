"""The calls of the REST API, with its documents as records. All raise CommandError and its kinds, and KeyError or
TypeError for the answer of a controller of another build.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..status.records import answers, changes
from ..status.records.document import read
from ..status.records.services import Nodes, Service, Services
from .client import ControllerClient, segment, service_path


class ControllerApi:
    """What the commands ask the controller."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client

    @property
    def url(self) -> str:
        """Where it is."""
        return self._client.url

    def services(self) -> Services:
        """The whole stack."""
        return read(Services, self._client.get("/api/v1/services"))

    def service(self, name: str) -> Service:
        """One service."""
        return read(Service, self._client.get(service_path(name)))

    def nodes(self) -> Nodes:
        """The nodes."""
        return read(Nodes, self._client.get("/api/v1/nodes"))

    def plan(self, rehearsed: Sequence[str] = ()) -> answers.PlanDocument:
        """What the controller would do now, or with other numbers of replicas (`web:4`)."""
        return read(answers.PlanDocument, self._client.get("/api/v1/plan", [("scale", each) for each in rehearsed]))

    def routes(self) -> answers.Routes:
        """HAProxy's routes."""
        return read(answers.Routes, self._client.get("/api/v1/routes"))

    def traffic(self) -> answers.Traffic:
        """The traffic of now."""
        return read(answers.Traffic, self._client.get("/api/v1/traffic"))

    def events(self, query: Mapping[str, str]) -> answers.Events:
        """Events that match the query."""
        return read(answers.Events, self._client.get("/api/v1/events", query))

    def logs(self, service: str, query: Mapping[str, str]) -> answers.Logs:
        """The logs of a service's replicas."""
        return read(answers.Logs, self._client.get(service_path(service, "logs"), query))

    def revisions(self, service: str) -> answers.Revisions:
        """The versions of a service."""
        return read(answers.Revisions, self._client.get(service_path(service, "revisions")))

    def scale(self, service: str, replicas: int | None) -> changes.Scaled:
        """Set a number of replicas; None: the files or the autoscaler decide."""
        wanted = changes.Scale("auto" if replicas is None else replicas)
        return read(changes.Scaled, self._client.put(service_path(service, "scale"), wanted))

    def deploy(self, services: Sequence[str], *, now: bool) -> changes.Deployed:
        """Roll out these services; none named: all."""
        wanted = changes.Deploy(tuple(services) or None, now)
        return read(changes.Deployed, self._client.post("/api/v1/deploy", wanted))

    def roll_back(self, service: str, to: str) -> changes.Asked:
        """Go back to a version; "": the one before."""
        return self._asked(service, "rollback", changes.Rollback(to or None))

    def abort(self, service: str) -> changes.Asked:
        """End a rollout."""
        return self._asked(service, "abort", changes.Nothing())

    def promote(self, service: str) -> changes.Asked:
        """End the watch over a rollout."""
        return self._asked(service, "promote", changes.Nothing())

    def restart(self, service: str) -> changes.Asked:
        """Replace every replica by one of the same definition."""
        return self._asked(service, "restart", changes.Nothing())

    def operate(self, service: str, wanted: changes.Operate) -> changes.Operated:
        """Have every ready replica of a language model do something."""
        return read(changes.Operated, self._client.post(service_path(service, "operations"), wanted))

    def keys(self) -> answers.Keys:
        """The keys of clients."""
        return read(answers.Keys, self._client.get("/api/v1/keys"))

    def make_key(self, wanted: changes.MakeKey) -> changes.MadeKey:
        """Make a key for clients."""
        return read(changes.MadeKey, self._client.post("/api/v1/keys", wanted))

    def revoke_key(self, name: str) -> changes.Revoked:
        """Revoke a key of clients."""
        return read(changes.Revoked, self._client.delete(f"/api/v1/keys/{segment(name)}"))

    def alerts(self) -> answers.Alerts:
        """What fires."""
        return read(answers.Alerts, self._client.get("/api/v1/alerts"))

    def silences(self) -> answers.Silences:
        """The silences of alerts."""
        return read(answers.Silences, self._client.get("/api/v1/silences"))

    def silence(self, wanted: changes.MakeSilence) -> changes.Silenced:
        """Make a silence."""
        return read(changes.Silenced, self._client.post("/api/v1/silences", wanted))

    def end_silence(self, identity: str) -> changes.SilenceEnded:
        """End a silence."""
        return read(changes.SilenceEnded, self._client.delete(f"/api/v1/silences/{segment(identity)}"))

    def backup(self) -> answers.Backup:
        """Everything in the controller's state."""
        return read(answers.Backup, self._client.get("/api/v1/backup"))

    def restore(self, backup: Mapping[str, object], *, force: bool) -> changes.Restored:
        """Put a backup in the place of the controller's state."""
        return read(changes.Restored, self._client.post("/api/v1/restore", {"backup": backup, "force": force}))

    def mark(self, uuid: str, fault: str | None) -> changes.Marked:
        """Mark a GPU as faulty; None: take the mark away."""
        return read(changes.Marked, self._client.put(f"/api/v1/gpus/{segment(uuid)}", changes.Mark(fault)))

    def drain(self, node: str, *, force: bool) -> changes.NodeAsked:
        """Move a node's replicas elsewhere."""
        return read(changes.NodeAsked, self._client.post(_node_path(node, "drain"), changes.Drain(force)))

    def activate(self, node: str) -> changes.NodeAsked:
        """Use a node again."""
        return read(changes.NodeAsked, self._client.post(_node_path(node, "activate"), changes.Nothing()))

    def label(self, node: str, labels: Mapping[str, str | None]) -> changes.NodeAsked:
        """Set labels of a node."""
        return read(changes.NodeAsked, self._client.put(_node_path(node, "labels"), changes.Labels(labels)))

    def _asked(self, service: str, verb: str, body: object) -> changes.Asked:
        return read(changes.Asked, self._client.post(service_path(service, verb), body))


def _node_path(node: str, below: str) -> str:
    return f"/api/v1/nodes/{segment(node)}/{below}"
