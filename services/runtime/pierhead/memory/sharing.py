"""What a call does with its messages, at both ends: shared content goes to the other side, or becomes bytes."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any, TypeVar

from pierhead.errors import ContentGone
from pierhead.memory import process
from pierhead.memory.link import Link
from pierhead.memory.pool import Region
from pierhead.memory.process import Memory
from pierhead.memory.scope import AnyScope, Scope
from pierhead.memory.walk import shared_tensors
from pierhead.tensor.v1.tensor_pb2 import SharedContent

M = TypeVar("M")

KEPT_ITEMS = 4
"""How many items of a stream keep their content after they were sent: until then a message can be sent again."""

LINK_KEY = "pierhead-memory"
"""The metadata key of a plain gRPC call: the link that its reply may go by, in hex."""


class Sharing:
    """One call, at one of its ends. At the caller it lives as long as the call can receive anything."""

    __slots__ = ("_link", "_memory", "_named", "_number", "_recent", "many_in", "scope", "weight")

    def __init__(
        self,
        memory: Memory,
        link: Link | None,
        scope: AnyScope | None,
        *,
        many_in: bool,
        many_out: bool,
        number: int = 0,
    ) -> None:
        self._memory = memory
        self._link = link
        self.scope = scope
        """The request that received content belongs to."""
        self.many_in = many_in
        self._recent: deque[tuple[bytes, int]] | None = deque() if many_out else None
        """Of a stream of messages: the content sent last."""
        self.weight = 0
        """Bytes in shared memory that the message converted last names."""
        self._number = number
        self._named: list[tuple[Region, int]] = []
        """At the caller: the content that its request names."""

    def __del__(self) -> None:
        if self._number and self._link is not None:
            self._link.over(self._number)
            if self._named:
                self._memory.over(self._named)

    def end(self) -> None:
        """At the replica: the request has ended."""
        if self.scope is not None:
            with self._memory.lock:
                for part in self.scope.parts():
                    part.end()

    # ---- messages

    def outgoing(self, message: M) -> M:
        """The message as the other side can read it: itself, or a changed copy. Raises ContentGone."""
        self.weight = 0
        found = shared_tensors(message)
        if not found:
            return message
        moves = [self._move(tensor.shared) for tensor in found]
        if all(move is None for move in moves):
            return message
        changed: Any = type(message)()
        changed.CopyFrom(message)
        for tensor, move in zip(shared_tensors(changed), moves, strict=True):
            if isinstance(move, bytes):
                tensor.ClearField("shared")
                tensor.data = move
            elif move is not None:
                # Field by field: the message may be of a descriptor pool of its own.
                shared = tensor.shared
                shared.region, shared.generation, shared.length = move.region, move.generation, move.length
        return changed  # type: ignore[no-any-return]

    def incoming(self, message: M) -> M:
        """The received message, whose content stays for as long as its request. Raises ContentGone.

        A caller outside of any request gets the bytes: nothing says when it has read them.
        """
        found = shared_tensors(message)
        if not found:
            return message
        if self._link is None:
            raise ContentGone("a tensor in shared memory came from a process with which none is shared")
        with self._memory.lock:
            names = [tensor.shared for tensor in found]
            contents = [self._link.claim(each.region, each.generation, each.length) for each in names]
            parts = tuple(self.scope.parts()) if self.scope is not None else ()
            for content in contents if parts else ():
                content.once = parts if self.many_in else ()
                for part in parts:
                    part.keep(content, lambda: None)
        if not parts:
            for tensor, content in zip(found, contents, strict=True):
                tensor.ClearField("shared")
                tensor.data = bytes(content.view())
        return message

    def _move(self, shared: SharedContent) -> SharedContent | bytes | None:
        """How content gets to the other side: None = unchanged, else by a copy in another region, or as bytes."""
        memory, link = self._memory, self._link
        content = memory.content(shared)
        with memory.lock:
            own = memory.pool.filled(shared.region, shared.generation)
            if link is None or not link.open:
                memory.count("elsewhere")
                return bytes(content.view())
            if own is not None:
                memory.learn(own, link)
                if memory.pool.bind(own, link.destination) and link.introduce(own):
                    self._sent(own, shared.length, "shared")
                    return None
            other = memory.take(shared.length, link.destination)
        if other is None:
            return bytes(content.view())
        other.memory.view(shared.length)[:] = content.view()
        with memory.lock:
            introduced = link.introduce(other)
            if introduced:
                self._sent(other, shared.length, "copied")
            memory.pool.let_go(other.name, other.generation, time.monotonic())
        if not introduced:
            return bytes(content.view())
        return SharedContent(region=other.name, generation=other.generation, length=shared.length)

    def _sent(self, region: Region, length: int, way: str) -> None:
        memory, link = self._memory, self._link
        memory.pool.sent(region, link)
        memory.count(way, length)
        self.weight += length
        key = (region.name, region.generation)
        if self._number:
            region.calls += 1
            self._named.append((region, region.generation))
        if self._recent is not None and key not in self._recent:
            self._recent.append(key)
            if len(self._recent) > KEPT_ITEMS:
                memory.pool.let_go(*self._recent.popleft(), time.monotonic(), all_holds=True)


def serving(token: bytes, *, many_in: bool, many_out: bool) -> Sharing:
    """The sharing of a call that is served, whose caller's link has that token. Only where `process.MEMORY` is set.

    Its `scope` has to be set in the call's context, and `end` to be called at the call's end.
    """
    memory = process.MEMORY
    assert memory is not None  # noqa: S101
    link = memory.links.get(token)
    return Sharing(memory, link, Scope(link), many_in=many_in, many_out=many_out)


def around(sharing: Sharing, method: M) -> M:
    """A served method that passes its messages through `sharing`."""
    decode, encode = method.decode, method.encode  # type: ignore[attr-defined]
    return dataclasses.replace(  # type: ignore[type-var]
        method,
        decode=lambda raw: sharing.incoming(decode(raw)),
        encode=lambda message: encode(sharing.outgoing(message)),
    )
