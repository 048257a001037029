"""The controller's daemon with shorter times. It is known by what its command line ends with: write that as ever."""

import runpy

from controller.engines import gpu_discovery
from controller.observe import gpu_faults, snapshot

gpu_discovery._INFO_PERIOD_S = 1.0
gpu_faults.GONE_AFTER_S = 4.0
snapshot.RELIABLE_S = 1.0
runpy.run_module("controller", run_name="__main__")
