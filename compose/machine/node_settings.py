"""What a machine of a Docker Swarm needs in its settings. Called by node.sh, with whatever python3 the machine has.

node_settings.py engine FILE OUT [--gpus UUID,...] [--nvidia] [--registry HOST:PORT]
    daemon.json with what a Swarm needs, every other setting as it is. OUT is written where that differs from FILE; the
    answer is how the engine takes it up: "reload", "restart", or nothing.
node_settings.py toolkit FILE OUT
    NVIDIA's config.toml with the variable in which Swarm hands over GPUs. OUT is written where that differs from FILE.
node_settings.py pool [ROUTES]
    A range of addresses for overlay networks that no network of this machine is in.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
import sys
from pathlib import Path
from typing import Any, Callable, NoReturn  # noqa: UP035  (Python 3.8 runs this, too)

GPU_KIND = "NVIDIA-GPU"
SWARM_RESOURCE = f'swarm-resource = "DOCKER_RESOURCE_{GPU_KIND}"'
RESOURCES = "node-generic-resources"
PRIVATE = ("10.0.0.0/8", "100.64.0.0/10")


def engine(source: Path, target: Path, gpus: str, nvidia: bool, registry: str) -> None:
    """See the module. The engine reads its list of resources only when it starts."""
    before = read_settings(source)
    after = {**before, "live-restore": False}
    if gpus:
        others = [one for one in before.get(RESOURCES, []) if not one.startswith(f"{GPU_KIND}=")]
        after[RESOURCES] = [*others, *(f"{GPU_KIND}={uuid}" for uuid in gpus.split(","))]
    if nvidia:
        after["runtimes"] = {"nvidia": {"path": "nvidia-container-runtime"}, **before.get("runtimes", {})}
        after["default-runtime"] = "nvidia"
    if registry:
        known = before.get("insecure-registries", [])
        after["insecure-registries"] = known if registry in known else [*known, registry]
    if after != before:
        target.write_text(json.dumps(after, indent=2) + "\n")
        print("restart" if after.get(RESOURCES) != before.get(RESOURCES) else "reload")


def read_settings(source: Path) -> dict[str, Any]:
    """What the file has; nothing where there is none."""
    text = source.read_text() if source.exists() else ""
    try:
        found = json.loads(text.strip() or "{}")
    except ValueError as error:
        refuse(f"{source} is not JSON ({error}). Correct it and repeat. Nothing was changed.")
    if not isinstance(found, dict):
        refuse(f"{source} holds no settings (an object of JSON). Correct it and repeat. Nothing was changed.")
    return found


def toolkit(source: Path, target: Path) -> None:
    """See the module. The setting belongs to no section, and so stands before the first one."""
    before = source.read_text() if source.exists() else ""
    if SWARM_RESOURCE not in before.splitlines():
        rest = re.sub(r"(?m)^#?[ \t]*swarm-resource[ \t]*=.*\n?", "", before)
        target.write_text(f"{SWARM_RESOURCE}\n{rest}")


def pool(routes: Path) -> None:
    """The largest free block, from the end of the private ranges, as networks tend to be at their beginning."""
    networks = map(destination, routes.read_text().splitlines()[1:])
    taken = [network for network in networks if network.prefixlen]
    for whole in map(ipaddress.IPv4Network, PRIVATE):
        for prefix in range(whole.prefixlen, 17):
            for block in reversed(list(whole.subnets(new_prefix=prefix))):
                if not any(block.overlaps(network) for network in taken):
                    print(block)
                    return
    refuse("the networks of this machine leave no range of addresses free: name one with --address-pool.")


def destination(line: str) -> ipaddress.IPv4Network:
    """Of a line of /proc/net/route, whose numbers are in the machine's own order."""
    fields = line.split()
    address, mask = (int(field, 16).to_bytes(4, sys.byteorder) for field in (fields[1], fields[7]))
    return ipaddress.IPv4Network((address, bin(int.from_bytes(mask, "big")).count("1")))


def refuse(text: str) -> NoReturn:
    """End with that."""
    sys.exit(f"pierhead: {text}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    what = parser.add_subparsers(dest="what", required=True)
    for name in ("engine", "toolkit"):
        files = what.add_parser(name)
        files.add_argument("source", type=Path)
        files.add_argument("target", type=Path)
    what.choices["engine"].add_argument("--gpus", default="")
    what.choices["engine"].add_argument("--nvidia", action="store_true")
    what.choices["engine"].add_argument("--registry", default="")
    what.add_parser("pool").add_argument("routes", type=Path, nargs="?", default=Path("/proc/net/route"))
    given = vars(parser.parse_args())
    program: Callable[..., None] = {"engine": engine, "toolkit": toolkit, "pool": pool}[given.pop("what")]
    program(**given)


if __name__ == "__main__":
    main()
