"""`pierhead new --llm`: a project of one small language model, with room for classes of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ...errors import InvalidRequest
from . import stack_files
from .new import NOT_IN_GIT, typed, write

ENGINES = ("vllm", "mock")

_HEADER = """\
# yaml-language-server: $schema=.pierhead/compose/x-serve.schema.json
# A language model behind OpenAI's API: clients -> HAProxy -> llm-gateway -> llm. README.md says what to change.
"""

_DOCKERFILE = """\
FROM pierhead/llm-{device}:{tag}
USER root
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt
USER pierhead
# Engines and servers of your own, which compose.yaml names by import path.
COPY my_package my_package
"""

_IGNORED = """\
# A save of anything else does not replace the replicas.
*
!my_package
!requirements.txt
**/__pycache__
"""

_REQUIREMENTS = """\
# What my_package/ imports beyond the image of the model.
# httpx
"""

_OWN = '''\
"""Engines and servers of your own: `engine: my_package.engine:MyEngine` in compose.yaml names a class in engine.py."""
'''

_CHAT = '''\
"""Asks the model, and prints the answer as it comes: python chat.py 'What is the capital of France?'"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import openai


def client_of(url: str, verify: bool = True) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=openai.DefaultHttpxClient(verify=verify))


def ask(client: openai.OpenAI, question: str) -> Iterator[str]:
    """The parts of the answer."""
    model = client.models.list().data[0].id
    events = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=200, stream=True
    )
    for event in events:
        yield event.choices[0].delta.content or ""


def address() -> str:
    """Where `pierhead up` has put it: the port is a line of .env, and so is the address if you have chosen one."""
    lines = Path(__file__).with_name(".env").read_text().splitlines()
    written = {name: text.strip() for name, _, text in (line.partition("=") for line in lines)}
    host = written.get("PIERHEAD_BIND") or "127.0.0.1"
    if host in ("0.0.0.0", "[::]"):  # every address of this machine
        host = "127.0.0.1"
    if (written.get("PIERHEAD_TLS") or "off").lower() == "off":
        return f"http://{host}:{written['PIERHEAD_HTTP_PORT']}"
    return f"https://{host}:{written.get('PIERHEAD_HTTPS_PORT') or 8443}"


if __name__ == "__main__":
    client = client_of(address(), verify=False)  # this machine itself: no certificate has its address
    for part in ask(client, " ".join(sys.argv[1:]) or "What is the capital of France?"):
        print(part, end="", flush=True)
    print()
'''

_TEST = '''\
"""The model answers. `pytest` starts a stack of its own for this, in containers and on free ports, and removes it."""

from chat import ask, client_of
from pierhead.testing import Stack


def test_it_answers(pierhead_stack: Stack) -> None:
    assert "".join(ask(client_of(pierhead_stack.base_url), "What is the capital of France?"))
'''

_README = """\
# {name}

A language model ({model}) behind OpenAI's API.

    pierhead up                              # {takes}
    pip install openai pytest
    python chat.py 'What is the capital of France?'
    pytest                                   # in a stack of its own

Any OpenAI client talks to it: its base URL is `http://127.0.0.1:PORT/v1`, and `pierhead up` says the port.

- `compose.yaml`: the model (`model_loading`), the engine's arguments (`engine_kwargs`), the number of `replicas`.
  After a change: `pierhead up`.
- A second model: `pierhead llm build --model Qwen/Qwen2.5-7B-Instruct --file qwen.yaml`, and `qwen.yaml` in
  COMPOSE_FILE of `.env`. Both are behind one URL.
- `my_package/`: a Python package that the model's image contains. An engine of yours in `my_package/engine.py` serves
  with `engine: my_package.engine:MyEngine` in compose.yaml. `requirements.txt`: what it imports beyond the image.
  `pierhead up --watch` follows each save.

`pierhead status` shows what runs, `pierhead why llm` why, `pierhead down` removes it.
"""

_NEXT = """\
{directory}: compose.yaml, Dockerfile, my_package/, chat.py, test_chat.py, README.md.
  cd {typed}
  pierhead up                # {takes}
  pip install openai
  python chat.py 'What is the capital of France?'"""

_TAKES = {
    "none": "seconds: it makes the words up",
    "cpu": "the first time minutes, and 4 GB: vLLM for CPUs with a small model",
    "cuda": "the first time many minutes: vLLM for GPUs, and 14 GB of weights",
}
_MODELS: dict[str, dict[str, Any]] = {
    "none": {"engine": "mock", "model_loading": {"model_id": "mock"}},
    "cpu": {
        "model_loading": {"model_id": "smollm2", "model_source": "/models/smollm2"},
        # float32: in bfloat16 the small model generates nonsense on CPUs without AVX-512.
        "engine_kwargs": {
            "max_model_len": 2048, "enforce_eager": True, "dtype": "float32", "gpu_memory_utilization": 0.3
        },
    },
    "cuda": {
        "model_loading": {"model_id": "gpt-oss-20b", "model_source": "openai/gpt-oss-20b"},
        "engine_kwargs": {"max_model_len": 4096, "gpu_memory_utilization": 0.95},
    },
}  # fmt: skip
"""By the device that the image is for."""


def new_llm(directory: Path, engine: str = "vllm", *, gpu: bool = False) -> str:
    """Write the project as `new` does; returns what to do next. Raises InvalidRequest."""
    if engine not in ENGINES:
        raise InvalidRequest(
            f'--engine: expected "vllm" or "mock", found "{engine}"; `pierhead llm build` takes every engine'
        )
    if gpu and engine == "mock":
        raise InvalidRequest("--gpu: the engine mock uses no GPU; leave one of the two out")
    device = "cuda" if gpu else "cpu" if engine == "vllm" else "none"
    model = _MODELS[device]["model_loading"]["model_id"]
    files = {
        "compose.yaml": _compose(device),
        "Dockerfile": _DOCKERFILE.format(device=device, tag=stack_files.tag()),
        ".dockerignore": _IGNORED,
        ".gitignore": NOT_IN_GIT,
        "README.md": _README.format(name=directory.resolve().name, model=model, takes=_TAKES[device]),
        "my_package/__init__.py": _OWN,
        "requirements.txt": _REQUIREMENTS,
        "chat.py": _CHAT,
        "test_chat.py": _TEST,
    }
    write(directory, files)
    return _NEXT.format(directory=directory, typed=typed(directory), takes=_TAKES[device])


def _compose(device: str) -> str:
    from pierhead.llm_app import llm_app, llm_service
    from pierhead.llm_config import LLMConfig

    service = llm_service(LLMConfig.model_validate(_MODELS[device]), gpus=device == "cuda")
    del service["image"]
    document = llm_app({"llm": {"build": ".", **service}}, tag=stack_files.tag())
    return _HEADER + yaml.safe_dump(document, sort_keys=False, width=120)
