"""What nobody planned: containers that Compose started itself, servers whose container is gone."""

from __future__ import annotations

from controller.model import RemoveContainer, backend_name
from controller.planning.draft import Draft


def remove_strays(draft: Draft) -> None:
    """Remove what `docker compose up --scale` started: nobody pinned it to a GPU."""
    for stray in sorted(draft.observed.strays, key=lambda stray: stray.name):
        if stray.name in draft.busy or stray.service not in draft.desired.services:
            continue
        cause = f"started by Compose, which pins no GPU: use `make scale SERVICE={stray.service} N=...` instead"
        draft.add(
            RemoveContainer(target=stray.name, service=stray.service, container_id=stray.id, force=True, cause=cause)
        )


def delete_ghost_servers(draft: Draft) -> None:
    """Delete servers of containers that are not there any more."""
    known = {(backend_name(c.service), c.name) for c in draft.observed.containers}
    for server in sorted(draft.servers(), key=lambda server: (server.backend, server.name)):
        if (server.backend, server.name) not in known and server.name not in draft.busy:
            service = server.backend.removeprefix(backend_name(""))
            draft.delete_server(server, service, "no container of that name exists")
