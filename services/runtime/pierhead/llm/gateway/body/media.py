"""Refuses addresses of images, sound and video that the operator does not allow. Pure.

An engine fetches what a request names, and it does so within the stack's network: an address may be one that the client
itself cannot reach.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from pierhead.llm.gateway.errors import wrong

EVERY_HOST = "*"

_MEMBERS = frozenset({"image_url", "video_url", "audio_url", "file_url", "source"})
"""Of a part of a message: the address, or an object with a member `url`."""

_CONTENT_OR_ADDRESS = frozenset(
    {"image", "images", "audio", "audios", "video", "videos", "ref_audio", "image_data", "audio_data", "video_data"}
)
"""Of a body, or of an object in it: one or more, each an address or the content in base64."""

_URL = re.compile(r"https?://([a-z0-9.-]+)(?::[0-9]+)?(?:[/?#][^\s\\]*)?", re.IGNORECASE)
"""Without a user's name and a backslash: those are read differently by the engines' parsers."""


def refuse_addresses(body: Mapping[str, object], hosts: Collection[str]) -> None:
    """Raise ApiError 400 for an address at a host that is not one of `hosts`."""
    if EVERY_HOST in hosts:
        return
    for param, address in _addresses(body):
        url = _URL.fullmatch(address)
        if address[:5].lower() != "data:" and (url is None or url[1].lower() not in hosts):
            allowed = f", or an address at {', '.join(sorted(hosts))}" if hosts else ""
            raise wrong(param, f"the content itself as a data: URL{allowed}", address, "media_not_allowed")


def _addresses(body: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Each address in a body, after the member that has it. Arguments of tools are no parts of messages."""
    for name, value in body.items():
        if name.casefold() in _CONTENT_OR_ADDRESS:
            yield from ((name, address) for address in _not_base64(value))
    waiting: list[tuple[str, object]] = list(body.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{name}[{i}]", each) for i, each in enumerate(value) if isinstance(each, (list, dict))]
        elif isinstance(value, dict):
            for member, inner in value.items():
                if member in ("content", "output") and isinstance(inner, list):
                    waiting.append((f"{name}.{member}", inner))
                elif member.casefold() in _MEMBERS:
                    yield from ((f"{name}.{member}", address) for address in _urls(member, inner))
                elif member.casefold() in _CONTENT_OR_ADDRESS:
                    yield from ((f"{name}.{member}", address) for address in _not_base64(inner))


def _urls(member: str, value: object) -> list[str]:
    if isinstance(value, dict):
        found = [each for name, each in value.items() if name.casefold() == "url"]
    else:
        found = [] if member == "source" else [value]  # the source of a search's result is a title
    return [each for each in found if isinstance(each, str)]


def _not_base64(value: object) -> list[str]:
    found = [url for each in (value if isinstance(value, list) else [value]) for url in _urls("", each)]
    return [each for each in found if ":" in each or "." in each]
