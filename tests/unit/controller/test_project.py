"""A project of the user's own: what is found, refused and written, and where a command goes."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import yaml

from controller.errors import InvalidRequest
from controller.files.parse import parse
from controller.settings import ALERT_RECEIVERS
from controller.tool.project import choices, commands, handover, new, ports, project, stack_files
from controller.tool.project.env_file import EnvFile
from controller.tool.project.project import NoProject, Project
from tests.harness.ports import free_ports
from tests.unit.test_machine_scripts import ENV_LINES

ROOT = Path(__file__).resolve().parents[3]
WEB = "services:\n  web:\n    image: web\n    scale: 0\n    x-serve: {route: /}\n"
ALL_FREE: Callable[[int], bool] = lambda port: True  # noqa: E731


@pytest.fixture
def shop(tmp_path: Path) -> Project:
    (tmp_path / "My Shop").mkdir()
    (tmp_path / "My Shop" / "compose.yaml").write_text(WEB)
    return Project(tmp_path / "My Shop")


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project, "_docker", lambda *_: [])
    monkeypatch.setattr(ports, "is_free", ALL_FREE)


@pytest.fixture(autouse=True)
def _nobody_chose_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def settled(shop: Project, environment: Mapping[str, str] | None = None) -> list[str]:
    """What is said."""
    said: list[str] = []
    files = project.own_files(shop, environment or {})
    project.settle(shop, files, environment or {}, said.append)
    return said


# ---------------------------------------------------------------------------------------------------------- finding


def test_the_nearest_directory_with_compose_files_is_the_project(shop: Project) -> None:
    below = shop.root / "src" / "deep"
    below.mkdir(parents=True)
    assert project.find(below) == project.find(shop.root) == shop
    settled(shop)
    assert project.find(shop.root / ".pierhead" / "compose") == shop, "the stack's own files are no project"
    (shop.root / "compose.yaml").rename(shop.root / "mine.yaml")
    for file in ("mine.yaml", str(shop.root / "mine.yaml")):
        assert project.find(below, {"COMPOSE_FILE": f"{file}:other.yaml"}) == shop
    (shop.root / ".env").write_text("COMPOSE_FILE=mine.yaml\n")
    assert project.find(below) == shop
    assert project.find(ROOT / "compose" / "machine") == Project(ROOT)
    with pytest.raises(NoProject, match="pierhead new NAME"):
        project.find(shop.root.parent)


def test_an_override_file_is_part_of_the_project_as_it_is_for_compose(shop: Project) -> None:
    (shop.root / "compose.override.yaml").write_text("services: {}\n")
    assert project.own_files(shop, {}) == ["compose.yaml", "compose.override.yaml"]
    for stack in ("stack", "tls"):
        assert project.own_files(shop, {"COMPOSE_FILE": f"compose.yaml:.pierhead/{stack}.yaml"}) == ["compose.yaml"]
    with pytest.raises(InvalidRequest, match=r"there is no file b\.yaml in"):
        project.own_files(shop, {"COMPOSE_FILE": "compose.yaml:b.yaml"})
    (shop.root / "deploy").mkdir()
    (shop.root / "deploy" / "a.yaml").touch()
    with pytest.raises(InvalidRequest, match=r"type the command in .*deploy"):
        project.own_files(shop, {"COMPOSE_FILE": "deploy/a.yaml"})


# --------------------------------------------------------------------------------------------------------- refusing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("services: {db: {image: postgres}}", r"nothing to manage: no service of compose\.yaml has an x-serve block"),
        ("services: {db: {image: postgres}}", "  db:\n    ...\n    scale: 0"),
        ("services: {}", "  web:\n    ...\n    scale: 0"),
        ("services: {prometheus: {image: p}, web: {x-serve: {}}}", r"services\.prometheus: the stack has a service of"),
        ("services: {registry: {image: r}, web: {x-serve: {}}}", r"services\.registry: the stack has a service of"),
    ],
)
def test_what_cannot_be_managed_is_refused_with_what_to_do(shop: Project, text: str, words: str) -> None:
    (shop.root / "compose.yaml").write_text(text)
    with pytest.raises(InvalidRequest, match=words) as refused:
        project.check(shop, ["compose.yaml"], {"PIERHEAD_ENGINE": "swarm"})
    assert refused.value.exit_code == 2


def test_acme_is_the_name_of_a_service_of_the_stack_only_where_an_acme_server_is_asked(shop: Project) -> None:
    (shop.root / "compose.yaml").write_text("services: {acme: {image: a}, web: {x-serve: {}}}")
    project.check(shop, ["compose.yaml"], {"PIERHEAD_TLS": "files"})
    with pytest.raises(InvalidRequest, match=r"services\.acme: the stack has a service of this name"):
        project.check(shop, ["compose.yaml"], {"PIERHEAD_TLS": "acme"})


@pytest.mark.parametrize("name", ["common.yaml", "compose.yaml"])
@pytest.mark.parametrize("text", [None, "extends: {file: ../NAME, service: web}"])
def test_a_file_that_the_controller_would_not_see_is_refused(shop: Project, text: str | None, name: str) -> None:
    (shop.root.parent / name).write_text(WEB)
    file = shop.root / "compose.yaml"
    if text is None:
        file.unlink()
        file.symlink_to(f"../{name}")
    else:
        file.write_text(f"services: {{web: {{{text.replace('NAME', name)}, x-serve: {{}}}}}}")
    with pytest.raises(InvalidRequest, match=f"{shop.root.parent}/{name} lies outside of {shop.root}, and the"):
        project.check(shop, ["compose.yaml"], {})
    project.check(shop, ["compose.yaml"], {"PIERHEAD_ENGINE": "swarm"})
    (shop.root / "common.yaml").write_text(WEB)
    (shop.root / "compose.yaml").unlink()
    (shop.root / "compose.yaml").symlink_to("common.yaml")
    project.check(shop, ["compose.yaml"], {})


def test_a_file_of_the_project_is_not_taken_for_one_above_it(shop: Project) -> None:
    for directory in (shop.root, shop.root.parent):
        (directory / "base.yaml").write_text(WEB)
    (shop.root / "sub").mkdir()
    (shop.root / "sub" / "a.yaml").write_text("services: {a: {extends: {file: ../base.yaml, service: web}}}")
    (shop.root / "compose.yaml").write_text("include: [sub/a.yaml]")
    project.check(shop, ["compose.yaml"], {})


@pytest.mark.parametrize(("text", "name"), [("name: MyShop\n", None), ("", "MyShop")])
def test_a_name_that_compose_does_not_take_is_not_kept(shop: Project, text: str, name: str | None) -> None:
    (shop.root / "compose.yaml").write_text(f"{text}{WEB}")
    with pytest.raises(InvalidRequest, match=r'letters, digits, "-" and "_", a letter or digit first, found "MyShop"'):
        settled(shop, {"COMPOSE_PROJECT_NAME": name} if name else None)
    assert not (shop.root / ".env").exists()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_block_in_an_included_file_counts_with_any_line_ends(shop: Project, newline: str) -> None:
    (shop.root / "web.yaml").write_bytes(WEB.replace("\n", newline).encode())
    included = "include: [web.yaml]\nservices: {db: {image: postgres}}\n"
    (shop.root / "compose.yaml").write_bytes(included.replace("\n", newline).encode())
    project.check(shop, ["compose.yaml"], {})
    (shop.root / "compose.yaml").write_text("x-serve in what is no YAML: [")
    project.check(shop, ["compose.yaml"], {})  # Compose says what is wrong


# ------------------------------------------------------------------------------------------------ names, ports, .env


def test_names_and_ports_are_chosen_once_and_told(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "is_free", lambda port: port not in (8000, 8001))
    told, port = settled(shop)
    env = shop.env_file()
    assert env.get("COMPOSE_PROJECT_NAME") == "myshop"
    assert env.get("COMPOSE_FILE") == "compose.yaml:.pierhead/stack.yaml"
    assert [env.get(name) for name in ports.PORTS] == ["8002", "9000", "8100", "8404", "9090"]
    assert told.startswith("In .env: COMPOSE_PROJECT_NAME=myshop, COMPOSE_FILE=compose.yaml:.pierhead/stack.yaml, ")
    assert port == "PIERHEAD_HTTP_PORT is 8002, as something else listens at port 8000."
    before = (shop.root / ".env").read_bytes()
    assert settled(shop) == []
    assert (shop.root / ".env").read_bytes() == before


def test_projects_that_choose_at_once_get_other_names_and_ports(tmp_path: Path) -> None:
    """Nothing listens yet at the ports of the others."""
    shops = [Project(tmp_path / place / "shop") for place in "abcd"]
    for each in shops:
        each.root.mkdir(parents=True)
        (each.root / "compose.yaml").write_text(WEB)
    with ThreadPoolExecutor(len(shops)) as threads:
        said = list(threads.map(settled, shops))
    written = [each.env_file() for each in shops]
    assert len({file.get(name) for file in written for name in ports.PORTS}) == len(shops) * len(ports.PORTS)
    assert len({file.get("COMPOSE_PROJECT_NAME") for file in written}) == len(shops)
    told = [words for lines in said for words in lines if words.startswith("PIERHEAD_HTTP_PORT is")]
    assert len(told) == len(shops) - 1
    assert all(re.search(r"is 80\d\d, as the project .*/shop has port 8000\.$", words) for words in told)


def test_what_was_chosen_long_ago_or_is_gone_holds_nothing(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(shop)
    other = Project(shop.root.parent / "other")
    other.root.mkdir()
    (other.root / "compose.yaml").write_text(WEB)
    now = time.time()
    monkeypatch.setattr(choices, "wall_clock", lambda: now + choices.RECENT_S + 1)
    settled(other)
    assert other.env_file().get("PIERHEAD_HTTP_PORT") == "8000"
    (other.root / ".env").unlink()
    third = Project(shop.root.parent / "third")
    third.root.mkdir()
    (third.root / "compose.yaml").write_text(WEB)
    settled(third)
    assert third.env_file().get("PIERHEAD_HTTP_PORT") == "8000"


def test_what_the_user_has_set_stays(shop: Project) -> None:
    (shop.root / ".env").write_bytes(
        b"# mine\r\nCOMPOSE_FILE=compose.yaml\r\nPIERHEAD_API_PORT=9000\r\nSECRET=a\r\nLAST=b"
    )
    settled(shop, {"PIERHEAD_HTTP_PORT": "7000"})
    lines = (shop.root / ".env").read_bytes().decode().split("\r\n")
    assert lines[:5] == [
        "# mine",
        "COMPOSE_FILE=compose.yaml:.pierhead/stack.yaml",
        "PIERHEAD_API_PORT=9000",
        "SECRET=a",
        "LAST=b",
    ]
    assert "\n" not in "".join(lines), "one kind of line end"
    assert "PIERHEAD_GRPC_PORT=9001" in lines, "9000 is given already"
    assert not [line for line in lines if line.startswith("PIERHEAD_HTTP_PORT")], (
        "the shell has named one for this time"
    )


@pytest.mark.parametrize(
    ("text", "elsewhere", "name"),
    [
        (WEB, "", "myshop"),
        (f"name: till\n{WEB}", "", "till"),
        (f"name: ${{TILL}}\n{WEB}", "", "myshop"),
        (WEB, "myshop\t/somewhere/myshop", "myshop-2"),
        (WEB, "myshop\t{root}/deploy", "myshop"),
    ],
)
def test_a_project_has_composes_name_for_it(
    shop: Project, text: str, elsewhere: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shop.root / "compose.yaml").write_text(text)
    rows = [elsewhere.format(root=shop.root)]
    monkeypatch.setattr(project, "_docker", lambda *words: rows if words[1] == "--all" else [])
    settled(shop)
    assert shop.env_file().get("COMPOSE_PROJECT_NAME") == name


@pytest.mark.parametrize("lines", ENV_LINES)
def test_a_line_of_the_env_file_is_read_as_compose_reads_it(tmp_path: Path, lines: str) -> None:
    (tmp_path / ".env").write_bytes(f"{lines}\n".encode())
    assert (EnvFile(tmp_path / ".env").get("NAME") or "") == ENV_LINES[lines]


@pytest.mark.parametrize("value", ["plain", "two words", "it's", "a # b", "$HOME", ""])
def test_what_is_written_is_what_is_read(tmp_path: Path, value: str) -> None:
    file = EnvFile(tmp_path / ".env")
    file.set("NAME", "first")
    file.set("NAME", value)
    assert file.save()
    assert EnvFile(tmp_path / ".env").get("NAME") == value
    assert (tmp_path / ".env").read_text().count("NAME") == 1


def test_a_port_at_which_something_listens_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        assert not ports.is_free(port)
    assert ports.choose(["PIERHEAD_HTTP_PORT"], [], lambda port: False, [8000]) == {"PIERHEAD_HTTP_PORT": 8000}


# ---------------------------------------------------------------------------------------------------- the stack's files


def test_the_copy_has_the_clones_layout_and_what_images_are_built_from(shop: Project) -> None:
    settled(shop)
    copy = shop.root / ".pierhead"
    for path in (
        "compose/compose.yaml",
        "haproxy/haproxy.cfg.j2",
        "controller/daemon/loop.py",
        "controller/Dockerfile",
        "uv.lock",
    ):
        assert (copy / path).read_bytes() == (ROOT / path).read_bytes()
    assert (copy / "services/runtime/pierhead/classes/service.py").is_file()
    assert (copy / "proto/pierhead/echo/v1/echo.proto").read_bytes() == (
        ROOT / "proto/pierhead/echo/v1/echo.proto"
    ).read_bytes()
    assert not list(copy.rglob("*_pb2.py")), "an image generates its own"
    assert os.access(copy / "compose" / "machine" / "engine.sh", os.X_OK)
    assert (copy / ".gitignore").read_text() == "*\n"
    tracked = subprocess.run(
        ["git", "ls-files", "-s", "haproxy", "controller"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for line in tracked.stdout.splitlines():
        mode, path = line.split()[0], line.split("\t")[1]
        assert (copy / path).stat().st_mode & 0o777 == int(mode[-3:], 8), f"{path}: another mode is another image"


def test_the_copy_is_brought_to_the_build_of_the_tool_and_nothing_else_is_touched(shop: Project) -> None:
    settled(shop)
    copy = shop.root / ".pierhead"
    assert stack_files.written_build(shop.root) == stack_files.build()
    kept = (copy / "compose" / "compose.yaml").stat().st_mtime_ns
    (copy / "controller" / "daemon" / "loop.py").write_text("older = True\n")
    (copy / "controller" / "older").mkdir()
    (copy / "controller" / "older" / "gone.py").touch()
    (copy / "build").unlink()
    assert stack_files.written_build(shop.root) == "", "interrupted"
    settled(shop)
    assert (copy / "controller" / "daemon" / "loop.py").read_bytes() == (
        ROOT / "controller" / "daemon" / "loop.py"
    ).read_bytes()
    assert not (copy / "controller" / "older").exists()
    assert (copy / "compose" / "compose.yaml").stat().st_mtime_ns == kept


@pytest.mark.parametrize("before", ["", "0123456789ab\n"], ids=["the same build", "an upgrade"])
def test_the_copy_has_a_build_at_every_moment_of_a_later_up(
    shop: Project, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one a command says that no stack runs."""
    settled(shop)
    build = shop.root / ".pierhead" / "build"
    if before:
        build.write_text(before)
        (shop.root / ".pierhead" / "uv.lock").write_text("older\n")
    written, seen, write = build.stat().st_mtime_ns, set[str](), stack_files._write

    def spied(file: Path, content: bytes) -> None:
        seen.add(stack_files.written_build(shop.root))
        write(file, content)

    monkeypatch.setattr(stack_files, "_write", spied)
    settled(shop)
    assert seen == {before.strip() or stack_files.build()}
    assert stack_files.written_build(shop.root) == stack_files.build()
    assert (build.stat().st_mtime_ns == written) is (not before)


def test_an_upgrade_on_a_full_disk_leaves_the_build_that_runs(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(shop)
    (shop.root / ".pierhead" / "build").write_text("0123456789ab\n")
    (shop.root / ".pierhead" / "uv.lock").write_text("older\n")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stack_files, "replace_file", full)
    with pytest.raises(OSError, match="No space left"):
        settled(shop)
    assert "was brought up by another build of this tool (0123456789ab; this" in typed(shop.root, "status").stderr


@pytest.fixture
def compose() -> Callable[..., str]:
    if shutil.which("docker") is None:
        pytest.skip("needs the Compose plug-in, not an engine")

    def run(directory: Path, *arguments: str) -> str:
        command = ["docker", "compose", *arguments]
        clean = {"PATH": os.environ["PATH"], "PWD": str(directory), "HOME": str(directory)}
        return subprocess.run(command, cwd=directory, env=clean, capture_output=True, text=True, check=True).stdout

    return run


def test_alertmanager_is_the_name_of_a_service_of_the_stack_only_where_alerts_are_sent(shop: Project) -> None:
    (shop.root / "compose.yaml").write_text("services: {alertmanager: {image: a}, web: {x-serve: {}}}")
    project.check(shop, ["compose.yaml"], {"PIERHEAD_ALERT_MAIL": ""})
    for receiver in ALERT_RECEIVERS:
        with pytest.raises(InvalidRequest, match=r"services\.alertmanager: the stack has a service of this name"):
            project.check(shop, ["compose.yaml"], {receiver: "x"})


def test_compose_adds_alertmanager_of_the_stacks_copy(shop: Project, compose: Callable[..., str]) -> None:
    (shop.root / "compose.yaml").write_text(WEB)
    settled(shop)
    env = shop.env_file()
    env.set("COMPOSE_FILE", f"compose.yaml:.pierhead/acme.yaml:{stack_files.ALERTS_FILE}")
    env.set("PIERHEAD_ALERT_MAIL", "ops@shop.example")
    env.save()
    assert project.own_files(shop, {}) == ["compose.yaml"]
    services = yaml.safe_load(compose(shop.root, "config"))["services"]
    assert {"web", "controller", "haproxy", "prometheus", "acme", "alertmanager"} == set(services)
    asked = services["alertmanager"]
    assert asked["build"]["context"] == f"{shop.root}/.pierhead/dashboards/alertmanager"
    assert (shop.root / ".pierhead/dashboards/alertmanager/entrypoint.sh").stat().st_mode & 0o111
    assert (asked["environment"]["COMPOSE_PROJECT_NAME"], asked.get("ports")) == ("myshop", None)
    for name in ("alertmanager", "controller"):
        assert services[name]["environment"]["PIERHEAD_ALERT_MAIL"] == "ops@shop.example"


@pytest.mark.parametrize("file", ["stack.yaml", "swarm.yaml", "tls.yaml", "acme.yaml"])
def test_compose_reads_the_users_paths_from_the_project_and_the_stacks_from_its_copy(
    shop: Project, compose: Callable[..., str], file: str
) -> None:
    own = WEB + "    build: .\n    volumes: ['./data:/data']\n  grafana: {image: mine}\n"
    own += "  registry: {image: mine}\n" if file != "swarm.yaml" else ""
    (shop.root / "compose.yaml").write_text(own)
    project.check(shop, ["compose.yaml"], {"PIERHEAD_ENGINE": file.removesuffix(".yaml")})
    settled(shop)
    env = shop.env_file()
    env.set("COMPOSE_FILE", f"compose.yaml:.pierhead/{file}")
    env.save()
    config = yaml.safe_load(compose(shop.root, "config"))
    assert config["name"] == "myshop"
    web, controller = config["services"]["web"], config["services"]["controller"]
    assert web["build"]["context"] == str(shop.root)
    assert config["services"]["grafana"] == {"image": "mine", "networks": {"default": None}}, "the stack has none"
    assert web["volumes"][0]["source"] == str(shop.root / "data")
    assert controller["image"] == f"pierhead/controller:{stack_files.release()}"
    has_tls = file in ("tls.yaml", "acme.yaml")
    ports = [port["target"] for port in config["services"]["haproxy"]["ports"]]
    assert ports == [8000, 9000, *([] if file == "swarm.yaml" else [8404]), *([8443] if has_tls else [])]
    if file == "acme.yaml":
        asks = config["services"]["acme"]
        assert (asks["build"]["context"], asks["cap_drop"], asks["read_only"]) == (
            f"{shop.root}/.pierhead",
            ["ALL"],
            True,
        )
        assert config["secrets"]["acme-ca"]["file"] == f"{shop.root}/.pierhead/compose/machine/no-ca.pem"
        env.set("PIERHEAD_ACME_CA", "ca.pem")
        env.save()
        config = yaml.safe_load(compose(shop.root, "config"))
        assert config["secrets"]["acme-ca"]["file"] == f"{shop.root}/ca.pem"
    if file != "swarm.yaml":
        assert controller["build"]["context"] == str(shop.root / ".pierhead")
        assert (controller["working_dir"], controller["environment"]["COMPOSE_FILE"]) == (
            str(shop.root),
            env.get("COMPOSE_FILE"),
        )
        assert set(parse("myshop", config).services) == {"web"}


# ------------------------------------------------------------------------------------------------------- a new project


def test_a_new_project_is_small_and_valid(tmp_path: Path) -> None:
    said = new.new(tmp_path / "shop")
    assert "pierhead up" in said
    app = (tmp_path / "shop" / "app.py").read_text()
    assert len(app.splitlines()) <= 40
    definition = yaml.safe_load((tmp_path / "shop" / "compose.yaml").read_text())
    services = parse("shop", definition).services
    assert {name: (one.protocol, one.route) for name, one in services.items()} == {
        "web": ("http", "/"),
        "greeter": ("grpc", None),
    }
    dockerfile = (tmp_path / "shop" / "Dockerfile").read_text()
    assert dockerfile.startswith(f"FROM pierhead/python:{stack_files.tag()}\nCOPY requirements.txt ./\nRUN pip install")
    assert not re.findall("^[^#]", (tmp_path / "shop" / "requirements.txt").read_text(), re.MULTILINE)
    assert ".env" in (tmp_path / "shop" / ".gitignore").read_text().splitlines()
    project.check(Project(tmp_path / "shop"), ["compose.yaml"], {})
    with pytest.raises(InvalidRequest, match="is there already, and not empty"):
        new.new(tmp_path / "shop")


def test_the_unit_test_of_a_new_project_passes(tmp_path: Path) -> None:
    new.new(tmp_path / "shop")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_app.py"]
    path = os.pathsep.join([str(ROOT / "services" / "runtime"), str(tmp_path / "shop")])
    done = subprocess.run(
        command,
        cwd=tmp_path / "shop",
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


# ------------------------------------------------------------------------------------------------------- the hand-over


def environment_with(directory: Path, *, has_runtime: bool) -> Path:
    packages = directory / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (directory / "bin").mkdir()
    (directory / "bin" / "python").symlink_to(sys.executable)
    if has_runtime:
        (packages / "pierhead-0.1.0.dist-info").mkdir()
    return directory / "bin" / "python"


def test_user_code_runs_in_the_projects_python_where_that_has_the_runtime(tmp_path: Path) -> None:
    below = tmp_path / "shop" / "src"
    below.mkdir(parents=True)
    active = environment_with(tmp_path / "active", has_runtime=True)
    assert handover.interpreter(below, {}) == Path(sys.executable)
    assert handover.interpreter(below, {"VIRTUAL_ENV": str(tmp_path / "active")}) == active
    environment_with(tmp_path / "shop" / ".venv", has_runtime=False)
    assert handover.interpreter(below, {"VIRTUAL_ENV": str(tmp_path / "active")}) == active
    shutil.rmtree(tmp_path / "shop" / ".venv")
    own = environment_with(tmp_path / "shop" / ".venv", has_runtime=True)
    assert handover.interpreter(below, {"VIRTUAL_ENV": str(tmp_path / "active")}) == own


# ------------------------------------------------------------------------------------------------- where a command runs


def typed(where: Path, *words: str, docker: str = "exit 1", **environment: str) -> subprocess.CompletedProcess[str]:
    """Type a command of the installed tool, on a machine whose docker does not answer, or runs the given script."""
    fake = where / "bin"
    fake.mkdir(exist_ok=True)
    (fake / "docker").write_text(f"#!/bin/sh\n{docker}\n")
    (fake / "docker").chmod(0o755)
    program = "import sys; sys.argv[0] = 'pierhead'; from controller.tool import main; main()"
    own = {"PATH": f"{fake}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT}/services/runtime", "HOME": str(where)}
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *words], cwd=where, env=own | environment, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip


def test_ctrl_c_before_a_command_begins_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("import time\nprint('imports', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", "from controller.tool import main; main()"], text=True,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT}/services/runtime"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "imports\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


def test_the_schema_is_printed_where_the_wheel_has_its_files(tmp_path: Path) -> None:
    stack = tmp_path / "pierhead_stack"
    shutil.copytree(ROOT / "controller", stack / "controller")
    (stack / "compose").symlink_to(ROOT / "compose")
    shutil.copy(ROOT / "proto" / "installed.py", stack / "__init__.py")
    program = "import sys; sys.argv[1:] = ['schema']; from pierhead_stack import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{ROOT}/services/runtime"},
    )  # fmt: skip
    assert done.stdout == (ROOT / "compose" / "x-serve.schema.json").read_text(), done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("up", 2, "there is no compose file in"),
        ("status", 2, "there is no compose file in"),
        ("schema", 0, "x-serve"),
        ("--help", 0, "Write a new project"),
        ("status --help", 0, "Show services, replicas, GPUs"),
        ("new shop", 0, "pierhead up"),
        ("new -- -x", 0, "  cd ./-x\n"),
        ("new größe/it's", 0, "  cd 'größe/it'\"'\"'s'\n"),
        ("--version", 0, f"pierhead {stack_files.version()}, build {stack_files.build()}\n"),
        ("statsu", 2, "No such command 'statsu'"),
        ("new 'shop", 2, ""),
    ],
)
def test_outside_a_project(tmp_path: Path, words: str, code: int, said: str) -> None:
    arguments = ["new", ".."] if words == "new 'shop" else words.split()
    done = typed(tmp_path, *arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def test_a_directory_that_cannot_be_written(shop: Project) -> None:
    (shop.root / ".pierhead").touch()  # which root, too, makes no directory of
    done = typed(shop.root, "up")
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith(f"{shop.root}/.pierhead cannot be written: ")
    assert line.endswith("Nothing was started.")
    assert not (shop.root / ".env").exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("cat resolved", 'services.web.x-serve.replicas: expected an integer >= 0, found "two"'),
        ("echo 'service \"web\" has neither an image nor a build context' >&2; exit 15", '"web" has neither an image'),
    ],
    ids=["refused by the controller", "refused by Compose"],
)
@pytest.mark.parametrize("command", ["up", "init"])
def test_a_project_that_is_refused_is_left_as_it_was(shop: Project, command: str, config: str, said: str) -> None:
    (shop.root / "resolved").write_text(WEB.replace("route: /", "replicas: two") + "name: shop\n")
    before = sorted(shop.root.iterdir())
    docker = f'case "$*" in "compose version"*) echo 2.26.1 ;; *" config") {config} ;; esac'
    done = typed(shop.root, command, docker=docker)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert sorted(shop.root.iterdir()) == sorted([*before, shop.root / "bin"])


def test_a_project_for_a_swarm_is_read_by_the_swarms_own_program(shop: Project) -> None:
    """There secrets may be Swarm's, and `deploy` has keys that one machine has not."""
    (shop.root / "resolved").write_text(WEB.replace("route: /", "replicas: two") + "name: shop\n")
    docker = 'case "$*" in "compose version"*) echo 2.26.1 ;; *" config") cat resolved ;; esac'
    done = typed(shop.root, "init", docker=docker, PIERHEAD_ENGINE="swarm")
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_of_up_says_how_to_continue(shop: Project) -> None:
    (shop.root / "bin").mkdir()
    os.mkfifo(shop.root / "going")
    (shop.root / "resolved").write_text(f"name: myshop\n{WEB}")
    hangs = f"trap 'exit 130' INT; echo yes >'{shop.root}/going'; sleep 60 & wait"
    answers = (
        f"*' build') {hangs}",
        f"*config) cat '{shop.root}/resolved'",
        "'compose version'*) echo 2.26.1",
        "version*) echo 26.1.5",
        "ps*)",
    )
    cases = "\n".join(f"{case} ;;" for case in answers)
    (shop.root / "bin" / "docker").write_text(f'#!/bin/bash\ncase "$*" in\n{cases}\nesac\n')
    (shop.root / "bin" / "docker").chmod(0o755)
    numbers = dict(zip(ports.PORTS, map(str, free_ports(len(ports.PORTS))), strict=True))
    path = {"PATH": f"{shop.root}/bin:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT}/services/runtime"}
    # Python hands down that the signal is ignored, where pytest runs in the background of a shell.
    process = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-P", "-m", "controller.tool", "up"], cwd=shop.root, text=True,
        env={**path, **numbers, "HOME": str(shop.root)}, start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    (shop.root / "going").read_text()
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    interrupted, *_, last = said.splitlines()
    assert interrupted.startswith("Building the images: interrupted after ")
    assert last == "Interrupted. `pierhead up` continues from here; `pierhead down` removes what was started."
    with suppress(ProcessLookupError):  # where the stand-in had not come to its sleep
        os.killpg(process.pid, signal.SIGKILL)


def test_saves_are_followed_on_one_machine_only(shop: Project) -> None:
    done = typed(shop.root, "up", "--watch", PIERHEAD_ENGINE="swarm")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--watch is for one machine: ")
    assert not (shop.root / ".pierhead").exists(), "nothing was written"


def test_in_a_project_that_does_not_run(shop: Project) -> None:
    assert "No such command 'statsu'" in typed(shop.root, "statsu").stderr
    done = typed(shop.root, "status")
    assert (done.returncode, done.stderr) == (
        3,
        f"pierhead: the stack of {shop.root} does not run. Start it with: pierhead up\n",
    )
    settled(shop)
    done = typed(shop.root, "status", PIERHEAD_API_PORT="1")
    assert (done.returncode, done.stdout) == (3, "")
    words = "the Docker Engine does not answer, so it is not known what runs. Start it with: pierhead up"
    assert done.stderr == f"pierhead: {words}\n"
    done = typed(shop.root, "status", docker="exit 0", PIERHEAD_API_PORT="1")
    assert done.stderr == 'pierhead: the controller of the stack "myshop" is not running. Start it with: pierhead up\n'
    (shop.root / ".pierhead" / "build").write_text("0123456789ab\n")
    done = typed(shop.root, "why", "web")
    assert "was brought up by another build of this tool (0123456789ab; this is" in done.stderr.splitlines()[0]
    assert "`pierhead up` brings both together" in done.stderr


def test_scripts_that_a_project_came_with_are_not_run(shop: Project) -> None:
    settled(shop)
    for name in ("engine.sh", "base-images.sh"):
        (shop.root / ".pierhead" / "compose" / "machine" / name).write_text("#!/bin/sh\necho theirs\n")
    for command in ("status", "down"):
        done = typed(shop.root, command)
        assert "theirs" not in done.stdout + done.stderr
    assert done.returncode == 2
    assert "the Docker Engine does not answer, and what is left of the stack cannot be seen" in done.stderr


# ------------------------------------------------------------------------------------ what a project may have come with


def test_nothing_outside_the_project_is_written_or_removed_through_a_link(shop: Project, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "mine").write_text("x")
    (shop.root / ".pierhead").symlink_to(elsewhere)
    with pytest.raises(InvalidRequest, match=r"\.pierhead is a link"):
        stack_files.write(shop.root)
    (shop.root / ".pierhead").unlink()
    (shop.root / ".pierhead").mkdir()
    (shop.root / ".pierhead" / "compose").symlink_to(elsewhere)
    stack_files.write(shop.root)
    assert [path.name for path in elsewhere.rglob("*")] == ["deep", "mine"]
    assert not (shop.root / ".pierhead" / "compose").is_symlink()


def test_scripts_of_a_clone_that_is_not_the_tools_own_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "compose" / "machine"
    scripts.mkdir(parents=True)
    (scripts / "engine.sh").write_text("#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)
    for command in (commands.up, partial(commands.build_images, "", "")):
        with pytest.raises(InvalidRequest, match=r"type \./pierhead or make there"):
            command()
    assert stack_files.is_from(ROOT)


def test_an_env_file_that_is_a_link_stays_one(tmp_path: Path) -> None:
    shared = tmp_path / "shared.env"
    shared.write_text("A=1\n")
    shared.chmod(0o600)
    (tmp_path / ".env").symlink_to(shared)
    file = EnvFile(tmp_path / ".env")
    file.append("B=2")
    assert file.save()
    assert (tmp_path / ".env").is_symlink()
    assert (shared.read_text(), shared.stat().st_mode & 0o777) == ("A=1\nB=2\n", 0o600)
