"""Removes the stack's volumes on every node, by a job that runs on each: managers have no call for it. Blocking."""

from __future__ import annotations

from typing import Any

from ... import docker_http
from ..names import STACK_LABEL, Json
from .swarm_calls import Swarm, wait

JOB = "pierhead-remove-volumes"
DONE_S = 60.0
IN_USE_S = 30.0
"""By containers that have just ended."""
SOCKET = "/var/run/docker.sock"
# In HAProxy's image, which every node has: it has Python and no more.
PROGRAM = f"""
import http.client, json, socket, sys, time, urllib.parse
class Engine(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect({SOCKET!r})
def ask(method, path):
    engine = Engine("engine")
    engine.request(method, path)
    return json.loads(engine.getresponse().read() or "null")
def volumes(label):
    query = urllib.parse.quote(json.dumps({{"label": [label]}}))
    return [volume["Name"] for volume in ask("GET", "/volumes?filters=" + query)["Volumes"] or []]
until = time.monotonic() + {IN_USE_S}
while left := volumes(sys.argv[1]):
    told = [ask("DELETE", "/volumes/" + name) for name in left]
    if time.monotonic() > until:
        sys.exit(str(told))
    time.sleep(0.3)
"""


def remove_volumes(swarm: Swarm, image: str) -> None:
    """Run the job, once the stack's services are gone. `image`: of its HAProxy. Raises EngineError."""
    name = f"{swarm.project}_{JOB}"
    docker_http.post(swarm.client, "/services/create", _job(swarm.project, name, image))
    job = {"ID": swarm.client.inspect_service(name)["ID"]}  # type: ignore[no-untyped-call]
    try:
        wait(lambda: _is_done(swarm, name), "the volumes of all nodes are removed", DONE_S, swarm.trouble)
    finally:
        swarm.remove_services([job])
    wait(lambda: not swarm.left([job]), "the job ends", DONE_S)


def _is_done(swarm: Swarm, name: str) -> bool:
    ready = {node["ID"] for node in swarm.client.nodes() if node["Status"]["State"] == "ready"}
    tasks: list[Json] = swarm.client.tasks({"service": name})  # type: ignore[no-untyped-call]
    done = {task["NodeID"] for task in tasks if task["Status"]["State"] == "complete"}
    asked = {task.get("NodeID") for task in tasks}
    return bool(done) and (ready & asked) <= done


def _job(project: str, name: str, image: str) -> dict[str, Any]:
    container = {
        "Image": image,
        "Command": ["python3", "-c", PROGRAM, f"{STACK_LABEL}={project}"],
        "Healthcheck": {"Test": ["NONE"]},
        "Mounts": [{"Type": "bind", "Source": SOCKET, "Target": SOCKET}],
    }
    return {
        "Name": name,
        "Labels": {STACK_LABEL: project},
        "TaskTemplate": {"ContainerSpec": container, "RestartPolicy": {"Condition": "none"}},
        "Mode": {"GlobalJob": {}},
    }
