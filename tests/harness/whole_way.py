"""A gateway and LLM servers with real vLLMs behind it, all of them processes of this machine."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from openai import OpenAI
from pierhead.llm.v1.llm_pb2 import Operation
from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub
from pierhead.llm_config import LLMConfig, ModelLoading
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.stack import free_ports, request
from tests.harness.vllm_processes import ANSWER_S, PLAIN, STARTED_WITHIN_S, is_ready, llm_server, process
from tests.harness.waiting import seconds_until

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
CHAT_ENGINE = PLAIN | {  # as in compose/apps/llm.yaml
    "max_model_len": 2048, "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
}  # fmt: skip

TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""A thread of NIXL looks for transfers without a pause in each engine. Engines that are bound to one core each, with
threads that wait for one another, would take minutes for an answer on two cores."""
LONG: Any = [
    {"role": "user", "content": "France has many cities, and one of them is its capital. " * 30 + "What is it called?"}
]
"""Long enough for blocks of vLLM's cache, which have 128 tokens on CPUs."""

Processes = dict[str, subprocess.Popen[bytes]]


@dataclass
class WholeWay:
    """All of it: a gateway, and the LLM servers behind it."""

    client: Any
    """OpenAI's; None before the gateway is ready."""
    logs: Path
    lanes: Mapping[str, int]
    admins: Mapping[str, int]

    def chat(self, messages: Any = QUESTION, model: str = "smollm2", **members: Any) -> Any:
        """One answer."""
        members = {"max_tokens": 32, "temperature": 0} | members
        return self.client.chat.completions.create(model=model, messages=messages, **members)

    def numbers(self, process: str) -> dict[str, float]:
        """Metrics of one of the processes; those of the same name and other labels are one number."""
        found: dict[str, float] = {}
        page = request(f"http://127.0.0.1:{self.admins[process]}/metrics").body.decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = ",".join(f"{sample.labels[name]}" for name in ("kind", "outcome") if name in sample.labels)
                name = f"{sample.name}{{{labels}}}" if labels else sample.name
                found[name] = found.get(name, 0.0) + sample.value
        return found

    def operate(self, service: str, operation: Operation) -> None:
        """As `pierhead llm` does. Raises grpc.RpcError."""
        with grpc.insecure_channel(f"127.0.0.1:{self.lanes[service]}") as channel:
            LLMServerStub(channel).Operate(operation, timeout=ANSWER_S)


@contextlib.contextmanager
def whole_way(
    engines: Mapping[str, tuple[str, Mapping[str, Any]]], models: Mapping[str, Any], logs: Path, **variables: str
) -> Iterator[tuple[Processes, WholeWay]]:
    """The processes, which are not ready yet. `engines`: a model's files and engine_kwargs by service; `models`: as
    PIERHEAD_LLM_MODELS; `variables`: of the engines' processes.
    """
    names = [*engines, "gateway"]
    ports = free_ports(3 * len(names))
    lanes, admins, side = (dict(zip(names, ports[first::3], strict=True)) for first in range(3))
    with contextlib.ExitStack() as stack:
        started: Processes = {}
        for service, (source, engine_kwargs) in engines.items():
            loading = ModelLoading(model_id=Path(source).name, model_source=source)
            config = LLMConfig(model_loading=loading, engine_kwargs=dict(engine_kwargs))
            own = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side[service]), "TORCHINDUCTOR_CACHE_DIR": str(logs / "compiled")}
            server = llm_server(config, logs / f"{service}.log", lanes[service], admins[service], **own, **variables)
            started[service] = stack.enter_context(server)
        where = {f"PIERHEAD_STATIC_{name.upper().replace('-', '_')}": f"127.0.0.1:{lanes[name]}" for name in engines}
        gateway = process(
            sys.executable, logs / "gateway.log", "pierhead.llm.gateway", PIERHEAD_PORT=str(lanes["gateway"]),
            PIERHEAD_ADMIN_PORT=str(admins["gateway"]), PIERHEAD_LLM_MODELS=json.dumps(models), **where,
        )  # fmt: skip
        started["gateway"] = stack.enter_context(gateway)
        yield started, WholeWay(None, logs, lanes, admins)
        for each in started.values():  # all of them at once, and then one is waited for after the other
            each.terminate()


@contextlib.contextmanager
def all_ready(started: Processes, way: WholeWay) -> Iterator[WholeWay]:
    """The same, once every process takes requests."""
    for name, each in started.items():
        took_s = seconds_until(partial(is_ready, each, way.admins[name]), name, STARTED_WITHIN_S)
        print(f"  {name}: {took_s:.0f} s more")
    url = f"http://127.0.0.1:{way.lanes['gateway']}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=ANSWER_S) as client:
        yield replace(way, client=client)
