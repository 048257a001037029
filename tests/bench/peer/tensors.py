"""The peer's tensors: an ingress sends NumPy arrays to a child, which reads every byte and answers with a new one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

api = FastAPI()


@serve.deployment
class Child:
    """The same work as our callee's: tests/bench/shared_memory.py."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.uint8)

    async def echo(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self._room.size != array.size:
            self._room = np.empty_like(array)
        np.add(array, 1, out=self._room)
        return self._room


@serve.deployment
@serve.ingress(api)
class Ingress:
    """Makes the calls, and says how long each took."""

    def __init__(self, child: DeploymentHandle) -> None:
        self._children = {store: child.options(_by_reference=store) for store in (True, False)}

    @api.get("/round")
    async def round(self, size: int, calls: int, store: bool = True) -> list[float]:
        """Seconds of each call. `store`: through the object store, else through its gRPC transport."""
        array, found = np.full(size, 7, np.uint8), []
        for _ in range(calls):
            began = time.perf_counter()
            answer = await self._children[store].echo.remote(array)
            found.append(time.perf_counter() - began)
            if answer[-1] != 8:
                raise RuntimeError("the answer is another tensor")
            del answer
        return found


application = Ingress.bind(Child.bind())  # type: ignore[attr-defined]  # what the decorators add
