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
    """Each address in a body, after the member that has it. Arguments of tools are no parts of messages, and `metadata`
    is free text.
    """
    read = {name: value for name, value in body.items() if name.casefold() != "metadata"}
    waiting: list[tuple[str, str, object]] = [("", "", read)]
    while waiting:
        where, kind, value = waiting.pop()
        if isinstance(value, dict):
            waiting += _members(where, kind, value)
        elif isinstance(value, list):
            kinds = (list, dict, str) if kind else (list, dict)  # a prompt has a million texts or numbers
            found = [(i, each) for i, each in enumerate(value) if isinstance(each, kinds)]
            waiting += [(where if kind else f"{where}[{i}]", kind, each) for i, each in found]
        elif isinstance(value, str) and _is_address(kind, value):
            yield where, value


def _members(where: str, kind: str, value: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
    """The members of an object that an engine may fetch something for: where each is, of which kind, and its value.
    `kind`: the member of media that the object belongs to; "" = none.
    """
    for member, inner in value.items():
        name, path = member.casefold(), f"{where}.{member}" if where else member
        if name in _MEMBERS or name in _CONTENT_OR_ADDRESS:
            yield path, name, inner
        elif kind and name == "url":
            yield where, name if kind == "source" else kind, inner
        elif not where or (name in ("content", "output") and isinstance(inner, list)):
            yield path, "", inner


def _is_address(kind: str, text: str) -> bool:
    if kind in _CONTENT_OR_ADDRESS:
        return ":" in text or "." in text  # else base64
    return kind not in ("", "source")  # the source of a search's result is a title
