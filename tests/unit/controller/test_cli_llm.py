"""`pierhead llm build`: what it writes is what the controller reads, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.tool.project import project, stack_files
from tests.harness import commands

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(*arguments: str, code: int = 0, cwd: Path = ROOT, project: Path | None = None) -> str:
    named = {} if project is None else {"PIERHEAD_PROJECT_DIR": str(project)}
    env = {"PYTHONPATH": f"{ROOT}:{ROOT}/services/runtime", "PATH": "/usr/bin:/bin", **named}
    done = commands.run([sys.executable, "-m", "controller.tool.command", "llm", "build", *arguments], 60, cwd, env)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def gpus_of(service: dict[str, Any]) -> int:
    """How many GPUs a service of a compose file reserves for each replica."""
    if "deploy" not in service:
        return 0
    return int(service["deploy"]["resources"]["reservations"]["devices"][0]["count"])


def test_the_readmes_command_writes_a_gateway_and_a_service_with_a_gpu() -> None:
    shown = re.search(r"`pierhead llm build (?P<options>.*) --file qwen\.yaml`", README)
    assert shown is not None
    document = yaml.safe_load(run(*shown["options"].split()))
    gateway, service = (document["services"][name] for name in ("llm-gateway", "llm-qwen2-5-7b-instruct"))
    assert json.loads(gateway["environment"]["PIERHEAD_LLM_MODELS_OF_LLM_QWEN2_5_7B_INSTRUCT"]) == {
        "qwen2.5-7b-instruct": "llm-qwen2-5-7b-instruct"
    }
    assert gateway["x-serve"]["route"] == "/"
    assert gpus_of(service) == 1
    assert service["x-serve"]["replicas"] == 2
    assert service["x-serve"]["llm"] == {
        "model_loading": {"model_id": "qwen2.5-7b-instruct", "model_source": "Qwen/Qwen2.5-7B-Instruct"}
    }
    assert service["scale"] == gateway["scale"] == 0


def test_every_option_arrives() -> None:
    options = (
        "--model s3://bucket/models/big --name big --service big-model --gpus 4 --accelerator H100 --replicas 1 "
        "--max-replicas 3 --lora s3://bucket/adapters --policy power_of_two --engine-arg max-model-len=8192 "
        "--engine-arg dtype=bfloat16"
    )
    service = yaml.safe_load(run(*options.split()))["services"]["big-model"]
    block = service["x-serve"]
    assert block["llm"] == {
        "model_loading": {"model_id": "big", "model_source": "s3://bucket/models/big"},
        "tensor_parallel_size": 4,
        "accelerator_type": "H100",
        "engine_kwargs": {"max_model_len": 8192, "dtype": "bfloat16"},
        "lora": {"dynamic_lora_loading_path": "s3://bucket/adapters", "max_num_adapters_per_replica": 8},
    }
    assert block["autoscale"] == {"min": 1, "max": 3, "target_ongoing_requests": 64}
    assert block["router"] == {"policy": "power_of_two"}
    assert (gpus_of(service), service["shm_size"]) == (4, "16gb")


def test_what_compose_would_take_for_a_variable_arrives_as_it_is() -> None:
    template = "{% for $x in y %} ${HOME} $$ {% endfor %}"
    written = run("--model", "/m/q", "--engine-arg", f"chat_template={template}", "--lora", "/ad$HOME")
    llm = yaml.safe_load(written)["services"]["llm-q"]["x-serve"]["llm"]
    assert llm["engine_kwargs"] == {"chat_template": template.replace("$", "$$")}
    assert llm["lora"]["dynamic_lora_loading_path"] == "/ad$$HOME"


def test_a_file_is_written_where_the_controller_finds_it_and_over_another_only_with_force(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    apps, mine = clone / "compose" / "apps", clone / "mine" / "apps"
    for directory in (apps, mine, clone / "compose" / "machine"):
        directory.mkdir(parents=True)
    (clone / "compose" / "machine" / "engine.sh").touch()
    (apps / "away.yaml").symlink_to(tmp_path / "away.yaml")
    said = run("--model", "/m/q", "--file", "q.yaml", cwd=apps, project=clone)
    assert said == "q.yaml: service llm-q serves q. Start it: make up APPS=q\n"
    before = (apps / "q.yaml").read_text()
    assert "--file: q.yaml is there already" in run("--model", "/m/r", "--file", "q.yaml", code=2, cwd=apps)
    assert (apps / "q.yaml").read_text() == before
    run("--model", "/m/r", "--file", "q.yaml", "--force", cwd=apps)
    assert "/m/r" in (apps / "q.yaml").read_text()
    said = run("--model", "/m/q", "--file", str(mine / "q.yaml"), project=clone)
    assert said.endswith("Start it: add mine/apps/q.yaml to COMPOSE_FILE in .env, then make up\n")
    for outside in (tmp_path / "q.yaml", apps / "away.yaml"):
        said = run("--model", "/m/q", "--file", str(outside), code=2, project=clone)
        assert f"--file: {outside} is outside of {clone}, and the controller sees only that" in said
        assert not outside.exists()


@pytest.mark.parametrize("is_project", [False, True], ids=["empty", "project"])
def test_in_any_directory_it_is_a_project_that_pierhead_up_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_project: bool
) -> None:
    """No file of the clone, and none of `.pierhead`, is named: the images are, and `pierhead up` builds them."""
    shop = tmp_path / "shop"
    shop.mkdir()
    known = shop if is_project else None
    said = run("--model", "/m/q", "--file", "compose.yaml", cwd=shop, project=known)
    assert said.endswith("Start it: pierhead up\n")
    said = run("--model", "/m/r", "--file", "r.yaml", cwd=shop, project=known)
    assert said.endswith("Start it: add r.yaml to COMPOSE_FILE in .env, then pierhead up\n")
    for file in ("compose.yaml", "r.yaml"):
        document = yaml.safe_load((shop / file).read_text())
        assert document.keys() == {"services", "volumes"}
        assert not [name for name, service in document["services"].items() if "build" in service]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = project.find(shop, {})
    files = ["compose.yaml", "r.yaml"]
    project.check(found, files, {})
    project.settle(found, files, {}, lambda _: None)
    assert project.validate(shop, {"COMPOSE_FILE": ":".join(files)}) == ()
    assert project.validate(shop, {"COMPOSE_FILE": ":".join([*files, ".pierhead/stack.yaml"])}) == ()


def test_models_of_one_kind_share_an_image() -> None:
    def image(*options: str, project: Path | None = ROOT) -> set[str]:
        services = yaml.safe_load(run("--model", "/m/q", *options, project=project))["services"]
        return {service["image"] for service in services.values()}

    gateway = "pierhead/llm-gateway:${PIERHEAD_TAG:-latest}"
    assert image() == {gateway, "pierhead/llm-cuda:${PIERHEAD_TAG:-latest}"}
    assert image("--gpus", "0") == {gateway, "pierhead/llm-cpu:${PIERHEAD_TAG:-latest}"}
    assert image("--engine", "mock") == {gateway, "pierhead/llm-none:${PIERHEAD_TAG:-latest}"}
    tag = stack_files.release()  # as in the Dockerfile of a new project: the controller has a PIERHEAD_TAG of its own
    assert image(project=None) == {f"pierhead/llm-gateway:{tag}", f"pierhead/llm-cuda:{tag}"}
    listed = yaml.safe_load((ROOT / "compose" / "images.yaml").read_text())["services"]
    assert {name: service["image"] for name, service in listed.items()} == {
        name: f"pierhead/{name}:${{PIERHEAD_TAG:-latest}}"
        for name in ("python", "llm-gateway", "llm-none", "llm-cpu", "llm-cuda")
    }
    for device in ("none", "cpu", "cuda"):
        assert listed[f"llm-{device}"]["build"]["args"] == {"PIERHEAD_LLM_DEVICE": device}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model ./qwen", "model_loading.model_source: expected a directory inside the container"),
        ("--model /m/q --engine VLLM", 'engine: expected "vllm", "openai", "mock", or an import path'),
        ("--model /m/q --engine openai", "x-serve.llm.engine_kwargs.base_url: expected the address of the"),
        ("--model /m/q --engine-arg max_model_len", "--engine-arg: expected KEY=VALUE"),
        ("--model /m/q --engine-arg a-b=1 --engine-arg a_b=2", "--engine-arg: a_b is given twice"),
        ("--model /m/q --policy nearest", "x-serve.router.policy: expected one of"),
        ("--model /m/q --replicas 4 --max-replicas 2", "x-serve.autoscale.max: expected an integer"),
        ("--model /m/q --service My_Service", "expected a service name of lower-case letters"),
        ("--model /m/gateway", "expected another name, as the gateway of the app has this one"),
    ],
)
def test_what_the_controller_would_refuse_is_not_written(tmp_path: Path, options: str, words: str) -> None:
    file = tmp_path / "app.yaml"
    assert words in run(*options.split(), "--file", str(file), code=2)
    assert not file.exists()
