"""The site's tutorial as its reader pastes it: with the wheel, in an empty directory, block by block."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.stack import ROOT
from tests.harness.user import User, own_ports, remove_images
from tests.harness.waiting import eventually
from tests.harness.wheel import build_wheel, environment

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(900)]

TAG = "tutorial-test"
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
_TYPED = r"bash\n(.*?)^```\n(?:```text\n(.*?)^```)?"
_FILE = r'\w+ title="([^"]+)"\n(.*?)^```'
BLOCKS = re.findall(rf"^```(?:{_TYPED}|{_FILE})", PAGE, re.DOTALL | re.MULTILINE)
"""What is typed and what it prints, or a file's path and text, in the order of the page."""
DEFAULT_PORTS = {"8000": "PIERHEAD_HTTP_PORT", "8100": "PIERHEAD_API_PORT"}


@pytest.fixture
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    wheel = build_wheel(tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel"))
    yield environment(tmp_path_factory.mktemp("tool") / "venv", wheel)
    remove_images(TAG)


def printed_by(user: User, typed: str) -> str:
    """All that a block prints; it may not end with a failure."""
    for port, name in DEFAULT_PORTS.items():
        if f"127.0.0.1:{port}" in typed:
            typed = typed.replace(f"127.0.0.1:{port}", f"127.0.0.1:{user.setting(name)}")
    done: subprocess.CompletedProcess[str] = user.type("bash", "-euo", "pipefail", "-c", f"exec 2>&1\n{typed}")
    assert done.returncode == 0, f"{typed}\n{done.stdout}"
    return done.stdout


def test_the_tutorial(programs: Path, tmp_path: Path) -> None:
    (first, *_), *blocks = BLOCKS
    assert len(blocks) >= 13
    printed_by(User(programs, tmp_path, TAG), first)
    user = User(programs, tmp_path / "shop", TAG)
    (user.directory / ".env").write_text(own_ports())
    with user.cleaned_up():
        for typed, expected, path, text in blocks:
            if path:
                (user.directory / path).write_text(text)
                continue
            shown = re.compile(".*".join(map(re.escape, expected.strip().split("..."))), re.DOTALL)

            def is_printed(typed: str = typed, shown: re.Pattern[str] = shown) -> bool:
                printed = printed_by(user, typed)
                print(f"{typed}\n{printed}")
                return bool(shown.search(printed))

            if re.search(r"^docker compose logs|/api/v1/traces", typed, re.MULTILINE):  # these take some time
                eventually(is_printed, f"{typed}\nexpected: {expected}", 120, every_s=2)
            else:
                assert is_printed(), f"{typed}\nexpected: {expected}"
        assert user.containers() == {}, "the last block has removed it"
