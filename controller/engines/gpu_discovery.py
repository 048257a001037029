"""Finds this machine's GPUs: from the engine's list, else from CDI files, else by `nvidia-smi` in a separate container.

The same `nvidia-smi` reports the GPUs' memory in use. With CDI its container receives the GPUs by CDI, which also
mounts the program.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker.errors
import requests

from .gpus import (
    GpuInventory,
    described,
    discovered_devices,
    inventory_of_names,
    inventory_of_report,
    merge_cdi,
    parse_cdi_spec,
)
from .smi import COMMAND, SmiDevice, parse_report

if TYPE_CHECKING:
    from docker import APIClient


_log = logging.getLogger(__name__)

PROBE_LABEL, PROBE_VALUE = "pierhead.probe", "gpu"
_INFO_PERIOD_S = 30.0
# A probe needs a container and blocks observation for seconds; a GPU added without CDI is found after this time.
_PROBE_PERIOD_S = 3600.0
_PROBE_RETRY_S = 60.0
_PROBE_TIMEOUT_S = 30
# A probe container that is older than this was left behind.
_PROBE_ABANDONED_S = 120.0
_LONGEST_REPORT = 200_000  # lines; a GPU has some hundred
_LARGEST_CDI_FILE = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class GpuSources:
    """Where to look: kind of the CDI devices, directories of CDI files (rising priority), image of the probe."""

    cdi_kind: str = "nvidia.com/gpu"
    cdi_directories: Sequence[Path] = (Path("/etc/cdi"), Path("/var/run/cdi"))
    probe_image: str | None = "pierhead/controller"
    """An image with glibc that is on this machine, such as the controller's own; None = never probe."""


def read_cdi_files(sources: GpuSources, warn: Callable[[str], None]) -> dict[str, str]:
    """Name -> fingerprint of every usable device of the kind. A malformed file is ignored with a warning."""
    devices, warnings = merge_cdi([_read_directory(each, sources.cdi_kind, warn) for each in sources.cdi_directories])
    for warning in warnings:
        warn(warning)
    return devices


def _read_directory(directory: Path, kind: str, warn: Callable[[str], None]) -> dict[str, Mapping[str, str]]:
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix in {".yaml", ".json"})
    except FileNotFoundError:
        return {}
    except OSError as error:
        warn(f"CDI directory {directory} cannot be read: {error}; mount it read-only into the controller")
        return {}
    return {str(path): _read_file(path, kind, warn) for path in paths}


def _read_file(path: Path, kind: str, warn: Callable[[str], None]) -> Mapping[str, str]:
    try:
        if (size := path.stat().st_size) > _LARGEST_CDI_FILE:
            raise ValueError(f"{size} bytes is too large for a CDI file")  # noqa: TRY301
        return parse_cdi_spec(path.read_text(encoding="utf-8"), kind, is_json=path.suffix == ".json")
    except (OSError, ValueError) as error:
        warn(f"CDI file {path} is ignored: {error}; correct it or remove it")
        return {}


class GpuDiscovery:
    """Answers `inventory()` from a cache of 30 s. Blocking calls: `inventory` from one worker thread at a time, and
    `used_memory` from another."""

    def __init__(
        self,
        client: APIClient,
        sources: GpuSources,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._sources = sources
        self._monotonic = monotonic
        self._clock = clock
        self._listed: GpuInventory | None = GpuInventory()
        """The GPUs listed by the engine or CDI files; None where only nvidia-smi can list them."""
        self._info_due = float("-inf")
        self._report: tuple[SmiDevice, ...] = ()
        self._probe_due = float("-inf")
        self._probing = threading.Lock()
        self._last_probe = ""
        """The container id of the last probe, usually removed by now."""
        self._warned: dict[str, None] = {}

    def inventory(self) -> GpuInventory:
        """The GPUs that the engine can assign now. Raises docker-py's errors when the engine does not answer."""
        now = self._monotonic()
        if now >= self._info_due:
            self._listed = self._look(self._client.info())
            self._info_due = now + _INFO_PERIOD_S
        if self._listed is None:
            return inventory_of_report(self._report)
        return described(self._listed, self._report)

    def used_memory(self) -> dict[str, int]:
        """Bytes in use, by UUID, of every GPU that reports them. It runs a container for one or two seconds.

        Raises docker-py's errors, and ValueError with the output of `nvidia-smi` when it fails.
        """
        image = self._sources.probe_image
        if image is None:
            raise ValueError("there is no image to run nvidia-smi in")
        self._report = parse_report(self._run_probe(self._probe_body(image, self._listed)))
        return {device.uuid: device.used_bytes for device in self._report if device.used_bytes is not None}

    def warn_once(self, message: str) -> None:
        """Log a warning once; the same check runs again every 30 s."""
        if message not in self._warned:
            self._warned[message] = None
            if len(self._warned) > 256:
                self._warned.pop(next(iter(self._warned)))
            _log.warning(message)

    def _look(self, info: Mapping[str, Any]) -> GpuInventory | None:
        fingerprints = read_cdi_files(self._sources, self.warn_once)
        listed = discovered_devices(info, self._sources.cdi_kind)
        if listed:
            return inventory_of_names(listed, fingerprints)
        if fingerprints:
            # Engines that report no CDI directories are older than version 25 and do not support CDI.
            if info.get("CDISpecDirs"):
                return inventory_of_names(fingerprints, fingerprints)
            self.warn_once(
                f"CDI files describe {len(fingerprints)} devices of kind {self._sources.cdi_kind}, but CDI is off in "
                'the Docker Engine: put {"features": {"cdi": true}} into /etc/docker/daemon.json and restart it'
            )
        if "nvidia" in (info.get("Runtimes") or {}):
            self._probe()
            return None
        return GpuInventory()

    # ------------------------------------------------------------------------------------------------------- probe

    def _probe(self) -> None:
        """Run `nvidia-smi` in a container. The last good report stays while a new one is not due or fails."""
        if self._sources.probe_image is None or self._monotonic() < self._probe_due:
            return
        self._probe_due = self._monotonic() + _PROBE_RETRY_S
        try:
            self._report = parse_report(self._run_probe(self._probe_body(self._sources.probe_image, None)))
        except (requests.RequestException, ValueError) as error:
            detail = getattr(error, "explanation", None) or error
            self.warn_once(
                f"GPUs cannot be listed with nvidia-smi in image {self._sources.probe_image}: {detail}; "
                "check `docker run --rm --runtime nvidia -e NVIDIA_VISIBLE_DEVICES=all IMAGE nvidia-smi`"
            )
        else:
            self._probe_due = self._monotonic() + _PROBE_PERIOD_S

    def _probe_body(self, image: str, listed: GpuInventory | None) -> dict[str, Any]:
        """The create body of a container with the GPUs listed by CDI, or with all GPUs through the nvidia runtime."""
        host: dict[str, Any] = {"NetworkMode": "none"}
        environment = []
        if listed is None:
            host["Runtime"] = "nvidia"
            environment = ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=utility"]
        else:
            devices = [f"{self._sources.cdi_kind}={gpu.uuid}" for gpu in listed.gpus]
            host["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": devices}]
        return {
            "Image": image,
            "Entrypoint": ["sh", "-c", COMMAND],
            "Cmd": [],
            "Env": environment,
            "Labels": {PROBE_LABEL: PROBE_VALUE},
            "HostConfig": host,
        }

    def _run_probe(self, body: Mapping[str, Any]) -> str:
        with self._probing:
            self._remove_old_probes()
            container = self._client.create_container_from_config(body)["Id"]  # type: ignore[no-untyped-call]
            self._last_probe = container
            try:
                self._client.start(container)
                code = self._client.wait(container, timeout=_PROBE_TIMEOUT_S)["StatusCode"]
                output = self._client.logs(container, tail=_LONGEST_REPORT).decode(errors="replace")
            finally:
                self._remove_probe(container)
        if code != 0:
            raise ValueError(f"nvidia-smi ended with exit code {code}: {' '.join(output.split())[-500:]}")
        return str(output)

    def _remove_probe(self, container: str) -> None:
        with contextlib.suppress(docker.errors.NotFound):  # a `docker container prune` removed it already
            self._client.remove_container(container, force=True, v=True)

    def _remove_old_probes(self) -> None:
        """Remove probes that a killed controller left behind. A recent probe may belong to another stack and stays.

        On a faulty GPU `nvidia-smi` may hang so that no signal ends it. Raises docker-py's errors if an old probe
        cannot be removed: a new probe would hang as well, and each try would add one.
        """
        for left in self._client.containers(all=True, filters={"label": f"{PROBE_LABEL}={PROBE_VALUE}"}):
            if left["Id"] == self._last_probe or self._clock() - left.get("Created", 0) >= _PROBE_ABANDONED_S:
                self._remove_probe(left["Id"])
