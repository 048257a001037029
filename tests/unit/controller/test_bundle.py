"""`pierhead bundle`: what explains a stack, in one file, without secrets."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from controller.tool.bundle import REMOVED, bundle, secrets_of, without_secrets
from tests.fakes.fake_engine import Behaviour
from tests.unit.controller.control import Control
from tests.unit.controller.test_cli import served
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
}


@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS)
def test_secrets_are_removed(text: str) -> None:
    found = without_secrets(text, secrets_of({"DOG_PASSWORD": "Zorro17", "PORT": "5432"}))
    assert REMOVED in found
    assert "hunter" not in found
    assert "Zorro17" not in found


def test_what_is_no_secret_stays() -> None:
    text = (
        '{"tokens_per_minute": 600, "name": "web", "key": 3}\nauthor: ann\n'
        "web: 1 -> 2 replicas: 14 tokens/s, http://web:8080/secretary"
    )
    kept = without_secrets(text)
    assert kept == text


def test_a_long_section_keeps_its_end() -> None:
    text = bundle([("logs", "x" * 2_000_000 + "the end"), ("plan", "nothing to do")])
    assert len(text) < 600_000
    assert "the end\n" in text
    assert text.endswith("===== plan\nnothing to do\n")


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
