"""`pierhead new --llm`: what it writes is a project that `pierhead up` takes, and its example and its test run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from controller.errors import InvalidRequest
from controller.files.compose import ComposeProject
from controller.model.spec import GpuRequest
from controller.tool.project import project, resolved, stack_files
from controller.tool.project.built import images_of
from controller.tool.project.new_llm import new_llm
from controller.tool.project.project import Project
from tests.harness import commands

ROOT = Path(__file__).resolve().parents[3]
WORDS = ("The capital", " of France", " is Paris.")


@pytest.mark.parametrize(
    ("engine", "gpu", "device", "model"),
    [("vllm", False, "cpu", "smollm2"), ("mock", False, "none", "mock"), ("vllm", True, "cuda", "gpt-oss-20b")],
)
def test_a_new_language_model_is_a_project_that_up_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, gpu: bool, device: str, model: str
) -> None:
    chat = tmp_path / "chat"
    assert "pierhead up" in new_llm(chat, engine, gpu=gpu)
    # As `up` reads it.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found, files = Project(chat), ["compose.yaml"]
    project.check(found, files, {})
    project.settle(found, files, {}, lambda _: None)
    named = {"COMPOSE_FILE": "compose.yaml:.pierhead/stack.yaml", "PWD": str(chat)}
    spec = asyncio.run(ComposeProject(chat, named).load())
    services = spec.services
    assert spec.warnings == ()
    assert {name: (one.protocol, one.route) for name, one in services.items()} == {
        "llm-gateway": ("http", "/"),
        "llm": ("grpc", None),
    }
    assert services["llm"].gpu == (GpuRequest(1) if gpu else None)
    definition = yaml.safe_load((chat / "compose.yaml").read_text())
    gateway = definition["services"]["llm-gateway"]
    assert json.loads(gateway["environment"]["PIERHEAD_LLM_MODELS_OF_LLM"]) == {model: "llm"}
    assert f"({model})" in (chat / "README.md").read_text()
    built = {**definition["services"]["llm"], "build": {"context": str(chat)}}
    assert gateway["image"] == f"pierhead/llm-gateway:{stack_files.tag()}"
    assert set(resolved.images_of_the_stack({"llm": built, "llm-gateway": gateway})) == {
        f"pierhead/llm-{device}:{stack_files.tag()}",
        gateway["image"],
    }
    with pytest.raises(InvalidRequest, match="is there already, and not empty"):
        new_llm(chat)


def test_only_a_save_of_ones_own_classes_replaces_the_replicas(tmp_path: Path) -> None:
    new_llm(tmp_path / "chat", "mock")
    chat = tmp_path / "chat"
    service = {"build": {"context": str(chat), "dockerfile": "Dockerfile"}, "x-serve": {}}
    [image] = images_of({"name": "chat", "services": {"llm": service}}, tmp_path / "chat" / ".pierhead")
    assert {file.relative_to(chat).as_posix() for file in image.files()} == {
        "my_package/__init__.py",
        "requirements.txt",
    }


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/language-models.md", "docs/how-to/own-repository.md"])
def test_the_commands_that_the_pages_show_write_a_project(tmp_path: Path, page: str) -> None:
    shown = re.findall(r"\bpierhead new (--llm[ a-z-]*)", (ROOT / page).read_text())
    assert shown
    for number, words in enumerate(shown):
        (tmp_path / str(number)).mkdir()
        done = new(tmp_path / str(number), *words.split())
        assert done.returncode == 0, done.stderr


def test_the_page_shows_the_dockerfile_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIERHEAD_TAG", raising=False)
    new_llm(tmp_path / "chat")
    written = re.sub("(?m)^#.*\n", "", (tmp_path / "chat" / "Dockerfile").read_text())
    page = (ROOT / "docs" / "how-to" / "language-models.md").read_text()
    assert f"```dockerfile\n{written}```" in page


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "DIRECTORY: name the directory to create. Example: pierhead new shop"),
        ("--gpu chat", "--engine and --gpu are for language models: add --llm"),
        (
            "--llm --engine openai",
            '--engine: expected "vllm" or "mock", found "openai"; `pierhead llm build` takes every',
        ),
        ("--llm --engine mock --gpu", "--gpu: the engine mock uses no GPU; leave one of the two out"),
    ],
)
def test_what_does_not_go_together_is_refused_and_nothing_is_written(tmp_path: Path, words: str, told: str) -> None:
    done = new(tmp_path, *words.split())
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert told in done.stderr


def test_without_a_name_it_is_a_chat(tmp_path: Path) -> None:
    done = new(tmp_path, "--llm", "--engine", "mock")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("chat: compose.yaml, ")
    assert (tmp_path / "chat" / "my_package" / "__init__.py").is_file()


def new(directory: Path, *words: str) -> commands.Ended:
    env = {"PYTHONPATH": f"{ROOT}:{ROOT}/services/runtime", "PATH": "/usr/bin:/bin"}
    return commands.run([sys.executable, "-m", "controller.tool.command", "new", *words], 60, directory, env)


# ------------------------------------------------------------------------------------------------ its example, its test


class OpenAIsServer(BaseHTTPRequestHandler):
    """One model, whose answer is WORDS."""

    def do_GET(self) -> None:
        self._answer(json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}), "application/json")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "m"
        assert asked["stream"]
        chunks = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in WORDS]
        events = [*map(json.dumps, chunks), "[DONE]"]
        self._answer("".join(f"data: {event}\n\n" for event in events), "text/event-stream")

    def _answer(self, text: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def openais_server(host: str = "127.0.0.1") -> Iterator[int]:
    """Its port."""
    server = ThreadingHTTPServer((host, 0), OpenAIsServer)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("lines", "address"),
    [
        ("PIERHEAD_TLS=off", "http://127.0.0.1:8000"),
        ("PIERHEAD_TLS=files\nPIERHEAD_HTTPS_PORT=9443", "https://127.0.0.1:9443"),
        ("PIERHEAD_TLS=acme\nPIERHEAD_BIND=0.0.0.0", "https://127.0.0.1:8443"),
    ],
)
def test_its_client_asks_over_https_where_the_stack_has_it(tmp_path: Path, lines: str, address: str) -> None:
    chat = tmp_path / "chat"
    new_llm(chat, "mock")
    (chat / ".env").write_text(f"PIERHEAD_HTTP_PORT=8000\n{lines}\n")
    found = commands.run([sys.executable, "-c", "import chat; print(chat.address())"], 60, chat, dict(os.environ))
    assert (found.returncode, found.stdout) == (0, f"{address}\n"), found.stderr


STARTED_STACK = """
import types
import pytest

@pytest.fixture
def pierhead_stack():
    return types.SimpleNamespace(base_url="http://127.0.0.1:{port}")
"""


def test_its_client_prints_the_answer_and_its_test_passes(tmp_path: Path) -> None:
    chat = tmp_path / "chat"
    new_llm(chat, "mock")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/services/runtime:{chat}", "PIERHEAD_HTTP_PORT": ""}
    with openais_server() as port:
        (chat / ".env").write_text(f"COMPOSE_PROJECT_NAME=chat\nPIERHEAD_HTTP_PORT={port}\n")
        asked = commands.run([sys.executable, "chat.py", "What", "is it?"], 60, chat, env)
        assert (asked.returncode, asked.stdout) == (0, f"{''.join(WORDS)}\n"), asked.stderr
        (chat / "conftest.py").write_text(STARTED_STACK.format(port=port))
        tested = commands.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], 100, chat, env)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "1 passed" in tested.stdout


@pytest.mark.parametrize(
    ("written", "listens"),
    [("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("[::]", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")],
)
def test_its_client_asks_the_address_that_the_stack_listens_on(tmp_path: Path, written: str, listens: str) -> None:
    chat = tmp_path / "chat"
    new_llm(chat, "mock")
    with openais_server(listens) as port:
        (chat / ".env").write_text(f"# Ports\nPIERHEAD_HTTP_PORT={port}\nPIERHEAD_BIND={written}\n")
        asked = commands.run([sys.executable, "chat.py", "What", "is it?"], 60, chat, dict(os.environ))
    assert (asked.returncode, asked.stdout) == (0, f"{''.join(WORDS)}\n"), asked.stderr
