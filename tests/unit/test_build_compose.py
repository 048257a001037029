"""`python -m pierhead build`: the compose file is one that the controller's parser takes, word for word."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pierhead import Service, endpoint
from pierhead.__main__ import main
from pierhead.compose_names import own_image
from pierhead.dev.build import compose_text, yaml_flow
from pierhead.runner.options import read_words
from pierhead.runner.runner import NoApplication

from controller.files.parse import parse

WORDS: dict[str, Any] = {
    "replicas": 3,
    "max_ongoing_requests": 7,
    "max_queued_requests": 0,
    "request_timeout_s": 2.5,
    "graceful_shutdown_timeout_s": 1e3,
    "router": {"policy": "prefix", "policy_kwargs": {"match_rate_threshold": 1e-05}},
    "backpressure": {"status_code": 429, "retry_after_s": 3},
    "user_config": {"on": "off", "price": "$5", "text": 'a: "b" # c', "many": [1, None, True, "ü☃𝄞\x85"], "": {}},
    "debug": True,
    "autoscale": None,
}


class Scorer(Service, **WORDS):
    async def score(self, user: int) -> float:
        return user / 2


class Shop(Service, route="/shop", strip_prefix=True, rollout={"bake_s": 0}):
    def __init__(self, scorer: Scorer, other: Scorer) -> None:
        pass

    @endpoint("GET", "/")
    async def get(self, request: Any) -> Any:
        raise NotImplementedError


scorer = Scorer.bind()
shop: Any = Shop.bind(scorer, scorer)


def unescaped(value: Any) -> Any:
    """As Compose passes a file on."""
    if isinstance(value, dict):
        return {key.replace("$$", "$"): unescaped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [unescaped(each) for each in value]
    return value.replace("$$", "$") if isinstance(value, str) else value


class TestComposeFile:
    def test_it_round_trips_through_the_controller_s_parser(self) -> None:
        config = yaml.safe_load(compose_text(shop, "app:shop", "app"))
        services = config["services"]
        assert unescaped(services["scorer"]["x-serve"]) == WORDS
        spec = parse("app", unescaped(config))
        found = spec.services
        assert (list(found), spec.warnings) == (["scorer", "shop"], ())
        assert (found["scorer"].replicas, found["scorer"].max_ongoing_requests) == (3, 7)
        assert (found["scorer"].backpressure.status_code, found["scorer"].request_timeout_s) == (429, 2.5)
        assert found["scorer"].user_config == parse_user_config(WORDS["user_config"])
        assert (found["shop"].route, found["shop"].strip_prefix) == ("/shop", True)
        assert (found["shop"].callees, found["shop"].rollout.bake_s) == (("scorer",), 0)
        assert [each.has_build for each in found.values()] == [False, True]

    def test_how_it_reads(self) -> None:
        class Door(Service, route="/"):
            @endpoint("GET", "/")
            async def get(self, request: Any) -> Any:
                raise NotImplementedError

        bound: Any = Door.bind()
        assert compose_text(bound, "my_app.door:door", own_image("my_app.door")) == (
            "# The services of my_app.door:door, made by `python -m pierhead build my_app.door:door`. Edit it as you "
            "like.\nservices:\n  door:\n    image: ${COMPOSE_PROJECT_NAME}-my-app-door\n    build: .\n"
            "    scale: 0 # Compose builds the image; the controller starts the replicas\n"
            "    x-serve:\n      route: /\n"
        )

    def test_variables_of_the_class(self) -> None:
        class Sealed(Service):
            __environment__ = {"ALLOWED": "true", "SECRET": "${SECRET:?write one}"}  # noqa: RUF012 - read only

        bound: Any = Sealed.bind()
        service = yaml.safe_load(compose_text(bound, "app:sealed", "app"))["services"]["sealed"]
        assert service["environment"] == {"ALLOWED": "true", "SECRET": "${SECRET:?write one}"}

    @pytest.mark.parametrize(
        ("name", "words", "said"),
        [
            ("A", {"replicas": "two"}, r"class A \(a\): replicas: expected an integer, found 'two'"),
            ("A", {"strip_prefix": 1}, r"class A \(a\): strip_prefix: expected True or False, found 1"),
            ("A", {"request_timeout_s": True}, r"class A \(a\): request_timeout_s: expected a number, found True"),
            ("A", {"grpc_services": "a.B"}, r"class A \(a\): grpc_services: expected a list, found 'a.B'"),
            ("Controller", {}, r"class Controller: the stack has a service called controller \(haproxy, .* call the"),
        ],
    )
    def test_what_the_controller_would_refuse(self, name: str, words: dict[str, Any], said: str) -> None:
        metaclass: Any = type(Service)
        refused = metaclass(name, (Service,), {}, **words)
        with pytest.raises(NoApplication, match=said):
            compose_text(refused.bind(), "app:refused", "app")

    def test_a_value_that_no_file_can_hold(self) -> None:
        class Odd(Service, user_config={"when": {1, 2}}):
            pass

        bound: Any = Odd.bind()
        with pytest.raises(NoApplication, match=r"class Odd \(odd\): user_config: .* JSON can hold, found \{1, 2\}"):
            compose_text(bound, "app:odd", "app")


def parse_user_config(config: object) -> str:
    from controller.files.serve_block import user_config_text

    assert isinstance(config, dict)
    return user_config_text(config)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(JSON)
def test_any_json_is_what_it_was(value: Any) -> None:
    assert unescaped(yaml.safe_load(f"x: {yaml_flow(value)}"))["x"] == value


class TestCommand:
    @pytest.fixture(autouse=True)
    def project(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "built.py").write_text(
            "from pierhead import Service\nprint('imported')\n"
            "class Scorer(Service, replicas=2):\n    async def score(self, user: int) -> float:\n        return 1.0\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, "built", raising=False)
        return tmp_path

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("build", "build: app:app: "),
            (
                "dev --port 65536",
                "dev: argument --port: expected a port from 0 to 65535, found '65536' (`pierhead dev --",
            ),
            ("build --nothing", "build: unrecognized arguments: --nothing (`pierhead build --help` explains it)"),
            ("build accepted:Accepted -o none/compose.yaml", "none/compose.yaml cannot be written: No such file"),
            ("proto refused:Refused", "proto: refused.Refused.score(user): object cannot travel; str, int, "),
            ("nothing", "argument command: invalid choice: 'nothing'"),
            ("import", "pierhead import-ray: the following arguments are required: file"),
            ("import ray none.yaml", "none.yaml: No such file or directory"),
        ],
    )
    def test_bad_input_is_reported_in_one_line(
        self, capsys: pytest.CaptureFixture[str], project: Path, words: str, said: str
    ) -> None:
        method = "    async def score(self, user: object) -> float:\n        return 1.0\n"
        (project / "refused.py").write_text(f"from pierhead import Service\nclass Refused(Service):\n{method}")
        (project / "accepted.py").write_text("from pierhead import Service\nclass Accepted(Service):\n    pass\n")
        with pytest.raises(SystemExit) as ended:
            main(words.split())
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2
        assert said in line
        assert line.startswith(("pierhead", said))

    def test_it_prints_the_file_and_nothing_else(self, capsys: pytest.CaptureFixture[str]) -> None:
        main(["build", "built:Scorer", "--image", "example/scorer"])
        told = capsys.readouterr()
        assert yaml.safe_load(told.out)["services"]["scorer"] == {
            "image": "example/scorer", "build": ".", "scale": 0, "x-serve": {"replicas": 2},
        }  # fmt: skip
        assert told.err == "imported\n"

    def test_it_writes_files_and_overwrites_none(self, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
        command = ["build", "built:Scorer", "-o", "compose.yaml", "--dockerfile"]
        main(command)
        assert read_words([project / "compose.yaml"]) == {"scorer": {"replicas": 2}}
        lines = (project / "Dockerfile").read_text().splitlines()
        assert lines[0].startswith("FROM pierhead/python:")
        assert "RUN python -m pierhead contract built:Scorer" in lines
        assert lines[-1] == 'CMD ["python", "-m", "pierhead", "serve", "built:Scorer"]'
        assert ".*" in (project / ".dockerignore").read_text()
        (project / "compose.yaml").write_text("mine")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        assert "compose.yaml and Dockerfile exists; nothing was written (--force overwrites)" in capsys.readouterr().err
        assert (project / "compose.yaml").read_text() == "mine"
        main([*command, "--force"])
        assert (project / "compose.yaml").read_text() != "mine"
