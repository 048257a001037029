"""Running gRPC clients that have none of our code: one by reflection alone, one in another language."""

from __future__ import annotations

import base64
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.recsys.app import Ranker
from tests.harness.stack import ROOT

RANKER = "services.recsys.app.Ranker"
CALL_S = 120.0
"""Against a client that never ends: its start reads a hundred files."""
INSTALL_S = 150.0
_NODE_SOURCES = ROOT / "tests" / "harness" / "node_client"


def reflecting(*arguments: str, status: int = 0) -> list[str]:
    """Run the client that knows an address and nothing else; returns the lines that it prints."""
    command = [sys.executable, "-m", "tests.harness.reflecting_client", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CALL_S, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr.endswith("modules of ours: []\n"), done.stderr
    return done.stdout.splitlines()


class NodeClient:
    """The client in JavaScript, with npm's gRPC, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        """Install it; skips the test where there is no Node.js, or no package available."""
        if shutil.which("npm") is None or shutil.which("node") is None:
            pytest.skip("needs Node.js and npm")
        self.directory = directory
        shutil.copytree(_NODE_SOURCES, directory, dirs_exist_ok=True)
        command = ["npm", "install", "--prefer-offline", "--no-audit", "--no-fund", "--no-package-lock"]
        try:
            done = subprocess.run(
                command, cwd=directory, capture_output=True, text=True, timeout=INSTALL_S, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm has no packages for it within {INSTALL_S:g} s")
        if done.returncode != 0:
            pytest.skip(f"npm has no packages for it: {done.stderr[-300:]}")

    def call(self, address: str, file: str, method: str, request: str, status: int = 0) -> list[Any]:
        """Call `package.Service/Method` of a file in proto/ or this directory; returns the replies, or what failed."""
        command = ["node", "client.js", address, f"{ROOT / 'proto'}:{self.directory}", file, method, request]
        done = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, timeout=CALL_S, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


def rank(address: str, dense: Any, sparse: Any) -> list[float]:
    """Call the ranker over gRPC, with the messages of its class's contract."""
    method = Ranker.__contract__.methods["rank"]
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(
            f"/{RANKER}/rank", method.request_class.SerializeToString, method.reply_class.FromString
        )
        scores: list[float] = method.result(call(method.request(dense, sparse), timeout=60)).tolist()
    return scores


def rank_request() -> dict[str, Any]:
    """Two candidates for the ranker, as JSON spells them; bytes are base64."""
    dense = struct.pack("<26f", *[0.25] * 13, *[0.75] * 13)
    sparse = struct.pack("<52q", *range(26), *range(26, 52))
    return {
        "dense": {"dtype": "FLOAT32", "shape": [2, 13], "data": base64.b64encode(dense).decode()},
        "sparse": {"dtype": "INT64", "shape": [2, 26], "data": base64.b64encode(sparse).decode()},
    }


def rank_request_for_node() -> dict[str, Any]:
    """The same, as the client in JavaScript wants its bytes."""
    return {name: {**tensor, "data": {"base64": tensor["data"]}} for name, tensor in rank_request().items()}


def scores_of(data: str) -> list[float]:
    """A reply's scores from its base64."""
    raw = base64.b64decode(data)
    scores = list(struct.unpack(f"<{len(raw) // 4}f", raw))
    assert len(scores) == 2
    assert all(0.0 < score < 1.0 for score in scores), scores
    assert scores[0] != scores[1]
    return scores
