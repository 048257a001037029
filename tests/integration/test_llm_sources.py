"""Models as the images fetch them: the suite of tests/contract/test_llm_sources.py in an environment that has the
libraries of the hub and of buckets, and servers with their protocols.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.environments import buckets
from tests.harness.stack import ROOT

LIMIT_S = 280
"""A minute on two idle cores."""


@pytest.mark.long
@pytest.mark.skipif(
    not buckets.BUCKETS.is_made(),
    reason="no huggingface_hub, s3fs and gcsfs here; python -m tests.environments.buckets installs them",
)
def test_sources_are_what_every_source_is() -> None:
    # What the other tests share needs packages that this environment lacks.
    options = ["--noconftest", "-p", "no:cacheprovider", "--timeout=120", "--durations=5"]
    run = subprocess.run(
        [".state/buckets/bin/python", "-m", "pytest", *options, "tests/contract/test_llm_sources.py"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": "services/runtime:."}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    summary = run.stdout.splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed is not None
    assert int(passed[1]) >= 60, "it ran"
    assert "skipped" not in summary, "all of it ran"
    print("", *re.findall(r"^\d+\.\d+s .*", run.stdout, re.MULTILINE), summary, sep="\n  ")
