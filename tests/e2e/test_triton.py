"""Triton as a service: the ranker's scores, scale and rollout under load, failures, and Triton's own errors."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from dashboards import build_overview
from services.recsys.rows import candidates
from tests.harness.load import Load
from tests.harness.other_clients import rank
from tests.harness.prometheus import Prometheus, queries_of, traffic
from tests.harness.stack import EVIDENCE, ROOT, Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(900)]

APP = (ROOT / "compose" / "apps" / "triton.yaml").read_text()
FILE = EVIDENCE / "triton.yaml"
SCORES = "/recsys/?user_id=7"
KILL = """import os, sys
for process in filter(str.isdigit, os.listdir("/proc")):
    if open(f"/proc/{process}/comm").read().startswith(sys.argv[1]):
        os.kill(int(process), 9)
"""
CONTROL = """import sys, urllib.request as web
web.urlopen(web.Request(f"http://127.0.0.1:8000/v2/repository/models/dlrm/{sys.argv[1]}", b"{}"))
"""
METRICS = "import urllib.request as web; print(web.urlopen('http://127.0.0.1:8002/metrics').read().decode())"


@pytest.fixture(scope="module")
def triton() -> Iterator[Stack]:
    EVIDENCE.mkdir(exist_ok=True)
    FILE.write_text(APP)
    stack = Stack("pierhead-test-triton", ["compose/apps/recsys.yaml", f"{EVIDENCE.name}/{FILE.name}"])
    built = stack.compose("build", "triton")
    assert built.returncode == 0, built.stderr
    with stack.running():
        stack.wait_settled(recsys=1, ranker=1, triton=1)
        eventually(lambda: is_answered(stack), "the first scores")
        yield stack


def is_answered(stack: Stack) -> bool:
    return stack.get(SCORES).status == 200


def test_both_rankers_give_the_same_scores(triton: Stack) -> None:
    for user in (7, 8):
        scores = triton.get(f"/recsys/?user_id={user}").json["scores"]
        assert len(scores) == 32
        assert scores == pytest.approx(rank(triton.grpc_address, *candidates(user)), abs=1e-5)
    (container,) = triton.replicas("triton").values()
    page = container.exec_run(["python3", "-c", METRICS]).output
    succeeded = re.search(r'nv_inference_request_success\{model="dlrm",version="1"\} (\d+)', str(page))
    assert succeeded is not None
    assert int(succeeded[1]) >= 2, "it was Triton that scored"


def test_every_panel_of_triton_has_data(triton: Stack) -> None:
    with traffic(lambda: triton.get(SCORES)):
        Prometheus(triton).wait_for_data(queries_of((build_overview.TRITON,)))


def test_triton_scales_under_load_without_a_failed_request(triton: Stack) -> None:
    with Load([triton.url(SCORES)], connections=8) as load:
        for replicas in (3, 1, 2, 1):
            triton.scale("triton", replicas)
        eventually(lambda: len(triton.replicas("triton")) == 1, "one replica is left")
    load.assert_no_failure()


def test_a_new_version_is_rolled_out_under_load_without_a_failed_request(triton: Stack) -> None:
    (old,) = triton.replicas("triton")
    with Load([triton.url(SCORES)], connections=8) as load:
        FILE.write_text(APP.replace("--exit-timeout-secs=35", "--exit-timeout-secs=36"))
        eventually(lambda: old not in triton.replicas("triton"), "the old replica is gone", within_s=120)
        triton.wait_settled(triton=1)
    load.assert_no_failure()


def test_requests_that_wait_in_triton_add_a_replica_and_silence_takes_it_back(triton: Stack) -> None:
    text = FILE.read_text()
    changes = {
        "max: 4": "max: 2",
        "target: 8": "target: 2",
        "_delay_s: 10": "_delay_s: 1",
        "_delay_s: 300": "_delay_s: 5",
    }
    for written, wanted in changes.items():
        assert text.count(written) == 1
        text = text.replace(written, wanted)
    FILE.write_text(text)
    assert triton.pierhead("scale", "triton", "auto").returncode == 0
    with Load([triton.url(SCORES)], connections=64) as load:
        triton.wait_settled(triton=2)
    load.assert_no_failure()
    triton.wait_settled(triton=1)


@pytest.mark.parametrize("process", ["tritonserver", "triton_python_b"])
def test_a_replica_without_its_server_or_its_model_process_is_replaced(triton: Stack, process: str) -> None:
    before = triton.replica_ids("triton")
    (container,) = triton.replicas("triton").values()
    if process == "tritonserver":
        triton.kill_process(container)
    else:
        container.exec_run(["python3", "-c", KILL, process])
    eventually(lambda: triton.replica_ids("triton") - before, "another replica")
    triton.wait_settled(triton=1)
    eventually(lambda: is_answered(triton), "it answers")


def test_what_triton_says_reaches_the_client(triton: Stack) -> None:
    rows = {"dense": [[3e38, -3e38] * 6 + [3e38]], "sparse": [list(range(26))]}
    answer = triton.post("/recsys/rank", rows)
    assert answer.status == 400, answer.body
    assert "dense: expected numbers from -1e+06 to 1e+06" in answer.json["error"]["message"]
    (container,) = triton.replicas("triton").values()
    assert container.exec_run(["python3", "-c", CONTROL, "unload"]).exit_code == 0
    eventually(lambda: not is_answered(triton), "the model is unloaded")
    answer = triton.get(SCORES)
    assert "dlrm" in answer.json["error"]["message"], answer.body
    assert container.exec_run(["python3", "-c", CONTROL, "load"]).exit_code == 0
    eventually(lambda: is_answered(triton), "the model is loaded again")
