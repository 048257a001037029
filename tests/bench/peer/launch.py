"""Serves one of the peer's applications until it is stopped: `python -m tests.bench.peer.launch echo --port 18000`.

Run by the peer's own interpreter, under tests/bench/keeper.py: Ray leaves daemons behind. Prints "ready" when the
application answers. Ray's dashboard is off (it would only cost the peer); everything else is as `serve run` has it.
"""

from __future__ import annotations

import argparse
import importlib
import signal

import ray
from ray import serve

OBJECT_STORE_BYTES = {"tensors": 4 * 1024**3}
"""Nothing of the other applications goes through the object store; the default takes 30 % of the machine's memory."""

ACTOR_SLOTS = 64
"""Ray counts a CPU for each replica when it places them. Not a limit of what they may use."""


def main() -> None:
    """Start a local Ray, run the application, sleep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("application", choices=["echo", "dlrm", "llm", "tensors"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--directory", required=True, help="Ray's files; a short path, it holds sockets")
    arguments = parser.parse_args()
    ray.init(
        num_cpus=ACTOR_SLOTS,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES.get(arguments.application, 256 * 1024**2),
        _temp_dir=arguments.directory,
        log_to_driver=False,
    )
    serve.start(http_options={"host": "0.0.0.0", "port": arguments.port})  # another network namespace asks, too
    module = importlib.import_module(f"tests.bench.peer.{arguments.application}")
    serve.run(module.application, route_prefix="/")
    print("ready", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
