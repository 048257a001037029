"""`python -m pierhead build` of an application of Ray Serve."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from pierhead.__main__ import main

from controller.files.parse import parse

BUILDER = """
from pydantic import BaseModel
from pierhead import rayserve as serve

class Arguments(BaseModel):
    message: str
    replicas: int = 2

@serve.deployment
class Hello:
    def __init__(self, message): ...

def build(args: Arguments):
    return Hello.options(name=args.message, num_replicas=args.replicas).bind(args.message)
"""

SOURCE = """
from pierhead import rayserve as serve

@serve.deployment(num_replicas=2)
class Model: ...

@serve.deployment
class Ingress:
    def __init__(self, model): ...

app = Ingress.bind(Model.bind())
"""


def test_the_compose_file_allows_pickles_and_has_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app_for_build.py").write_text(SOURCE)
    try:
        main(["build", "app_for_build:app", "-o", "compose.yaml"])
    finally:
        sys.modules.pop("app_for_build", None)
    text = (tmp_path / "compose.yaml").read_text()
    services = yaml.safe_load(text)["services"]
    assert {name: service["x-serve"] for name, service in services.items()} == {
        "ingress": {"max_ongoing_requests": 5, "route": "/"},
        "model": {"max_ongoing_requests": 5, "replicas": 2},
    }
    for service in services.values():
        assert service["environment"]["PIERHEAD_ALLOW_PICKLE"] == "true"
    secret = (tmp_path / ".env").read_text().removeprefix("PIERHEAD_PICKLE_SECRET=").strip()
    assert len(secret) == 32
    assert secret not in text
    assert "wrote PIERHEAD_PICKLE_SECRET" in capsys.readouterr().err
    words = "${PIERHEAD_PICKLE_SECRET:?write a secret of 32 characters into .env}"
    assert set(parse("app", yaml.safe_load(text.replace(words, secret))).services) == set(services)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("build(message='hello')", {"max_ongoing_requests": 5, "replicas": 2, "route": "/"}),
        ("build(message='hello', replicas='3')", {"max_ongoing_requests": 5, "replicas": 3, "route": "/"}),
        ("build('hello')", "expected module:function(key="),
        ("build(message=Hello)", "expected module:function(key="),
    ],
)
def test_a_function_builds_the_application_of_the_arguments_in_the_target(
    target: str, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "builder_for_build.py").write_text(BUILDER)
    try:
        main(["build", f"builder_for_build:{target}"])
    except SystemExit:
        assert str(expected) in capsys.readouterr().err
    else:
        assert yaml.safe_load(capsys.readouterr().out)["services"]["hello"]["x-serve"] == expected
    finally:
        sys.modules.pop("builder_for_build", None)
