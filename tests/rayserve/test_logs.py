"""The logger `ray.serve` in a program that uses `serve.run`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from tests.harness.imports import ROOT
from tests.harness.ports import free_ports

PROGRAM = """
import logging, sys
from pierhead import rayserve as serve

logger = logging.getLogger("ray.serve")

@serve.deployment
class Inner:
    def __call__(self):
        logger.info("inner %d", 1, extra={"user": 7})
        logger.debug("not wanted")

@serve.deployment(logging_config={"log_level": "DEBUG", "additional_log_standard_attrs": ["name"]})
class Outer:
    def __init__(self, inner):
        self.inner = inner

    async def __call__(self):
        logger.debug("outer")
        await self.inner.remote()

serve.start(http_options={"port": int(sys.argv[1])})
print(logging.getLevelName(logger.level))
serve.run(Outer.bind(Inner.bind()), name="app", logging_config={"encoding": "JSON"}).remote().result()
logger.info("outside")
print(logging.getLevelName(logger.level))
"""


def test_lines_have_the_replica_and_the_request_in_the_encoding_of_the_deployment() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "services" / "runtime")}
    command = [sys.executable, "-c", PROGRAM, str(free_ports(1)[0])]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.split() == ["INFO", "DEBUG"], "what no deployment writes is not even made"
    outer, inner, outside = ended.stderr.splitlines()
    found = re.fullmatch(r"DEBUG \S+ \S+ app_Outer \w{8} (\S+) ray\.serve -- outer", outer)
    assert found, outer
    assert re.fullmatch(r"INFO \S+ \S+ -- outside", outside), outside
    line = json.loads(inner)
    known = {"levelname": "INFO", "message": "inner 1", "deployment": "app_Inner", "user": 7, "request_id": found[1]}
    assert {name: line[name] for name in known} == known
