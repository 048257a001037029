"""Parses what `nvidia-smi` prints about GPUs and MIG devices. Pure.

Two of its forms are needed: the list (`-L`) has the UUIDs of MIG devices, which the XML of many drivers leaves out; the
XML (`-q -x`) has the memory of each. A MIG device has the same number in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

COMMAND = "nvidia-smi -L && nvidia-smi -q -x"

_GPU_LINE = re.compile(r"GPU (\d+): (.+) \(UUID: (GPU-[^)\s]+)\)")
_MIG_LINE = re.compile(r"MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)\s]+)\)")
_XML = "<?xml"
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SmiDevice:
    """One GPU, or one MIG device (then with the GPU that it is a part of)."""

    uuid: str
    index: str
    """As in CDI and the nvidia driver: "0" for a GPU, "0:1" for a MIG device."""
    name: str = ""
    memory_bytes: int | None = None
    """None where the driver reports none: GPUs that share the host's memory."""
    used_bytes: int | None = None
    parent: str = ""
    divided: bool = False
    """A GPU in MIG mode: only its MIG devices can be used."""


def parse_report(text: str) -> tuple[SmiDevice, ...]:
    """Devices from what `COMMAND` printed, each GPU before its parts. Raises ValueError with what is wrong."""
    listing, found, xml = text.partition(_XML)
    if not found:
        raise ValueError(f"nvidia-smi: expected its list and its XML, found {' '.join(text.split())[-500:]!r}")
    try:
        # The driver's own program prints it, in a container that this controller made: the text can be trusted.
        log = ElementTree.fromstring(found + xml.rstrip())  # noqa: S314
    except ElementTree.ParseError as error:
        raise ValueError(f"nvidia-smi: its XML cannot be read: {error}") from error
    details = {element.findtext("uuid", "").strip(): element for element in log.iter("gpu")}
    return tuple(_devices(listing, details))


def _devices(listing: str, details: Mapping[str, ElementTree.Element]) -> Iterator[SmiDevice]:
    parent = SmiDevice("", "")
    parts: dict[str, ElementTree.Element] = {}
    for line in listing.splitlines():
        if match := _GPU_LINE.search(line):
            element = details.get(match[3])
            divided = _text(element, "mig_mode/current_mig") == "Enabled"
            parent = SmiDevice(match[3], match[1], match[2], *_memory(element), divided=divided)
            entries = [] if element is None else list(element.iter("mig_device"))
            parts = {_text(entry, "index"): entry for entry in entries}
            yield parent
        elif (match := _MIG_LINE.search(line)) and parent.uuid:
            name = f"{parent.name} MIG {match[1]}"
            memory = _memory(parts.get(match[2]))
            yield SmiDevice(match[3], f"{parent.index}:{match[2]}", name, *memory, parent=parent.uuid)


def _memory(element: ElementTree.Element | None) -> tuple[int | None, int | None]:
    """Total and used, in bytes. "Used" leaves out what the driver reserves for itself."""
    return _size(_text(element, "fb_memory_usage/total")), _size(_text(element, "fb_memory_usage/used"))


def _size(text: str) -> int | None:
    number, _, unit = text.partition(" ")
    return int(number) * _MIB if number.isdecimal() and unit == "MiB" else None


def _text(element: ElementTree.Element | None, path: str) -> str:
    return "" if element is None else element.findtext(path, "").strip()
