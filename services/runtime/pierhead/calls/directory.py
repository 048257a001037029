"""Finds the replicas of a service: from the controller, else from a fixed list, else from the sockets that are mounted
here, else from Docker's DNS.

One Directory serves a whole process (more exactly, one event loop). With a controller configured, DNS is used until
the first answer, and for services that the controller does not know. While the controller is down, its last list stays
in force.

A call to a service that is set to 0 replicas fails at once with an error that says so. So does a call to a service
that neither the controller, for UNKNOWN_GRACE_S, nor DNS has known; without a controller, where any service is known.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import socket
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

import grpc

from pierhead.calls.absence import Absence, out_of_sight, switched_off, unfound, unknown
from pierhead.calls.replica import Endpoint, ReplicaListing
from pierhead.discovery.v1 import discovery_pb2, discovery_pb2_grpc
from pierhead.routing_stats import Stats
from pierhead.settings import DEFAULT_GRPC_PORT, Settings
from pierhead.store.remote import CONTROLLER_OPTIONS
from pierhead.tasks import end_tasks

logger = logging.getLogger("pierhead")

SOCKETS = Path("/run/pierhead/sockets")
"""Where the sockets of each called service are, in a directory of its name: controller/engines/sockets.py. A name with
a dot is no request's socket."""

Update = Callable[[ReplicaListing], None]

UNKNOWN_GRACE_S = 5.0
"""How long calls wait for a service after the controller has reported it as unknown: services are added to the files,
and started, in any order."""

RECONNECT_S = (0.1, 5.0)
"""Shortest and longest backoff before the next connection to the controller; doubled at each failure, jittered."""

DNS_PERIOD_S = 2.0
DNS_PERIOD_EMPTY_S = 0.25


class Directory:
    """Keeps one list of endpoints per service up to date and passes it to each service's pool."""

    def __init__(self, settings: Settings, rng: random.Random | None = None) -> None:
        self.names: Collection[str] = ()
        self._settings = settings
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._updates: dict[str, list[Update]] = {}
        self._last: dict[str, ReplicaListing] = {}
        self._dns: dict[str, asyncio.Task[None]] = {}
        self._from_controller: set[str] = set()
        self._graces: dict[str, asyncio.TimerHandle] = {}
        """Services that the controller does not know, until calls no longer wait for them."""
        self._known: dict[str, tuple[str, ...]] = {}
        """By a service that the controller does not know: those that it knows."""
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, service: str, update: Update) -> None:
        """Call `update` with the listing of `service`, now and at every change."""
        known = service in self._updates
        self._updates.setdefault(service, []).append(update)
        if service in self._last:
            update(self._last[service])
        if known:
            return
        static = self._settings.static_addresses(service)
        if static:
            self._update(service, _at(static))
            return
        self._start_dns(service)
        if self._settings.discovery:
            # One stream carries all services, so a new service needs a new one; the lists stay.
            if self._watch is not None:
                self._watch.cancel()
            self._watch = self._own(asyncio.get_running_loop().create_task(self._watch_forever(), name="discovery"))
        elif self._names():
            self._graces[service] = asyncio.get_running_loop().call_later(UNKNOWN_GRACE_S, self._stay_unfound, service)

    async def close(self) -> None:
        """End every watcher."""
        for grace in self._graces.values():
            grace.cancel()
        await end_tasks(*self._tasks)

    def _update(self, service: str, listing: ReplicaListing) -> None:
        self._last[service] = listing
        for update in self._updates[service]:
            update(listing)

    def _own(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- the controller

    async def _watch_forever(self) -> None:
        shortest, longest = RECONNECT_S
        pause = shortest
        services = [name for name in self._updates if not self._settings.static_addresses(name)]
        async with grpc.aio.insecure_channel(self._settings.discovery, options=CONTROLLER_OPTIONS) as channel:
            stub = discovery_pb2_grpc.DiscoveryStub(channel)
            request = discovery_pb2.WatchRequest(services=services, watcher=self._settings.replica)
            while True:
                try:
                    # No deadline: the stream lives as long as both sides; keep-alive notices a dead one.
                    async for state in stub.Watch(request):
                        pause = shortest
                        self._apply(state)
                    reason = "it ended the stream"
                except grpc.aio.AioRpcError as error:
                    reason = error.details() or error.code().name
                except Exception as error:
                    # A list that fails must not stop later ones: a frozen list becomes an outage.
                    logger.exception("internal: a list from discovery could not be taken over")
                    reason = repr(error)
                logger.info("discovery at %s: %s; the last lists stay in force", self._settings.discovery, reason)
                await asyncio.sleep(pause * (0.5 + self._rng.random()))
                pause = min(longest, pause * 2)

    def _apply(self, state: discovery_pb2.ServiceEndpoints) -> None:
        """Take over the whole state of one service."""
        if state.service not in self._updates:
            return
        if state.unknown:
            # DNS says nothing about draining or readiness: it never replaces a list from the controller.
            if state.service not in self._from_controller:
                self._start_dns(state.service)
            self._known[state.service] = tuple(state.known_services)
            if state.service not in self._graces:
                grace = asyncio.get_running_loop().call_later(UNKNOWN_GRACE_S, self._stay_unknown, state.service)
                self._graces[state.service] = grace
            return
        found = self._graces.pop(state.service, None)
        if found is not None:
            found.cancel()
        self._from_controller.add(state.service)
        dns = self._dns.pop(state.service, None)
        if dns is not None:
            dns.cancel()
        self._update(state.service, _listing(state))

    def _stay_unknown(self, service: str) -> None:
        """Let calls fail at once for a service that the controller does not know, unless DNS knows it."""
        if service in self._from_controller or service not in self._last:
            absence = unknown(self._known.get(service, ()))
            self._update(service, replace(self._last.get(service, ReplicaListing()), absence=absence))

    def _names(self) -> list[str]:
        """The services that are known without a controller; those of variables as these spell them."""
        return sorted({*self.names, *(self._settings.static or ())})

    def _stay_unfound(self, service: str) -> None:
        """Let calls fail at once for a service that is neither known here nor, by now, to DNS."""
        if service not in self._last:
            self._update(service, ReplicaListing(absence=unfound(self._names())))

    # ---- DNS

    def _start_dns(self, service: str) -> None:
        if service not in self._dns:
            task = asyncio.get_running_loop().create_task(self._resolve_forever(service), name=f"dns {service}")
            self._dns[service] = self._own(task)

    async def _resolve_forever(self, service: str) -> None:
        host, _, port = service.partition(":")
        while True:
            addresses = sockets_of(host) or await resolve(host, int(port) if port else DEFAULT_GRPC_PORT)
            if addresses:
                self._update(service, _at(addresses))
            await asyncio.sleep(DNS_PERIOD_S if addresses else DNS_PERIOD_EMPTY_S)


def _at(addresses: Iterable[str]) -> ReplicaListing:
    """A listing of replicas of which only the addresses are known."""
    return ReplicaListing([Endpoint(name=address, address=address) for address in addresses])


def _listing(state: discovery_pb2.ServiceEndpoints) -> ReplicaListing:
    """A listing as the controller reports it."""
    endpoints = [_endpoint(each) for each in state.endpoints]
    absence: Absence | None = None
    if state.scaled_to_zero_by:
        absence = switched_off(state.scaled_to_zero_by)
    elif endpoints and all(endpoint.out_of_sight for endpoint in endpoints):
        absence = out_of_sight
    return ReplicaListing(
        endpoints=endpoints,
        max_queued_requests=state.max_queued_requests if state.HasField("max_queued_requests") else None,
        policy=state.policy or None,
        policy_kwargs=state.policy_kwargs,
        absence=absence,
    )


def _endpoint(listed: discovery_pb2.Endpoint) -> Endpoint:
    is_seen = _sees(listed.socket)
    return Endpoint(
        name=listed.replica,
        address=listed.socket if is_seen else listed.address,
        draining=listed.state == discovery_pb2.Endpoint.DRAINING,
        max_ongoing_requests=listed.max_ongoing_requests,
        node=listed.node,
        weight=listed.weight or 1,
        stats=Stats(listed.stats_version, dict(listed.stats)) if listed.stats_version else None,
        out_of_sight=bool(listed.socket) and not is_seen,
    )


def _sees(socket: str) -> bool:
    """Whether the directory of a replica's socket is mounted here."""
    directory, _, _ = socket.removeprefix("unix:").rpartition("/")
    return bool(directory) and _is_here(directory)


@functools.cache  # a container's mounts stay, and lists of many replicas come every second
def _is_here(directory: str) -> bool:
    return Path(directory).is_dir()


def sockets_of(service: str) -> list[str]:
    """The sockets of a service's replicas that are mounted here; a replica that is gone may have left its own."""
    try:
        names = sorted(os.listdir(SOCKETS / service))
    except OSError:
        return []
    return [f"unix:{SOCKETS / service / name}" for name in names if "." not in name]


async def resolve(host: str, port: int) -> list[str]:
    """Every "ip:port" that a name resolves to, sorted; empty when it resolves to none. IPv4 where there is any."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: not a host's name, such as a..b
        return []  # unknown name, or no resolver: the caller keeps its list and retries
    four = {f"{address[0]}:{port}" for family, _, _, _, address in found if family == socket.AF_INET}
    six = {f"[{address[0]}]:{port}" for family, _, _, _, address in found if family == socket.AF_INET6}
    return sorted(four or six)
