"""`pierhead bundle`: what explains a stack, in one file, without secrets."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest

from controller.tool import gather
from controller.tool.api import ControllerApi
from controller.tool.bundle import (
    MOST_OF_SECTION,
    NO_API,
    REMOVED,
    BundleSection,
    bundle,
    contents,
    is_secret,
    secrets_of,
    without_secrets,
)
from controller.tool.client import ControllerClient
from controller.tool.project.programs import Done
from tests.fakes.fake_engine import Behaviour
from tests.fakes.fake_programs import FakePrograms
from tests.unit.controller.control import Control
from tests.unit.controller.test_cli import Command, served
from tests.unit.controller.worlds import service

SECRETS = {
    "a variable": "PIERHEAD_API_TOKEN=hunter22",
    "JSON": '{"db_password": "hunter22", "port": 5432}',
    "a space in JSON": '{"apiKey": "hunter 22"}',
    "YAML": "  secret: hunter22",
    "a query": "GET /x?api_key=hunter22&page=2",
    "a header": "authorization: Bearer hunter22hunter22",
    "a header without its name": "sent Bearer hunter22hunter22",
    "a URL": "connect to redis://user:hunter22@cache:6379/0",
    "a key of an API": "used sk-hunter22hunter22hunter22",
    "a model hub's": "with hf_hunter22hunter22hunter",
    "a token of the stack": "ph_hunter22hunter22hunter22",
    "a JSON Web Token": "got eyJhunter22hunter22.eyJhunter22hunter22.hunter22",
    "a private key": "-----BEGIN RSA PRIVATE KEY-----\nhunter22\n-----END RSA PRIVATE KEY-----",
    "one of .env that no name tells": "my dog is called Zorro17",
    "JSON in a text": r'said "{\"db_password\": \"hunter22\", \"port\": 1}"',
    "JSON in a text in a text": r'"{\\\"db_password\\\": \\\"hunter22\\\"}"',
    "a quote in a value": r'{"password": "x\"hunter22", "port": 1}',
    "a quote in JSON in a text": r'"{\"password\": \"x\\\"hunter22\"}"',
    "a list": "passwords: [a, 'hunter22', b]",
    "an object": '{"credentials": {"a": {"b": 1}, "c": "hunter22"}}',
    "another scheme": 'Authorization: Digest username="ann", response="hunter22"',
    "a header in quotes": '"Authorization": "Digest hunter22, x=hunter22"',
    "a cookie": "set-cookie: theme=dark; session=hunter22; Path=/",
    "an option": "python serve.py --password hunter22 --port 1",
    "an option in a list": "['serve', '--db-password', 'hunter22']",
    "a comparison": 'password == "hunter 22"',
    "a phrase": "passphrase: correct horse hunter22",
    "a pass": "DB_PASS=hunter22",
    "a key": "signing_key: hunter22",
    "a key of a vendor": "OPENAI_KEY=hunter22",
    "an auth": "http_auth=ann:hunter22",
    "tokens": "SOME_API_TOKENS=hunter22,x",
    "a key of AWS": "used AKIAHUNTER22HUNTER22",
    "a token of GitHub": "with ghs_hunter22hunter22hunter22",
    "a new token of GitHub": "with github_pat_11AAhunter22_hunter22hunter22",
    "a token of GitLab": "with glpat-hunter22hunter22hunter",
    "a token of Slack": "with xoxb-hunter22-hunter22",
    "an address of Slack": "posted to https://hooks.slack.com/services/T0/B0/hunter22",
    "a slash in a URL": "connect to redis://ann:p/hunter22@cache:6379/0",
    "two signs in a URL": "connect to redis://ann:p@hunter22@cache:6379/0",
    "a user alone in a URL": "cloned https://hunter22@git.example.com/x.git",
    "a private key that is cut": "-----BEGIN PRIVATE KEY-----\nweb-1 | hunter22\nweb-1 | hunter22",
}


@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS)
def test_secrets_are_removed(text: str) -> None:
    found = without_secrets(text, secrets_of({"DOG_PASSWORD": "Zorro17", "PORT": "5432"}, {}))
    assert REMOVED in found
    assert "hunter" not in found.lower()
    assert "Zorro17" not in found


def test_what_is_no_secret_stays() -> None:
    text = (
        '{"tokens_per_minute": 600, "name": "web", "key": 3}\nauthor: ann\n'
        "web: 1 -> 2 replicas: 14 tokens/s, http://web:8080/secretary\n"
        "shop-hf-embedder-1a2b3c4d-1 and shop-sk-learn-model-1a2b3c4d-1 are ready: tokenizer: qwen, max_tokens: 4096\n"
        "MAX_TOKENS=4096 PWD=/home/ann/shop x-serve.auth: jwt x-shard-key: 3 http://web:8080/a, mail ann@example.com\n"
        "basic authentication; to https://example.com/users/ann@example.com"
    )
    kept = without_secrets(text)
    assert kept == text


def test_the_values_of_env_are_secrets_but_for_the_stacks_own_settings() -> None:
    written = {
        "SHOP": "a value of ours",
        "SHORT": "short",
        "DEBUG_TOKEN": "true",
        "PIERHEAD_ACCESS_LOG": "sampled1",
        "COMPOSE_FILE": "compose.yaml",
        "COMPOSE_PROJECT_NAME": "the-shop",
        "TITLE": "the-shop",
        "PIERHEAD_API_TOKEN": "hunter22",
        "PIERHEAD_API_TOKENS": "ci:scale:hash",
        "PIERHEAD_WEBHOOK": "https://example.com/hook",
        "PIERHEAD_ALERT_SLACK": "https://example.com/chat",
        "PIERHEAD_ALERT_SMTP_PASSWORD": "swordfish",
    }
    environment = {"HF_TOKEN": "hugging", "HOME": "/home/ann", "PWD": "/home/ann/shop", "OLDPWD": "/home/ann/old"}
    assert secrets_of(written, environment) == {
        *("a value of ours", "hunter22", "ci:scale:hash", "https://example.com/hook", "hugging"),
        *("https://example.com/chat", "swordfish"),
    }


def test_a_secret_is_removed_as_json_has_it_too() -> None:
    known = {'five"quotes\\ä'}
    for text in (*known, json.dumps(*known), json.dumps(*known, ensure_ascii=False)):
        assert "quotes" not in without_secrets(text, known)


def test_secrets_are_removed_from_documents_before_they_are_json() -> None:
    document = {
        "db_password": {"hosts": ["hunter22"], "port": 1},
        "tokens": ["x-hunter22-y"],
        "has_token": True,
        "message": 'Authorization: Digest username="ann", response="hunter22"',
        "tokens_per_minute": 3,
    }
    text = bundle([BundleSection("services", document)], {"x-hunter22-y"}).partition("\n")[2]
    assert json.loads(text) == {
        **document, "db_password": REMOVED, "tokens": [REMOVED], "message": f"Authorization: {REMOVED}"
    }  # fmt: skip


def test_names_of_secrets() -> None:
    assert not any(map(is_secret, ("key", "tokens", "author", "PWD", "x-serve.auth", "TOKENIZERS_PARALLELISM")))
    assert all(map(is_secret, ("signing_key", "apiKey", "API_TOKENS", "DB_PWD", "PGPASSWORD", "PIERHEAD_WEBHOOK")))
    assert all(map(is_secret, ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")))


def test_a_long_section_keeps_its_end() -> None:
    text = bundle([BundleSection("logs", "x" * 2_000_000 + "the end"), BundleSection("plan", "nothing to do")])
    assert len(text) < 600_000
    assert "the end\n" in text
    assert text.endswith("===== plan\nnothing to do\n")


def test_a_section_is_cut_at_the_beginning_of_a_line_after_its_secrets_are_removed() -> None:
    line = 'password="hunter22 hunter22 hunter22 hunter22"\n'
    for more in range(len(line)):
        text = bundle([BundleSection("logs", line * (MOST_OF_SECTION // 20) + "x" * more)])
        assert "hunter22" not in text
        assert "\n(the beginning is left out)\npassword=" in text


@pytest.mark.parametrize("text", ["x", "a-", "token", "-", "password: ", "://a", '\\"', "-----BEGIN PRIVATE KEY-----a"])
def test_a_long_text_takes_a_time_that_is_in_proportion(text: str) -> None:
    begin = time.process_time()
    without_secrets(text * (2_000_000 // len(text)))
    assert time.process_time() - begin < 4, "about 0.5 s where nothing else runs; minutes where it is not linear"


def test_without_the_api_it_has_what_the_programs_say() -> None:
    programs = FakePrograms({"docker version": "Engine 28\n", "logs --tail 200 shop-controller-1": "a traceback\n"})
    api = ControllerApi(ControllerClient("http://127.0.0.1:9"))
    sections = list(gather.sections(api, "shop", programs))
    text = bundle(sections)
    assert "===== engine\nEngine 28\n" in text
    assert "===== logs of controller\na traceback\n" in text
    for title in ("status", "plan", "events", "services", "routes"):
        assert f"===== {title}\nnot available: the controller does not answer at http://127.0.0.1:9 (" in text
    assert contents(sections) == (
        "about, engine, logs of controller; not available: Compose, what the engine keeps, containers, "
        "logs of haproxy, logs of prometheus, status, plan, events, services, routes"
    )


def test_a_part_that_runs_by_choice_has_its_logs_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("PIERHEAD_ALERT_WEBHOOK=http://pager.shop.example/hook\n")
    monkeypatch.setenv("PIERHEAD_PROJECT_DIR", str(tmp_path))
    programs = FakePrograms({"logs --tail 200 shop-alertmanager-1": "Notify attempt failed\n"})
    api = ControllerApi(ControllerClient("http://127.0.0.1:9"))
    found = {section.title: section.content for section in gather.sections(api, "shop", programs)}
    assert found["logs of alertmanager"] == "Notify attempt failed\n"
    assert "logs of acme" not in found


def test_the_reason_why_the_api_cannot_be_asked_is_in_its_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_API, "the stack of shop does not run")
    api = ControllerApi(ControllerClient("http://127.0.0.1:9"))
    text = bundle(gather.sections(api, "shop", FakePrograms({"docker": Done(1, errors="no engine")})))
    assert "===== status\nnot available: the stack of shop does not run\n" in text
    assert "===== engine\nnot available: no engine\n" in text


async def test_the_command_writes_a_file_where_the_controller_is_down(tmp_path: Path) -> None:
    file = tmp_path / "stack.txt"
    done = await Command("http://127.0.0.1:9")("bundle", str(file))
    assert (done.code, done.err) == (0, "")
    assert "status, plan, events, services, routes. Read it before you send it." in done.out
    assert "===== status\nnot available: the controller does not answer" in file.read_text()


async def test_the_command(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web"), service("api", replicas=1))
    control.engine.behaviours["web"] = Behaviour(output="password=hunter22\nserving\n")
    async with served(control, web=2, api=1) as pierhead:
        file = tmp_path / "stack.txt"
        done = await pierhead("bundle", str(file))
        assert (done.code, done.err) == (0, ""), done
        assert done.out.startswith(f"{file} has ")
        text = file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        for title in ("about", "status", "plan", "events", "services", "routes", "revisions of web", "logs of api"):
            assert f"===== {title}\n" in text
        assert "hunter22" not in text
        assert "| serving" in text
        rows = text.split("===== services\n")[1].split("=====")[0]
        assert json.loads(rows)["project"] == "p"
        again = await pierhead("bundle", str(file))
        assert (again.code, "exists; choose another name" in again.err) == (2, True)
        assert "===== plan" in (await pierhead("bundle", "-")).out
        assert (await pierhead("bundle", str(tmp_path / "none" / "x"))).code == 1
