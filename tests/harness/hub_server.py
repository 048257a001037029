"""A Hugging Face hub on loopback: what huggingface_hub's downloads use of its protocol, and its failures at will."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from aiohttp import web

LFS_BYTES = 4096
"""Files from here on lie at the CDN, as those of Git LFS do."""
_PIECE_BYTES = 64 * 1024


@dataclass
class HubRepository:
    """One model: its files by commit, the names of commits, and who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    token: str = ""
    """Everybody may read where it is empty."""
    gated: bool = False
    """Everybody may list it, and the token's owner read it. Else all of it is hidden from others."""

    def commit(self, files: Mapping[str, bytes], name: str = "main") -> None:
        """A new commit with exactly these files, which gets the name."""
        contents = sorted((file, _digest(content)) for file, content in files.items())
        commit = _digest(repr((contents, len(self.commits))).encode())[:40]
        self.commits[commit] = dict(files)
        self.names[name] = commit

    def at(self, revision: str) -> str | None:
        """The commit of a name or of itself."""
        return self.names.get(revision) or (revision if revision in self.commits else None)


@dataclass(frozen=True)
class HubRequest:
    """What the server was asked for."""

    method: str
    path: str
    begin: int
    """The first byte of a Range."""
    token: str


@dataclass
class HubServer:
    """The hub. `put` and `remove` make it one of the stores that the suite of model sources fills."""

    url: str = ""
    prefix: str = ""
    repositories: dict[str, HubRepository] = field(default_factory=dict)
    asked: list[HubRequest] = field(default_factory=list)
    cuts: list[tuple[int, bool]] = field(default_factory=list)
    """The next bodies of files that are cut: at which byte, and whether by a reset."""
    missing: set[str] = field(default_factory=set)
    """Files that are listed and that the hub does not have."""
    by_xet: bool = False
    """Whether large files are announced as stored by Xet."""
    status: int = 0
    """Another answer than 0 is that to everything."""

    @property
    def variables(self) -> Mapping[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HOME": "/nowhere"}

    def make(self, bucket: str) -> None:
        """Repositories are made by `put`."""

    def put(self, bucket: str, name: str, content: bytes) -> None:
        model, _, file = name.partition("/")
        self._change(f"{bucket}/{model}", {file: content}, "")

    def remove(self, bucket: str, name: str) -> None:
        model, _, file = name.partition("/")
        self._change(f"{bucket}/{model}", {}, file)

    def bodies(self, name: str) -> list[int]:
        """From which byte on a file's content was asked for, each time."""
        return [each.begin for each in self.asked if each.method == "GET" and each.path.endswith(f"/{name}")]

    def works_again(self) -> None:
        """Ends its failures, and forgets what it was asked for."""
        self.status = 0
        self.asked.clear()
        self.cuts.clear()
        self.missing.clear()
        self.by_xet = False

    def _change(self, model: str, files: dict[str, bytes], without: str) -> None:
        repository = self.repositories.setdefault(model, HubRepository())
        now = repository.commits.get(repository.names.get("main", ""), {}) | files
        repository.commit({name: content for name, content in now.items() if name != without})

    # ---- its answers

    async def answer(self, request: web.Request) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        begin = request.http_range.start or 0
        self.asked.append(HubRequest(request.method, request.path, begin, token))
        if self.status:
            return web.Response(status=self.status, text="the hub is down")
        if request.path.startswith("/cdn/"):
            return await self._content(request, request.path, "")
        if request.path.startswith("/api/models/"):
            model, _, revision = request.path.removeprefix("/api/models/").partition("/revision/")
            return self._info(model, revision or "main", token)
        model, _, rest = request.path.removeprefix("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        return await self._file(request, model, revision, file, token)

    def _info(self, model: str, revision: str, token: str) -> web.Response:
        found = self._found(model, revision, token, lists=True)
        if isinstance(found, web.Response):
            return found
        repository, commit = found
        siblings = [_sibling(name, content) for name, content in sorted(repository.commits[commit].items())]
        return web.json_response({"id": model, "sha": commit, "gated": repository.gated, "siblings": siblings})

    def _found(self, model: str, revision: str, token: str, *, lists: bool) -> tuple[HubRepository, str] | web.Response:
        """A model and the commit of a revision, or the refusal."""
        repository = self.repositories.get(model)
        if token.startswith("invalid"):
            return _error(401, "", "Invalid credentials in Authorization header")
        if repository is None or (repository.token not in ("", token) and not repository.gated):
            return _error(404 if token else 401, "RepoNotFound", "Repository not found")
        if repository.gated and not lists and repository.token != token:
            words = "You are not in the authorized list" if token else "You must have access to it and be authenticated"
            return _error(403 if token else 401, "GatedRepo", f"Access to this model is restricted. {words}")
        commit = repository.at(revision)
        if commit is None:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, commit

    async def _file(self, request: web.Request, model: str, revision: str, file: str, token: str) -> web.StreamResponse:
        found = self._found(model, revision, token, lists=False)
        if isinstance(found, web.Response):
            return found
        repository, commit = found
        content = repository.commits[commit].get(file)
        if content is None or file in self.missing:
            return _error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        if len(content) < LFS_BYTES:
            return await self._content(request, f"/{model}/{commit}/{file}", commit)
        headers = {
            "X-Repo-Commit": commit, "X-Linked-Etag": f'"{_tag(content)}"', "X-Linked-Size": str(len(content)),
            # Another name of this host: another origin, as the CDN is.
            "Location": f"{self.url.replace('127.0.0.1', 'localhost')}/cdn/{model}/{commit}/{file}",
        }  # fmt: skip
        if self.by_xet:
            headers |= {
                "X-Xet-Hash": _tag(content),
                "X-Xet-Refresh-Route": f"/api/models/{model}/xet-read-token/{commit}",
            }
        return web.Response(status=302, headers=headers)

    async def _content(self, request: web.Request, path: str, commit: str) -> web.StreamResponse:
        namespace, name, commit_of, file = path.removeprefix("/cdn").removeprefix("/").split("/", 3)
        content = self.repositories[f"{namespace}/{name}"].commits[commit_of][file]
        begin = request.http_range.start or 0
        headers = {"ETag": f'"{_tag(content)}"', "Content-Length": str(len(content) - begin)}
        if commit:
            headers["X-Repo-Commit"] = commit
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        response = web.StreamResponse(status=206 if begin else 200, headers=headers)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        end, is_reset = self.cuts.pop(0) if self.cuts else (len(content), False)
        for at in range(begin, end, _PIECE_BYTES):
            await response.write(content[at : min(at + _PIECE_BYTES, end)])
        if end < len(content):
            _cut(request, is_reset)
        return response


@contextmanager
def hub_server(host: str = "127.0.0.1") -> Iterator[HubServer]:
    """Runs the hub in a thread of its own until the block is left. `host`: the address that it listens on."""
    hub, loop, ready = HubServer(), asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", hub.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, host, 0).start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(20), "the hub has not started"
        yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        _digest.cache_clear()


def _tag(content: bytes) -> str:
    """The ETag: as long as Git's name of a blob, or the SHA-256 of a file of Git LFS."""
    return _digest(content)[: 40 if len(content) < LFS_BYTES else 64]


@lru_cache
def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    sibling = {"rfilename": name, "size": len(content), "blobId": _digest(content)[:40]}
    if len(content) < LFS_BYTES:
        return sibling
    return sibling | {"lfs": {"size": len(content), "sha256": _tag(content), "pointerSize": 134}}


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    named = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
    return web.json_response({"error": message}, status=status, headers=named)


def _cut(request: web.Request, is_reset: bool) -> None:
    transport = request.transport
    assert transport is not None
    if is_reset:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    else:
        transport.close()
