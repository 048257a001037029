"""Stands in for the controller and for replicas: `controller:8100` lists one target for each page of metrics below."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8100


def _sample(name: str, **labels: object) -> str:
    return f"{name}{{{','.join(f'{label}={json.dumps(str(text))}' for label, text in labels.items())}}} 1\n"


PAGES = {
    "small": _sample("small"),
    # More than the repository's services come to.
    "large": "".join(_sample("large", i=i, text="x" * 60) for i in range(70_000))
    + _sample("wide", **{f"l{n}": n for n in range(50)}, list="x" * 2000),
    "samples": "".join(_sample("many", i=i) for i in range(110_000)),
    "bytes": f"# {'x' * 17_000_000}\n" + _sample("long"),
    "labels": _sample("wide", **{f"l{n}": n for n in range(410)}),
    "name": _sample("named", **{"l" * 510: 1}),
    "value": _sample("text", value="x" * 10_100),
}
"""Of metrics, by the replicas that export them."""
TARGETS = [
    {"targets": [f"controller:{PORT}"], "labels": {"job": "replicas", "replica": page, "__metrics_path__": f"/{page}"}}
    for page in PAGES
]


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = PAGES.get(self.path.removeprefix("/"))
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if page is None else "text/plain; version=0.0.4")
        self.end_headers()
        listed = [] if self.path.endswith("job=alertmanager") else TARGETS
        self.wfile.write((json.dumps(listed) if page is None else page).encode())


if __name__ == "__main__":
    ThreadingHTTPServer(("", PORT), _Answers).serve_forever()
