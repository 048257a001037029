"""The operations behind the REST API: scaling, rollouts, language models, marks on GPUs, logs. Each change of what is
wanted wakes the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from ..desired.deployer import Deployer
from ..engines.base import NO_MARKS, ClusterEngine
from ..errors import ControllerError, InvalidRequest, NoReadyReplica, SpecError, UnknownService
from ..files.watch import SpecWatch
from ..model.desired import Revision
from ..model.phases import is_ready, phase_of
from ..model.spec import ServiceSpec
from ..model.text import counted
from ..model.world import service_address
from ..observe.gpu_marks import GpuMarks
from ..observe.snapshot import Observer
from ..status.records import changes
from ..storage.events import EventLog
from ..storage.store import Override, StateStore
from .alerts import AlertCommands
from .backup import BackupCommands
from .keys import KeyCommands
from .llm_replicas import LLMReplica, OperateReplica
from .nodes import NodeCommands


@dataclass(eq=False)
class Commands:
    """Each command checks its arguments, changes the store and wakes the loop, which carries the change out.

    `look_again` returns when the loop has seen the whole world once more. `clock` is the loop's.
    """

    _store: StateStore
    _events: EventLog
    _specs: SpecWatch
    _deployer: Deployer
    _engine: ClusterEngine
    _observer: Observer
    _gpu_marks: GpuMarks
    _operate: OperateReplica
    _wake: Callable[[], None]
    _look_again: Callable[[], Awaitable[None]]
    nodes: NodeCommands
    keys: KeyCommands
    alerts: AlertCommands
    backups: BackupCommands
    _clock: Callable[[], float]

    async def stored(self) -> None:
        """Return when the changes so far are stored. Raises StoreError."""
        await self._store.stored()

    # ---------------------------------------------------------------------------------------------------------- scale

    def scale(self, service: str, replicas: int | None) -> str:
        """Set a service's target; with None the files or the autoscaler decide again.

        Returns in words what decides now, "" where it is the number itself. Raises UnknownService, SpecError,
        StoreError.
        """
        spec = self._specs.known(service).services[service]
        before = self._store.overrides.get(service)
        was = self._target(spec)
        if replicas is None or (replicas == spec.replicas and spec.autoscale is None):
            if before is not None:
                self._store.overrides.drop(service)
        elif before is None or before.replicas != replicas:
            self._store.overrides.put(service, Override(replicas, spec.replicas))
        words = scale_words(spec, replicas)
        asked = spec.replicas if replicas is None and spec.autoscale is None else replicas
        if asked is not None and asked != was:
            message = f"{service}: {was} -> {asked} replicas" + (f"; {words}" if words else "")
            self._events.record("scale", message, service=service, outcome="ok")
        elif words and replicas != (before.replicas if before else None):
            self._events.record("scale", f"{service}: {words}", service=service, outcome="ok")
        self._wake()
        return words

    def _target(self, spec: ServiceSpec) -> int:
        """How many replicas the service is to have now."""
        override = self._store.overrides.get(spec.name)
        if override is not None:
            return override.replicas
        return self._store.autoscaled.get(spec.name, spec.replicas) if spec.autoscale else spec.replicas

    # ------------------------------------------------------------------------------------------------------- rollouts

    async def deploy(self, services: Sequence[str] | None, *, is_watched: bool = True) -> Mapping[str, str]:
        """Roll out the current files and images, for all services or these; return a sentence for each.

        Without `is_watched` no version bakes. Files and images are read again first, so an edit just before counts.
        Raises UnknownService, SpecError, StoreError, ControllerError (the loop does not look), EngineUnreachable.
        """
        await self._read_files()
        return await self._roll_out(services, is_watched=is_watched)

    async def _read_files(self) -> None:
        await self._specs.read_again()
        if self._specs.problems:
            raise SpecError(self._specs.problems)

    async def _roll_out(self, services: Sequence[str] | None, *, is_watched: bool) -> Mapping[str, str]:
        await self._look_again()
        names = sorted(self._specs.known_spec().services) if services is None else services
        for name in names:
            self._specs.known(name)
        sentences = self._deployer.deploy(names, self._clock(), is_watched=is_watched)
        self._wake()
        return sentences

    async def restart(self, service: str) -> str:
        """Replace every replica by one of the same definition, as in a rollout that does not bake.

        Raises InvalidRequest where another version than the files' runs, and what `deploy` raises.
        """
        self._specs.known(service)
        await self._read_files()
        row = self._deployer.directions.rows.get(service)
        if row is None or row.state.rollout is not None or row.state.stable != row.offered:
            raise InvalidRequest(
                f"{service}: it does not run the version of the files, or not alone, so it is not restarted; "
                f"`pierhead deploy {service}` rolls that version out"
            )
        restarts = self._store.restarts
        before = restarts.get(service)
        restarts.put(service, f"{self._clock():.3f}")
        try:
            sentences = await self._roll_out([service], is_watched=False)
        except ControllerError:  # it says that nothing was changed
            if before is None:
                restarts.drop(service)
            else:
                restarts.put(service, before)
            raise
        return f"its replicas are replaced: {sentences[service]}"

    async def roll_back(self, service: str, to: str | None) -> str:
        """Go back to an earlier version. Raises UnknownService, InvalidRequest, SpecError, StoreError, EngineError."""
        self._specs.known(service)
        await self._refuse_lost_version(service, to)
        return self._woken(self._deployer.roll_back(service, to, self._clock()))

    async def _refuse_lost_version(self, service: str, to: str | None) -> None:
        """Raise InvalidRequest if the image of the version to go back to is no longer on this machine."""
        version = self._deployer.way_back(service, to)
        here: dict[str, bool] = {}
        for revision in self._deployer.revisions(service) if version is not None else ():
            here[revision.version] = await self._engine.has_image(revision.image_id)
        if version is None or here.get(version, True):
            return
        stable = self._deployer.state(service).stable
        others = [other for other, is_here in here.items() if is_here and other != stable]
        raise InvalidRequest(
            f"{service}: the image of version {version} is not on this machine any more (`docker image prune` "
            "removes such images), so it cannot be restored, and nothing was changed; versions that can be: "
            f"{', '.join(others) or 'none'}. Or build its code again, and `pierhead deploy {service}`"
        )

    def abort(self, service: str) -> str:
        """End a rollout. Raises UnknownService, InvalidRequest, SpecError, StoreError."""
        self._specs.known(service)
        return self._woken(self._deployer.abort(service, self._clock()))

    def promote(self, service: str) -> str:
        """End the watch over a new version's first replicas. Raises as `abort` does."""
        self._specs.known(service)
        return self._woken(self._deployer.promote(service, self._clock()))

    def revisions(self, service: str) -> tuple[list[Revision], str | None, str | None]:
        """(versions that a service can go back to, the wanted version, the stable version). Raises as `known` does."""
        self._specs.known(service)
        deployer = self._deployer
        return deployer.revisions(service), deployer.wanted(service), deployer.state(service).stable

    def _woken(self, sentence: str) -> str:
        self._wake()
        return sentence

    # ------------------------------------------------------------------------------------------------ language models

    async def operate(self, service: str, wanted: changes.Operate) -> tuple[changes.ReplicaOperated, ...]:
        """Ask every ready replica of a language model at once; return all answers, also those of replicas that failed.

        Raises UnknownService, SpecError, InvalidRequest (it is no language model), NoReadyReplica.
        """
        spec = self._specs.known(service).services[service]
        if spec.protocol != "grpc":
            raise InvalidRequest(
                f"{service} is no language model: it speaks {spec.protocol}; `pierhead status` names all"
            )
        ready = self._ready_replicas(spec)
        if not ready:
            verb = wanted.operation.replace("_", "-")
            raise NoReadyReplica(f"{service} has no ready replica to {verb}; `pierhead why {service}` says why")
        return tuple(await asyncio.gather(*(self._operate(replica, wanted) for replica in ready)))

    def _ready_replicas(self, spec: ServiceSpec) -> list[LLMReplica]:
        seen, now = self._observer.latest, self._clock()
        return [
            LLMReplica(container.name, address, self._store.token_of(container.name))
            for container in seen.containers_of(spec.name)
            if is_ready(container, phase_of(container, spec, seen.retirements.get(container.id), now)[0])
            and (address := service_address(container, spec))
        ]

    # ----------------------------------------------------------------------------------------------------------- GPUs

    def mark_gpu(self, uuid: str, reason: str) -> None:
        """Place no more replicas on a GPU; replicas that run there stay. Raises InvalidRequest, StoreError."""
        if self._engine.places != "ours":
            node = next((gpu.node for gpu in self._observer.latest.gpus if gpu.uuid == uuid), "NODE")
            raise InvalidRequest(f"{uuid} {NO_MARKS.format(node=node)}")
        known = [*(gpu.uuid for gpu in self._observer.latest.gpus), *self._store.gpu_faults]
        if uuid not in known:
            raise InvalidRequest(f"there is no GPU {uuid!r}; this machine has {', '.join(known) or 'none'}")
        self._gpu_marks.mark(uuid, reason, self._clock())

    def unmark_gpu(self, uuid: str) -> None:
        """Use a GPU again. Raises InvalidRequest (it has no mark), StoreError."""
        self._gpu_marks.unmark(uuid)

    # ----------------------------------------------------------------------------------------------------------- logs

    async def logs(
        self, service: str, tail: int, after: float | None = None, replica: str | None = None
    ) -> Mapping[str, str]:
        """Return the last `tail` lines of each replica, with their times, by its name; `after`: since that unix time;
        `replica`: only of this one.

        Raises UnknownService, EngineError.
        """
        mine = self._observer.latest.containers_of(service)
        if not mine:
            try:
                self._specs.known(service)
            except UnknownService as error:
                raise UnknownService(f"{error}. Of any other service: docker compose logs {service}") from None
        mine = tuple(one for one in mine if replica in (None, one.name))
        texts = await asyncio.gather(*(self._engine.logs(one.id, tail, after, timed=True) for one in mine))
        return {container.name: text for container, text in zip(mine, texts, strict=True)}


def scale_words(spec: ServiceSpec, replicas: int | None) -> str:
    """Return what decides how many replicas a service has after a scale call; "" where it is the number itself."""
    if spec.autoscale is None:
        return f"the compose files decide, {counted(spec.replicas, 'replica')}" if replicas is None else ""
    bounds = f"{spec.autoscale.min} to {spec.autoscale.max}"
    if replicas is None:
        return f"the autoscaler decides, {bounds}"
    return f"the autoscaler ({bounds}) pauses until `pierhead scale {spec.name} auto`"
