"""`pierhead up --watch`: which saves bring which services up to date."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from controller.errors import ControllerError
from controller.tool.project.built import Ignored, affected, images_of
from controller.tool.project.project import Project
from controller.tool.project.update import Edited
from controller.tool.project.watch import FilesWatch
from tests.unit.controller.control import until


@pytest.fixture(autouse=True)
def no_files_of_another_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test` names those of the clone."""
    monkeypatch.delenv("COMPOSE_FILE", raising=False)


def config(root: Path) -> Mapping[str, Any]:
    """One image for `web` and `worker`, one for `cron`, which is Compose's; `db` and the stack have none of ours."""
    return {
        "name": "shop",
        "services": {
            "web": {
                "image": "shop-app",
                "build": {"context": f"{root}/app", "dockerfile": "Dockerfile"},
                "x-serve": {},
            },
            "worker": {"image": "shop-app", "x-serve": {}},
            "cron": {"build": {"context": f"{root}/cron", "dockerfile": "../Dockerfile.cron"}},
            "db": {"image": "postgres"},
            "elsewhere": {"build": {"context": "https://example.org/app.git"}},
            "controller": {"build": {"context": f"{root}/.pierhead"}},
        },
    }


def test_which_services_have_a_file(tmp_path: Path) -> None:
    app, cron = images_of(config(tmp_path), tmp_path / ".pierhead")
    assert (app.builder, app.managed, app.others) == ("web", ("web", "worker"), ())
    assert (cron.builder, cron.managed, cron.others) == ("cron", (), ("cron",))
    for name in (
        "app/app.py",
        "app/data/big.bin",
        "app/.git/index",
        "app/venv/pyvenv.cfg",
        "app/venv/a.py",
        "cron/run.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "app" / ".dockerignore").write_text("data\n")
    assert set(app.files()) == {tmp_path / "app" / "app.py"}
    assert affected([app, cron], [tmp_path / "app" / "gone.py"]) == [app]
    assert affected([app, cron], [tmp_path / "cron" / "run.py", tmp_path / "app" / "data" / "new"]) == [cron]
    assert affected([app, cron], [tmp_path / "README.md"]) == []
    cron.recipe[0].with_name("Dockerfile.cron.dockerignore").write_text("*\n!*.sh\n")
    assert affected([app, cron], [tmp_path / "cron" / "run.py"]) == []
    assert affected([app, cron], [tmp_path / "cron" / "run.sh"]) == [cron]


@pytest.mark.parametrize(
    ("patterns", "out", "kept"),
    [
        (".*\n**/__pycache__\n", (".git/index", "a/b/__pycache__/c.pyc", "__pycache__/c"), ("app.py", "a/.hidden")),
        ("# data\n/data/\n*.log\n", ("data/x/y", "a.log"), ("sub/a.log", "my/data/x")),
        ("*\n!src\nsrc/test?.py\n", ("README", "src/test1.py"), ("src/app.py", "src/test10.py")),
        ("docs/**/*.md\na[0-9]\n\\!odd\n", ("docs/a.md", "docs/b/c.md", "a1/x", "!odd"), ("docs/a.txt", "ab", "odd")),
    ],
)  # fmt: skip
def test_what_a_dockerignore_leaves_out(patterns: str, out: tuple[str, ...], kept: tuple[str, ...]) -> None:
    ignored = Ignored.of(patterns)
    assert [ignored.has(path) for path in (*out, *kept)] == [True] * len(out) + [False] * len(kept)


class Bringing:
    """What is done in the place of `up` and of an update, and what the user reads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: list[tuple[str, ...]] = []
        self.said: list[str] = []
        self.fails = False
        self.saves_meanwhile = ""

    def save(self, *names: str, text: str = "") -> None:
        for name in names:
            file = self.root / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text or f"{time.monotonic_ns()}")

    def update(self, edited: Edited | None) -> None:
        parts = (edited.built, edited.managed, edited.others) if edited else ()
        self.run("update", *map(" ".join, parts))

    def run(self, *words: str) -> None:
        self.runs.append(words)
        if self.saves_meanwhile:
            name, self.saves_meanwhile = self.saves_meanwhile, ""
            self.save(name)
        if self.fails:
            raise ControllerError("no")

    @contextlib.asynccontextmanager
    async def watching(self, since: float) -> AsyncIterator[None]:
        up = lambda: self.run("up")  # noqa: E731
        watch = FilesWatch(Project(self.root), lambda: config(self.root), up, self.update, self.said.append)
        task = asyncio.create_task(watch.follow(since))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def ended(self, *runs: tuple[str, ...]) -> str:
        """The last line, once these were run, and no others."""
        rounds = sum(run != ROLLED for run in runs)
        await until(lambda: len(self.ends()) == rounds)
        assert self.runs == [*runs]
        [*_, last] = self.ends()
        self.runs.clear()
        self.said.clear()
        return last

    def ends(self) -> list[str]:
        return [line for line in self.said if line.startswith("Running services") or " after the save of " in line]


APP = ("update", "web", "web worker", "")
CRON = ("update", "cron", "", "cron")
ROLLED = ("update",)
BOTH = ("update", "web cron", "web worker", "cron")


async def test_each_save_brings_its_services_up_to_date(tmp_path: Path) -> None:
    bringing = Bringing(tmp_path)
    bringing.save("compose.yaml", text="services: {}\n")
    bringing.save("app/app.py", "app/Dockerfile", "cron/run.py", "README.md")
    since = time.time()
    os.utime(tmp_path / "app" / "app.py", (since + 1, since + 1))
    async with bringing.watching(since):
        await until(lambda: bool(bringing.said))
        assert bringing.said[0].startswith("Watching the files of cron, web, worker. ")
        assert (await bringing.ended(APP)).startswith("web, worker are up to date, "), "it was saved while `up` ran"
        bringing.save("app/app.py", "app/new.py", "README.md")
        assert (await bringing.ended(APP)).endswith(" s after the save of app.py, new.py."), "two saves, one rollout"
        for name in ("app/app.py", "app/late.py"):
            bringing.saves_meanwhile = name
            bringing.save("app/app.py")
            await bringing.ended(APP, APP)
        bringing.fails = True
        bringing.save("app/app.py")
        assert await bringing.ended(APP) == "Running services are not affected. The next save tries it again."
        bringing.fails = False
        bringing.save("cron/run.py")
        assert (await bringing.ended(BOTH)).startswith("web, worker, cron are up to date, "), "nothing stays behind"
        (tmp_path / "app" / "new.py").unlink()
        await bringing.ended(APP)
        bringing.save("app/Dockerfile")
        assert (await bringing.ended(("up",), ROLLED)).startswith("The project is up to date")
        bringing.fails = True
        bringing.save("compose.yaml", text="services:\n  web: {env_file: web.env}\n")
        await bringing.ended(("up",))
        bringing.fails = False
        bringing.save("web.env")
        await bringing.ended(("up",), ROLLED)
        bringing.save("cron/run.py")
        await bringing.ended(CRON)
