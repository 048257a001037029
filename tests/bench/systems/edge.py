"""HAProxy in front of processes of this host, with the configuration that the controller would write.

It comes from the controller's own template. Only what ties it to the image is changed: paths, the port, the user. The
HAProxy that both sides get here is the one that the peer brings (2.8, older than the 3.0 of our image): what it does
not know is said in its own words (`in_words_of_2_8`), the log line's content included.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from controller.model.spec import ProbeSpec, ServiceSpec, backend_name
from controller.routing.haproxy_config import render
from controller.routing.haproxy_text import ServerLine, with_servers
from tests.bench.processes import ROOT, BenchError

MAX_ONGOING_REQUESTS = 1000
REQUEST_TIMEOUT_S = 30.0
"""Both as in compose/apps/*.yaml."""


@dataclass(frozen=True, slots=True)
class Route:
    """An ingress service: its path prefix and where its replicas are (ip:port each)."""

    service: str
    path: str
    port: int
    probe_port: int
    addresses: Sequence[str]


def configuration(route: Route, port: int, directory: Path) -> str:
    """The text for an HAProxy that listens on 127.0.0.1:`port` and keeps its files in `directory`."""
    spec = ServiceSpec(
        name=route.service,
        image="",
        protocol="http",
        port=route.port,
        replicas=len(route.addresses),
        probe=ProbeSpec(port=route.probe_port, path="/readyz"),
        route=route.path,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        request_timeout_s=REQUEST_TIMEOUT_S,
    )
    servers = [
        ServerLine(backend_name(route.service), f"{route.service}-{number}", address, number)
        for number, address in enumerate(route.addresses, start=1)
    ]
    text = with_servers(render([spec]), servers)
    text = _change(r"bind :8000$", f"bind 127.0.0.1:{port}", text)
    # gRPC callers go to the child directly here, and nobody looks at the statistics.
    text = _change(r"bind :9000 proto h2$", f"bind unix@{directory}/grpc.sock proto h2", text)
    text = _change(r"bind :8404$", f"bind unix@{directory}/stats.sock", text)
    text = _change(r"127\.0\.0\.1:8405", f"unix@{directory}/held.sock", text)
    text = _change(r"/run/haproxy/", f"{directory}/", text)
    text = _change(r"/usr/local/etc/haproxy/hold\.lua", f"{ROOT}/haproxy/hold.lua", text)
    text = _change(r"/usr/local/etc/haproxy/errors/", f"{ROOT}/haproxy/errors/", text)
    text = _change(r"^    (user|group) haproxy\n", "", text)
    return _change(r" user root group root mode 600", " mode 600", text)


def write(program: str, directory: Path, text: str) -> Path:
    """Write the text for this program, with the files that it names; where it is."""
    version = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stdout
    file = directory / "haproxy.cfg"
    file.write_text(in_words_of_2_8(text) if is_older_than_3(version) else text)
    (directory / "servers.state").write_text("1\n")
    (directory / "keys.map").touch()
    return file


def in_words_of_2_8(text: str) -> str:
    """The same for an HAProxy older than 3.0: threads by number, the JSON of the access log spelt out."""
    threads = min(8, os.cpu_count() or 1)
    # It has one time for all that a client sends and reads, and the clients here never wait.
    text = _change(r"^    http-(request|response) set-timeout client .*\n", "", text)
    text = _change(r"^    thread-hard-limit 8$", f"    nbthread {threads}", text)
    # Nothing waits for a replica here, so the waiting room's data may be missing.
    text = _change(r' set-proxy-v2-tlv-fmt\(0xE0\) "[^"]*"', "", text)
    return _change(r"^    log-format '%\{\+json\}o (.*)'$", lambda line: f"    log-format '{_spelt(line[1])}'", text)


def _spelt(fields: str) -> str:
    """`%(status:sint)ST %(path)[var(x)]` -> `{"status":%ST,"path":"%[var(x),json(utf8s)]"}`."""
    spelt = []
    for name, kind, value in re.findall(r"%\((\w+)(:sint)?\)(\[.*?\](?= %|$)|\w+)", fields):
        if name == "time":  # its converter for microseconds is newer, too
            value = "Tl"
        elif name == "path":
            value = value[:-1] + ",json(utf8s)]"
        spelt.append(f'"{name}":%{value}' if kind else f'"{name}":"%{value}"')
    return "{" + ",".join(spelt) + "}"


def _change(pattern: str, replacement: object, text: str) -> str:
    """Like re.sub, but something must be found: a template that has changed is an error."""
    changed, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)  # type: ignore[call-overload]
    if not count:
        raise BenchError(f"haproxy/haproxy.cfg.j2 has no line for {pattern!r} any more; tests/bench/systems/edge.py")
    return str(changed)


def is_older_than_3(version_text: str) -> bool:
    """From the first line of `haproxy -v`."""
    found = re.search(r"version (\d+)\.", version_text)
    return found is not None and int(found[1]) < 3
