"""What fires, by Prometheus, and the silences of Alertmanager."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ..errors import AlertmanagerError, ControllerError, InvalidRequest, NoAlertmanager, PrometheusError
from ..model.text import did_you_mean
from ..observe.alertmanager import Silence, SilencedAlerts, Silencer
from ..observe.prometheus import AlertRule, FiringAlert
from ..status.records.answers import AlertDocument, Alerts, SilenceDocument, Target
from ..status.records.changes import MakeSilence

AskRules = Callable[[], Awaitable[Sequence[AlertRule]]]
"""The rules of alerts, with what fires; raises PrometheusError."""

_RULE, _SERVICE = "alertname", "service"


@dataclass(eq=False)
class AlertCommands:
    """`_silencer`: None = the stack has no Alertmanager. `_known` raises UnknownService for what is no service."""

    _rules: AskRules
    _silencer: Silencer | None
    _known: Callable[[str], object]
    _wall: Callable[[], float]

    def targets(self) -> Sequence[Target]:
        """Where Prometheus sends alerts, and scrapes Alertmanager."""
        return (Target(("alertmanager:9093",), {"job": "alertmanager"}),) if self._silencer else ()

    async def firing(self) -> Alerts:
        """What fires now, the critical and the newest first, or why that is not known."""
        at, is_sent = self._wall(), self._silencer is not None
        try:
            rules = await self._rules()
        except PrometheusError as error:
            return Alerts(at, (), is_sent, str(error))
        found = sorted((one for rule in rules for one in rule.firing), key=_urgency)
        silenced: SilencedAlerts = {}
        problem = ""
        try:
            silenced = await self._silencer.silenced() if self._silencer and found else {}
        except AlertmanagerError as error:
            problem = str(error)
        return Alerts(at, tuple(_document(one, silenced) for one in found), is_sent, problem)

    async def silences(self) -> Sequence[SilenceDocument]:
        """Those that have not ended, the next to end first. Raises NoAlertmanager, AlertmanagerError."""
        found = await self._there().silences()
        return [_silence_document(one) for one in sorted(found, key=lambda one: one.ends_at)]

    async def silence(self, wanted: MakeSilence, by: str) -> SilenceDocument:
        """Make a silence. Raises UnknownService, InvalidRequest (no such alert), PrometheusError, AlertmanagerError,
        NoAlertmanager.
        """
        silencer = self._there()
        if wanted.service:
            await self._check(wanted.service)
        if wanted.alert and wanted.alert not in (names := {rule.name for rule in await self._rules()}):
            raise InvalidRequest(
                f"alert: there is no alert {wanted.alert[:80]!r}; {did_you_mean(wanted.alert, names)}"
                "docs/how-to/alerts.md lists them"
            )
        labels = {_RULE: wanted.alert, _SERVICE: wanted.service}
        now = self._wall()
        made = Silence(
            {name: value for name, value in labels.items() if value}, now, now + wanted.for_s, by, wanted.why
        )
        return _silence_document(made, await silencer.silence(made))

    async def _check(self, service: str) -> None:
        """Raise what `_known` raises, unless an alert names the service: one that was removed may still have some."""
        try:
            self._known(service)
        except ControllerError:
            with contextlib.suppress(PrometheusError):
                if any(one.labels.get(_SERVICE) == service for rule in await self._rules() for one in rule.firing):
                    return
            raise

    async def end(self, identity: str) -> None:
        """End a silence. Raises InvalidRequest (there is none), NoAlertmanager, AlertmanagerError."""
        await self._there().end(identity)

    def _there(self) -> Silencer:
        if self._silencer is None:
            raise NoAlertmanager(
                "this stack sends no alerts, so there is nothing to silence: write where they go into .env, such as "
                "PIERHEAD_ALERT_WEBHOOK=https://..., and type `pierhead up` (docs/how-to/alerts.md)"
            )
        return self._silencer


def _urgency(alert: FiringAlert) -> tuple[bool, float]:
    return alert.labels.get("severity") != "critical", -alert.since


def _document(alert: FiringAlert, silenced: SilencedAlerts) -> AlertDocument:
    labels, words = alert.labels, alert.annotations
    return AlertDocument(
        name=labels.get(_RULE, ""),
        service=labels.get(_SERVICE, ""),
        severity=labels.get("severity", ""),
        summary=words.get("summary", ""),
        description=words.get("description", ""),
        runbook=words.get("runbook_url", ""),
        since=alert.since,
        silenced_by=tuple(silenced.get(frozenset(labels.items()), ())),
        labels=labels,
    )


def _silence_document(one: Silence, identity: str = "") -> SilenceDocument:
    rest = {name: value for name, value in one.labels.items() if name not in (_RULE, _SERVICE)}
    others = ", ".join([*(f"{name}={value}" for name, value in rest.items()), *filter(None, [one.others])])
    return SilenceDocument(
        id=identity or one.id,
        alert=one.labels.get(_RULE, ""),
        service=one.labels.get(_SERVICE, ""),
        others=others,
        by=one.by,
        why=one.why,
        starts_at=one.starts_at,
        ends_at=one.ends_at,
    )
