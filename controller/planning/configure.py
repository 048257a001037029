"""Replicas that were given another user_config than they shall have get it, without a restart."""

from __future__ import annotations

from controller.model import GiveUserConfig, socket_address
from controller.planning.draft import Draft
from controller.planning.outlook import ServiceOutlook
from controller.user_config import digest, is_due, wanted_in


def configure(draft: Draft, outlook: ServiceOutlook) -> None:
    """Give those their user_config who are there to stay and have another one."""
    spec = outlook.spec
    for replica in outlook.alive():
        container = replica.container
        text = None if spec is None else wanted_in(container, spec, outlook.goal)
        if spec is None or text is None or replica.busy or container.ip is None or not is_due(container, text):
            continue
        former = container.user_config.wanted if container.user_config else "none"
        port = spec.probe.port if container.probe is None else container.probe[0]
        draft.add(
            GiveUserConfig(
                target=replica.name,
                service=outlook.name,
                container_id=container.id,
                address=socket_address(container.ip, port),
                text=text,
                cause=f"it was given {former}, and shall have {digest(text)}; no restart",
            )
        )
