"""`pierhead import ray`: what of a configuration stands in the compose file, and what is named as left out."""

# mypy: disable-error-code="attr-defined"
# It takes a decorated class for the class itself.

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pierhead import rayserve as serve
from pierhead.rayserve import import_ray
from pierhead.rayserve.exceptions import RayServeException
from pierhead.rayserve.import_ray import compose_of
from pierhead.rayserve.services import APPLICATION, PREFIXED, bound_of
from pydantic import BaseModel

from controller.files.parse import parse


@serve.deployment(num_replicas=2, max_ongoing_requests=9)
class Ranker:
    pass


@serve.deployment
class Shop:
    def __init__(self, ranker: Any) -> None:
        self.ranker = ranker


APP = Shop.bind(Ranker.bind())

CONFIG = """
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: 8080, request_timeout_s: 20}
logging_config: {log_level: WARNING, encoding: JSON, logs_dir: null, enable_access_log: true}
applications:
- name: shop
  route_prefix: /shop
  import_path: shop:app
  runtime_env:
    env_vars: {MODEL: "a$b"}
    pip: [torch]
  deployments:
  - name: Ranker
    num_replicas: auto
    autoscaling_config: {min_replicas: 1, max_replicas: 4, target_ongoing_requests: 8}
    user_config: {threshold: 0.5}
    health_check_period_s: 5
    ray_actor_options: {num_cpus: 2, num_gpus: 1, memory: 1000000000}
  - name: Shop
    max_queued_requests: 20
    graceful_shutdown_timeout_s: 40
  - name: Gone
"""


def test_a_configuration_becomes_a_compose_file() -> None:
    text, notes = compose_of(CONFIG, lambda _: APP)
    services = yaml.safe_load(text)["services"]
    command = ["python", "-m", "pierhead", "serve", "shop:app"]
    common = {"image": "${COMPOSE_PROJECT_NAME}-shop", "command": command, "scale": 0}
    secret = "${PIERHEAD_PICKLE_SECRET:?write a secret of 32 characters into .env}"
    environment = {
        "PIERHEAD_ALLOW_PICKLE": "true",
        "PIERHEAD_PICKLE_SECRET": secret,
        "MODEL": "a$$b",
        "PIERHEAD_RAY_APPLICATION": "shop",
    }
    logging = {"log_level": "warning", "encoding": "json"}
    assert services == {
        "ranker": {
            **common,
            "environment": environment,
            "deploy": {"resources": {"limits": {"cpus": "2", "memory": "1000000000b"}}},
            "x-serve": {
                "max_ongoing_requests": 9,
                "autoscale": {"min": 1, "max": 4, "target_ongoing_requests": 8.0},
                "logging": logging,
                "user_config": {"threshold": 0.5},
                "gpu": {"count": 1},
                "request_timeout_s": 20.0,
            },
        },
        "shop": {
            **common,
            "build": ".",  # by one service, or each build is a new version of the others
            "environment": environment,
            "x-serve": {
                "max_ongoing_requests": 5,
                "max_queued_requests": 20,
                "graceful_shutdown_timeout_s": 40.0,
                "logging": logging,
                "request_timeout_s": 20.0,
                "route": "/shop",
                "strip_prefix": True,
            },
        },
    }
    assert notes == [
        "http_options.host: write PIERHEAD_BIND=0.0.0.0 into .env to open the ports",
        "http_options.port: write PIERHEAD_HTTP_PORT=8080 into .env",
        "applications.shop.runtime_env.pip: write it into the Dockerfile",
        "applications.shop.deployments.Ranker.health_check_period_s: check_health runs in the replica every 10 s",
        "applications.shop.deployments.Gone: shop:app has no such deployment",
    ]
    assert [line.removeprefix("# NOT TRANSLATED: ") for line in text.splitlines() if "NOT TRANSLATED" in line] == notes


def test_the_controller_reads_the_compose_file() -> None:
    text, _ = compose_of(CONFIG, lambda _: APP)
    written = text.replace("${PIERHEAD_PICKLE_SECRET:?write a secret of 32 characters into .env}", "x" * 32)
    assert set(parse("shop", yaml.safe_load(written)).services) == {"ranker", "shop"}


def test_two_applications_with_deployments_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = """
applications:
- {name: shop, route_prefix: /, import_path: "shop:app"}
- {name: 2nd shop, route_prefix: /second, import_path: "shop:app"}
"""
    services = yaml.safe_load(compose_of(config, lambda _: APP)[0])["services"]
    assert list(services) == ["ranker", "shop", "deployment2nd-shop-ranker", "deployment2nd-shop-shop"]
    for variable in (APPLICATION, PREFIXED):
        monkeypatch.setenv(variable, services["deployment2nd-shop-shop"]["environment"][variable])
    bound = bound_of(APP)
    assert set(bound.graph()) == {"deployment2nd-shop-ranker", "deployment2nd-shop-shop"}
    assert bound.cls.__application__.name == "2nd shop"
    with pytest.raises(RayServeException, match="would both be the service deployment2nd-shop-ranker: give one app"):
        compose_of(config + '- {name: 2nd shop, route_prefix: /third, import_path: "shop:app"}', lambda _: APP)


def test_the_name_in_the_file_is_that_of_the_application_in_its_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = yaml.safe_load(compose_of(CONFIG, lambda _: APP)[0])["services"]["shop"]
    for name, value in shop["environment"].items():
        if name.startswith("PIERHEAD_RAY"):
            monkeypatch.setenv(name, value)
    bound = bound_of(APP)
    assert (bound.cls.__application__.name, set(bound.graph())) == ("shop", {"ranker", "shop"})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ModuleNotFoundError("No module named 'starlette'", name="starlette"),
            r"applications\.shop: shop:app could not be imported: there is no module starlette in .*uv run pierhead",
        ),
        (ValueError("no weights"), "could not be imported: ValueError: no weights"),
    ],
)
def test_what_cannot_be_imported_is_an_error_that_says_what_to_do(error: Exception, words: str) -> None:
    def missing(_: str) -> Any:
        raise error

    with pytest.raises(RayServeException, match=words):
        compose_of(CONFIG, missing)


def test_applications_of_ray_itself_are_an_error() -> None:
    with pytest.raises(RayServeException, match=r"it is Ray's own; docs/how-to/from-ray-serve\.md says what"):
        compose_of("applications: [{import_path: 'ray.serve.gradio_integrations:app'}]")


def test_the_image_serves_what_a_function_builds_of_the_arguments() -> None:
    text, notes = compose_of("applications: [{import_path: m.build, args: {to: $fr}}]", lambda _: lambda args: APP)
    services = yaml.safe_load(text)["services"]
    assert set(services) == {"ranker", "shop"}
    assert services["shop"]["command"][-1] == "m:build(to='$$fr')"
    assert notes == []


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ("{to-language: fr}", "args.to-language: .* found 'fr'"),
        ("{class: fr}", "args.class: .* found 'fr'"),
        ("{1: fr}", "args.1: .* found 'fr'"),
        ("{since: 2026-01-31}", r"args.since: .* found datetime.date\(2026, 1, 31\)"),
    ],
)
def test_arguments_that_no_target_can_have_are_refused(args: str, found: str) -> None:
    with pytest.raises(RayServeException, match=rf"applications\.default\.{found}"):
        compose_of(f"applications: [{{import_path: m.build, args: {args}}}]", lambda _: lambda args: APP)


class Languages(BaseModel):
    to: str = "de"


def typed(args: Languages) -> Any:
    return APP if args.to in ("de", "fr") else None


@pytest.mark.parametrize("args", ["{to: fr}", "{}"])
def test_a_function_that_builds_the_application_gets_its_arguments_as_its_annotation_says(args: str) -> None:
    text, _ = compose_of(f"applications: [{{import_path: m.build, args: {args}}}]", lambda _: typed)
    assert set(yaml.safe_load(text)["services"]) == {"ranker", "shop"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("[]", "a list `applications`"),
        ("applications: [{name: a}]", "an import_path each"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, message: str) -> None:
    with pytest.raises(RayServeException, match=message):
        compose_of(text, lambda _: APP)


def test_the_command_writes_a_file_and_names_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    import_ray.add(parser.add_subparsers())
    given = parser.parse_args(["import-ray", "serve.yaml", "-o", "compose.yaml"])
    (tmp_path / "serve.yaml").write_text("applications: [{import_path: nowhere_at_all.app, deployments: [{name: A}]}]")
    with pytest.raises(SystemExit) as ended:
        given.run(given)
    assert (ended.value.code, (tmp_path / "compose.yaml").exists()) == (2, False)
    assert "nowhere_at_all:app could not be imported: nowhere_at_all:app: there is no module" in capsys.readouterr().err
    path = f"{__name__}:APP"
    (tmp_path / "serve.yaml").write_text(f"applications: [{{import_path: {path}, host: h, deployments: []}}]")
    given.run(given)
    assert "applications.default.host: there is no counterpart" in capsys.readouterr().err
    assert list(yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]) == ["ranker", "shop"]
    secret = (tmp_path / ".env").read_text()
    assert re.fullmatch("PIERHEAD_PICKLE_SECRET=[0-9a-f]{32}\n", secret)
    (tmp_path / "compose.yaml").write_text("mine")
    with pytest.raises(SystemExit):
        given.run(given)
    assert "compose.yaml exists; nothing was written (--force overwrites)" in capsys.readouterr().err
    assert (tmp_path / "compose.yaml").read_text() == "mine"
    given.run(parser.parse_args(["import-ray", "serve.yaml", "-o", "compose.yaml", "--force"]))
    assert (tmp_path / "compose.yaml").read_text() != "mine"
    assert (tmp_path / ".env").read_text() == secret
    with pytest.raises(SystemExit):
        given.run(parser.parse_args(["import-ray", "missing.yaml"]))


@pytest.mark.parametrize(
    ("written", "environment"),
    [
        ("{enabled: false, sampling_ratio: 0.5}", {}),
        ("{enabled: true}", {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}),
        (
            "{enabled: true, sampling_ratio: 1, exporter_import_path: 'shop.traces:processors'}",
            {
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": "1",
                "PIERHEAD_TRACE_EXPORTER": "shop.traces:processors",
            },
        ),
    ],
)
def test_tracing_is_the_services_sampler_and_exporter(written: str, environment: dict[str, str]) -> None:
    config = f"tracing_config: {written}\napplications: [{{name: shop, import_path: 'shop:app'}}]\n"
    text, notes = compose_of(config, lambda _: APP)
    for service in yaml.safe_load(text)["services"].values():
        found = service["environment"]
        assert {
            name: value for name, value in found.items() if name.startswith(("OTEL_", "PIERHEAD_TRACE"))
        } == environment
    assert not any("tracing" in note for note in notes)


def test_a_share_that_is_none_is_refused() -> None:
    config = (
        "tracing_config: {enabled: true, sampling_ratio: 7}\napplications: [{name: shop, import_path: 'shop:app'}]\n"
    )
    with pytest.raises(ValueError, match="sampling_ratio: expected a number from 0 to 1, found 7"):
        compose_of(config, lambda _: APP)
