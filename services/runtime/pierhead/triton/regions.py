"""The memory that one server has mapped for one connection: docs/decisions/triton-shared-memory.md."""

from __future__ import annotations

from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from pierhead.triton.cuda import CudaRegion, DeviceArray
from pierhead.triton.owner import Owner
from pierhead.triton.registrations import Registrations
from pierhead.triton.system_regions import SystemRegions


class TritonRegions:
    """Belongs to the connection's event loop."""

    def __init__(self, channel: grpc.aio.Channel, directory: str) -> None:
        """`directory`: "" = there is none, and nothing may be taken from `system`."""
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._owner = Owner(directory)
        self._registrations = Registrations()
        self.system = SystemRegions(self._stub, self._owner, self._registrations)

    def register(self, array: DeviceArray) -> CudaRegion:
        """Begin to register the allocation of an array, for one call."""
        region = CudaRegion(self._stub, self._owner.new_name(), array)
        self._registrations.add(region.name, region.unregister)
        return region

    def release(self, region: CudaRegion) -> None:
        """The call has ended, in whatever way."""
        self._registrations.remove(region.name)

    async def close(self) -> None:
        """Have the server let go of everything that it does not read for long, and remove the owner's file."""
        self.system.lost()
        await self._registrations.close()
        self._owner.release()
