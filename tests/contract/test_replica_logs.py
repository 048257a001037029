"""`x-serve.logging`, from the block to a replica's log: a process with the environment that a container would have."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.harness.ports import free_ports
from tests.harness.stack import request
from tests.harness.waiting import eventually
from tests.unit.controller.compose_configs import ranker

PROGRAM = """
import logging
from aiohttp import web
from pierhead import serve

async def look(request):
    logging.getLogger("shop").debug("looks at the shelf")
    logging.getLogger("shop").warning("the shelf is empty")
    return web.Response(text="nothing")

app = web.Application()
app.add_routes([web.get("/look", look)])
serve(app)
"""


def log_of(logging: Mapping[str, Any], **block: Any) -> list[str]:
    """What a replica of a service with that block writes while it answers one request and drains."""
    given = ranker({"route": "/", "logging": logging, **block}).container["Env"]
    port, admin_port = free_ports(2)
    here = [f"PIERHEAD_PORT={port}", f"PIERHEAD_ADMIN_PORT={admin_port}", "PIERHEAD_HOST=127.0.0.1"]
    here += ["PIERHEAD_DISCOVERY=", "PIERHEAD_REPLICA=shop-ranker-1"]
    environ = os.environ | dict(variable.split("=", 1) for variable in [*given, *here])
    with subprocess.Popen([sys.executable, "-c", PROGRAM], env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            eventually(lambda: request(f"http://127.0.0.1:{admin_port}/readyz").status == 200, "it is ready", 30)
            asked = request(f"http://127.0.0.1:{port}/look", headers={"x-request-id": "mine"})
            assert asked.status == 200
            process.send_signal(signal.SIGTERM)
            _, written = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0, written
    return written.splitlines()


def test_every_line_is_json_and_each_request_has_one_where_all_shall() -> None:
    lines = [json.loads(line) for line in log_of({"access_log": "all"})]
    assert [line["level"] for line in lines if line["logger"] == "shop"] == ["warning"]
    (access,) = [line for line in lines if line["logger"] == "pierhead.access"]
    assert (access["method"], access["status"], access["request_id"]) == ("GET /look", "200", "mine")
    assert {line["replica"] for line in lines} == {"shop-ranker-1"}


def test_level_encoding_and_lines_of_requests_are_what_the_block_says() -> None:
    lines = log_of({"log_level": "debug", "encoding": "text", "access_log": "off"})
    after_the_time = [line.partition("+00:00 ")[2] for line in lines]
    assert [line for line in after_the_time if " shop " in line] == [
        "DEBUG   shop [mine] looks at the shelf",
        "WARNING shop [mine] the shelf is empty",
    ]
    assert not [line for line in lines if "pierhead.access" in line]
    assert after_the_time[-1] == "INFO    pierhead stopped"
    assert "" not in after_the_time, "every line has its time"
    assert [json.loads(line)["message"] for line in log_of({"log_level": "warning"})] == ["the shelf is empty"]
