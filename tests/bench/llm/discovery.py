"""The controller's Discovery with one service that does not change: `python -m tests.bench.llm.discovery --help`."""

from __future__ import annotations

import argparse
import asyncio

from pierhead.discovery.served import DiscoveryServer, DiscoveryState
from pierhead.discovery.v1.discovery_pb2 import Endpoint, ServiceEndpoints


async def serve(port: int, service: str, policy: str, addresses: list[str], most: int) -> None:
    """Answer all callers, until it is ended."""
    discovery_state = DiscoveryState()
    listed = [
        Endpoint(
            replica=f"{service}-{number}",
            address=address,
            state=Endpoint.READY,
            max_ongoing_requests=most,
            version="1",
            weight=1,
        )
        for number, address in enumerate(addresses)
    ]
    discovery_state.publish({service: ServiceEndpoints(endpoints=listed, policy=policy, max_queued_requests=-1)})
    server = DiscoveryServer(discovery_state, "127.0.0.1", port)
    await server.start()
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("addresses", nargs="+", help="ip:port of each replica")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--service", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--max-ongoing-requests", type=int, required=True)
    a = parser.parse_args()
    asyncio.run(serve(a.port, a.service, a.policy, a.addresses, a.max_ongoing_requests))


if __name__ == "__main__":
    main()
