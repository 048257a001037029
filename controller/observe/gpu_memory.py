"""Reads the memory in use of the GPUs: when a start waits for it, and once a minute for the status.

Reading takes a container that runs `nvidia-smi`, so it runs outside the loop and wakes the loop at its end. A reading
from before a holder of a GPU ended, or fell asleep, is outdated, and the next one is awaited. Where nothing can be read
(CDI without a driver), replicas are placed only by the GPUs that containers hold, and status says so. Where the engine
places by itself, nothing depends on the reading, and there is none.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

from ..engines.base import ClusterEngine
from ..errors import EngineError
from ..model.observed import Observed
from ..model.plan import Plan
from ..model.spec import Spec
from ..model.world import GpuReading
from ..outlive import Background

logger = logging.getLogger(__name__)

WAITING_S = 5.0
"""Between two readings while a start waits for memory that is in use."""
RESTING_S = 60.0
"""The same while nothing waits: status and metrics may be that old."""
RETRY_S = 30.0
"""Pause after a reading that failed, if an earlier one succeeded."""
HOPELESS_S = 300.0
"""The same if none has succeeded: there is probably no nvidia-smi."""

AWAITED = GpuReading(at=-math.inf)


@dataclass(eq=False)
class GpuMemoryWatch:
    """Keeps the last reading. The loop calls `seen` and `refresh`."""

    _engine: ClusterEngine
    _background: Background

    def __post_init__(self) -> None:
        self._reading: GpuReading | None = AWAITED if self._engine.places == "ours" else None
        self._begun = -math.inf
        self._running = False
        self._worked = False
        self._holders: frozenset[str] = frozenset()
        self._changed_at = -math.inf
        self.problem = ""
        """Why nothing can be read, in words; "" when it can, or was not tried."""

    def seen(self, observed: Observed) -> Observed:
        """Return the snapshot with the last reading, unless that one is outdated."""
        holders = frozenset(
            c.id for c in observed.containers if c.gpus and c.state.is_up and c.id not in observed.asleep
        )
        holders |= {f"{uuid} {name}" for uuid, name in observed.foreign_gpu_holders.items()}
        if self._holders - holders:
            self._changed_at = self._background.clock()
        self._holders = holders
        return replace(observed, gpu_reading=self._current())

    def refresh(self, spec: Spec, observed: Observed, plan: Plan) -> None:
        """Begin a reading if one is due; none is while no service asks for GPUs or there are none."""
        if self._engine.places != "ours" or self._running:
            return
        if not observed.gpus or not any(service.gpu for service in spec.services.values()):
            return
        if self.problem:
            pause_s = RETRY_S if self._worked else HOPELESS_S
        elif plan.awaits_gpu_memory:
            pause_s = 0.0 if self._current() is AWAITED else WAITING_S
        else:
            pause_s = RESTING_S
        if self._background.clock() - self._begun >= pause_s:
            self._running = True
            self._background.spawn(self._read())

    def _current(self) -> GpuReading | None:
        outdated = self._reading is not None and self._reading.at < self._changed_at
        return AWAITED if outdated else self._reading

    async def _read(self) -> None:
        self._begun = self._background.clock()
        try:
            used = await self._engine.used_gpu_memory()
        except EngineError as error:
            self._fail(str(error))
        except Exception as error:
            # A defect that shows on one machine must not end the controller: it places replicas without the reading.
            self._fail(
                f"internal: reading the memory of the GPUs raised {type(error).__name__}: {error}", exc_info=True
            )
        else:
            self._reading, self.problem, self._worked = GpuReading(self._begun, used), "", True
        finally:
            self._running = False
        self._background.wake()

    def _fail(self, problem: str, *, exc_info: bool = False) -> None:
        if problem != self.problem:
            logger.log(logging.ERROR if exc_info else logging.WARNING, "%s", problem, exc_info=exc_info)
        self._reading, self.problem = None, problem
