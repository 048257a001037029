"""Run tests/contract/test_llm_clients.py against a server, in the environment that has the clients."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

from tests.environments.clients import CLIENTS
from tests.harness.imports import ROOT

LIMIT_S = 900
"""Half a minute with the mock engine; a real one that has one core is slow."""

needs_clients = pytest.mark.skipif(
    not CLIENTS.is_made(), reason="no clients here; python -m tests.environments.clients installs them"
)


def ask_clients(served: dict[str, str]) -> str:
    """Fails where a test of it does. `served`: see there. Returns its last line."""
    # What the other tests share needs packages that this environment lacks.
    options = ["--noconftest", "-p", "no:cacheprovider", "--durations=5", f"--timeout={LIMIT_S}"]
    own = {"PIERHEAD_TEST_LLM_SERVED": json.dumps(served), "PYTHONPATH": "."}
    # Neither telemetry nor a list of prices is fetched.
    own |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}
    run = subprocess.run(
        [CLIENTS.python, "-m", "pytest", *options, "tests/contract/test_llm_clients.py"],
        cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    summary = run.stdout.splitlines()[-1]
    print("", *re.findall(r"^\d+\.\d+s .*", run.stdout, re.MULTILINE), summary, sep="\n  ")
    return summary
