"""What the controller relies on in the real `docker compose config`, in the releases that a machine may have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from controller.engines.labels import create_body
from controller.errors import SpecError
from controller.files.compose import ComposeProject
from controller.files.parse import parse
from controller.files.yaml import load_resolved
from controller.model.spec import GpuRequest, GpuSlot, Spec
from controller.model.world import current_version
from controller.swarm.files.dialect import DIALECTS
from controller.swarm.up.stack_file import Given, stack_file
from tests.harness.not_carried import not_carried
from tests.unit.test_machine_scripts import ENV_LINES

ROOT = Path(__file__).parents[2]
SLOT = GpuSlot(memory_bytes=1024**3)
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}


def _has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False, timeout=60)
    return asked.returncode == 0


pytestmark = pytest.mark.skipif(not _has_compose(), reason="needs Docker's command line with its Compose plug-in")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


async def load(directory: Path, **environment: str) -> Spec:
    return await ComposeProject(directory, ENVIRONMENT | environment).load()


async def problem(directory: Path, text: str | None, **environment: str) -> str:
    """The one problem of a compose file."""
    if text is not None:
        write(directory / "compose.yaml", text)
    with pytest.raises(SpecError) as caught:
        await load(directory, **environment)
    (told,) = caught.value.problems
    return told


def users_own(directory: Path, *options: str) -> str:
    """What the user's own `docker compose config` prints."""
    command = ["docker", "compose", "config", *options]
    return subprocess.check_output(command, cwd=directory, env=ENVIRONMENT, text=True, timeout=60)


async def test_scale_zero_is_accepted_in_both_forms(tmp_path: Path) -> None:
    write(
        tmp_path / "compose.yaml",
        "name: shop\nservices:\n"
        "  a: {image: a, scale: 0, x-serve: {}}\n"
        "  b: {image: b, deploy: {replicas: 0}, x-serve: {replicas: 3, route: /b}}\n"
        "  c: {image: c, scale: 0, profiles: [never-asked-for], x-serve: {}}\n",
    )
    spec = await load(tmp_path)
    assert (spec.project, sorted(spec.services)) == ("shop", ["a", "b", "c"])
    assert (spec.services["b"].replicas, spec.services["b"].route) == (3, "/b")


@pytest.mark.parametrize("kind", ["secrets", "configs", "env_file"])
async def test_a_changed_file_is_seen_and_a_new_version(tmp_path: Path, kind: str) -> None:
    """Also one that another file of the same size has replaced; one that was only touched is none."""
    used = "env_file: [./my.txt]" if kind == "env_file" else f"{kind}: [mine]"
    section = "" if kind == "env_file" else f"{kind}: {{mine: {{file: ./my.txt}}}}\n"
    service = f"services: {{web: {{image: a, scale: 0, {used}, x-serve: {{}}}}}}\n"
    write(tmp_path / "compose.yaml", f"name: shop\n{section}{service}")
    file = write(tmp_path / "my.txt", "TOKEN=a\n")
    project = ComposeProject(tmp_path, ENVIRONMENT)
    first, seen = await project.load(), await project.fingerprint()
    file.touch()
    assert await project.fingerprint() != seen
    assert await project.load() == first, "nothing changes"
    seen = await project.fingerprint()
    write(tmp_path / "other.txt", "TOKEN=b\n").rename(file)
    assert await project.fingerprint() != seen
    second = await project.load()
    images = {"a": "sha256:1"}
    assert current_version(second.services["web"], images) != current_version(first.services["web"], images)


async def test_relative_names_mean_what_they_mean_to_the_user(tmp_path: Path) -> None:
    write(tmp_path / ".env", "COMPOSE_FILE=compose/compose.yaml:compose/apps/b.yaml\nTAG=v9\n")
    write(
        tmp_path / "compose" / "compose.yaml",
        "name: shop\nservices:\n  a:\n    image: a:${TAG}\n    scale: 0\n    env_file: a.env\n"
        "    volumes: [./data:/data:ro, ../weights:/weights, cache:/cache]\n    x-serve: {}\n    secrets: [token]\n"
        "volumes: {cache: {}}\nsecrets: {token: {file: token.txt}}\n",
    )
    write(
        tmp_path / "compose" / "apps" / "b.yaml",
        "services: {b: {image: b, scale: 0, volumes: ['./data:/d'], x-serve: {}}}",
    )
    write(tmp_path / "compose" / "a.env", "FROM_FILE=${TAG}\n")
    write(tmp_path / "compose" / "token.txt", "secret")

    spec = await load(tmp_path)

    own = users_own(tmp_path)
    mounts = {name: spec.services[name].container["HostConfig"]["Mounts"] for name in ("a", "b")}
    sources = [mount["Source"] for mount in mounts["a"]]
    compose = tmp_path / "compose"
    assert sources == [str(compose / "data"), str(tmp_path / "weights"), "shop_cache", str(compose / "token.txt")]
    assert [mount["Source"] for mount in mounts["b"]] == [str(compose / "data")]
    assert all(source in own for source in sources)
    assert spec.services["a"].image == "a:v9"
    assert "FROM_FILE=v9" in spec.services["a"].container["Env"]


async def test_include_extends_anchors_and_overrides_come_free(tmp_path: Path) -> None:
    write(
        tmp_path / "compose.yaml",
        "name: shop\ninclude: [sub/inc.yaml]\nx-limits: &limits {max_ongoing_requests: 7}\nservices:\n"
        "  a: {image: a, scale: 0, x-serve: {<<: *limits, replicas: 2}}\n"
        "  b: {extends: {file: sub/base.yaml, service: base}, scale: 0, x-serve: {}}\n",
    )
    write(tmp_path / "sub" / "inc.yaml", "services: {c: {image: c, scale: 0, volumes: ['./x:/x'], x-serve: {}}}")
    write(tmp_path / "sub" / "base.yaml", "services: {base: {image: from-base}}")
    write(tmp_path / "compose.override.yaml", "services: {a: {image: overridden}}")
    spec = await load(tmp_path)
    assert (spec.services["a"].image, spec.services["a"].max_ongoing_requests) == ("overridden", 7)
    assert spec.services["b"].image == "from-base"
    assert spec.services["c"].container["HostConfig"]["Mounts"][0]["Source"] == str(tmp_path / "sub" / "x")


async def test_values_arrive_as_they_were_written(tmp_path: Path) -> None:
    values = {"DOLLAR": "a$b", "DOUBLE": "a$$b", "YES": "yes", "DATE": "2020-01-01", "OCTAL": "010", "E": "1e6"}
    environment = {name: value.replace("$", "$$") for name, value in values.items()}
    write(
        tmp_path / "compose.yaml",
        "services:\n  a:\n    image: a\n    scale: 0\n"
        "    x-serve: {startup: {deadline_s: 1e5}, request_timeout_s: 2.0}\n"
        f"    command: ['=', '<<', '$$x', '08', 'on', '~']\n    environment: {json.dumps(environment)}\n",
    )
    service = (await load(tmp_path)).services["a"]
    assert service.container["Cmd"] == ["=", "<<", "$x", "08", "on", "~"]
    assert set(service.container["Env"]) >= {f"{name}={value}" for name, value in values.items()}
    assert (service.startup_deadline_s, service.request_timeout_s) == (100_000, 2)


def reservation(device: str) -> str:
    return f"deploy: {{resources: {{reservations: {{devices: [{{capabilities: [gpu]{device}}}]}}}}}}"


@pytest.mark.parametrize(
    ("x_serve", "reserved", "gpu"),
    [
        ("", reservation(", driver: nvidia, count: 2"), GpuRequest(2)),
        ("gpu: {memory: 1GiB}", reservation(", driver: nvidia"), GpuRequest(1, slot=SLOT)),
        ("gpu: {memory: 1GiB}", "gpus: all", GpuRequest(1, slot=SLOT)),
        (
            "gpu: {memory: 1GiB}",
            reservation(", device_ids: [GPU-1, GPU-2]"),
            GpuRequest(1, ("GPU-1", "GPU-2"), slot=SLOT),
        ),
    ],
)
async def test_gpus_as_compose_prints_them(tmp_path: Path, x_serve: str, reserved: str, gpu: GpuRequest) -> None:
    write(tmp_path / "compose.yaml", f"services: {{a: {{image: a, scale: 0, x-serve: {{{x_serve}}}, {reserved}}}}}")
    assert (await load(tmp_path)).services["a"].gpu == gpu


@pytest.mark.parametrize("count", ["", ", count: all"])
async def test_all_gpus_as_compose_prints_them(tmp_path: Path, count: str) -> None:
    text = f"services: {{a: {{image: a, scale: 0, x-serve: {{}}, {reservation(', driver: nvidia' + count)}}}}}"
    told = await problem(tmp_path, text)
    assert told.startswith("services.a.deploy.resources.reservations.devices[0].count: expected the number of GPUs")


async def test_the_reference_can_be_loaded() -> None:
    spec = await load(ROOT, COMPOSE_FILE="compose/reference.yaml", COMPOSE_PROJECT_NAME="reference")
    names = ["autoscaled", "gpu-slots", "gpu-turns", "language-model", "large-tensors", "reference"]
    assert (spec.project, sorted(spec.services), spec.warnings) == ("reference", names, ())


# ------------------------------------------------------------------------------------------------- what goes wrong

REST = ", scale: 0, x-serve: {}}}"


VARIABLES = "the controller takes variables from DIR/.env and from its own environment, not from the shell that ran"


async def test_a_variable_that_became_empty_is_a_warning(tmp_path: Path) -> None:
    write(tmp_path / "compose.yaml", "services: {a: {image: 'a${TAG}'" + REST)
    (warning,) = (await load(tmp_path)).warnings
    assert warning.startswith(f'variable "TAG" is not set and became empty: {VARIABLES}'.replace("DIR", str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "environment", "said"),
    [
        (
            "services: {a: {image: '${TAG:?which release}'" + REST,
            {},
            f'services.a.image: variable "TAG" has no value (which release): {VARIABLES}',
        ),
        (None, {"COMPOSE_FILE": "nope.yaml"}, "DIR/nope.yaml: no such file; relative names start at DIR "),
        ("include: [gone.yaml]", {}, "DIR/gone.yaml: no such file; "),
        ("services: {a: {image: a, env_file: gone.env" + REST, {}, "DIR/gone.env: no such file; "),
        # Compose looks in the directories above as well; there is none in a temporary one.
        (None, {}, "DIR: no configuration file provided: not found"),
        (
            "services: {a: {image: a, scale: 0, x-serve: {replicas: two}}}",
            {},
            'services.a.x-serve.replicas: expected an integer >= 0, found "two"',
        ),
    ],
    ids=["variable", "file", "included file", "env_file", "no file at all", "x-serve"],
)
async def test_problems_say_where(tmp_path: Path, text: str | None, environment: dict[str, str], said: str) -> None:
    assert (await problem(tmp_path, text, **environment)).startswith(said.replace("DIR", str(tmp_path)))


async def test_a_problem_of_a_file_that_another_one_includes_has_its_place(tmp_path: Path) -> None:
    text = (
        "services:\n  a: {image: a, scale: 0, x-serve: {}}\n  b:\n    extends: a\n    x-serve:\n      replicas: two\n"
    )
    write(tmp_path / "apps" / "b.yaml", text)
    told = await problem(tmp_path, "include: [apps/b.yaml]")
    assert told == 'services.b.x-serve.replicas: expected an integer >= 0, found "two" (apps/b.yaml:6)'


async def test_malformed_yaml_says_file_line_and_column(tmp_path: Path) -> None:
    write(tmp_path / "good.yaml", "services: {}")
    write(tmp_path / "bad.yaml", "services:\n  a:\n    image: b\n   scale: 0\n")
    told = await problem(tmp_path, None, COMPOSE_FILE="good.yaml:bad.yaml")
    assert told.startswith(f"{tmp_path}/bad.yaml: not valid YAML: line 4, column ")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("services: {a: {image: 5" + REST, "services.a.image must be a string"),
        ("services: {a: {image: a, networks: [nope]" + REST, 'service "a" refers to undefined network nope'),
        ("services: {a: {image: a, x-serve: {request_timeout_s: .nan}}}", "unsupported value: NaN"),
    ],
)
async def test_what_compose_refuses_is_in_its_words_with_the_file(tmp_path: Path, written: str, said: str) -> None:
    told = await problem(tmp_path, written)
    assert said in told
    assert f"{tmp_path}/compose.yaml: " in told


@pytest.mark.parametrize("lines", ENV_LINES)
def test_the_lines_of_an_env_file_that_the_scripts_read_too(tmp_path: Path, lines: str) -> None:
    (tmp_path / ".env").write_bytes(f"{lines}\n".encode())
    write(tmp_path / "compose.yaml", 'services: {a: {image: b, labels: {name: "${NAME-}"}}}')
    found = json.loads(users_own(tmp_path, "--format", "json"))
    assert found["services"]["a"]["labels"]["name"] == ENV_LINES[lines]


APPS = [path.stem for path in sorted((ROOT / "compose" / "apps").glob("*.yaml"))]
ON_GPUS = [app for app in APPS if (ROOT / "compose" / f"gpu-{app}.yaml").exists()]


@pytest.mark.parametrize(
    "files",
    [
        *(pytest.param([f"apps/{app}"], id=app) for app in APPS),
        *(pytest.param([f"apps/{app}", f"gpu-{app}"], id=f"{app} on GPUs") for app in ON_GPUS),
        pytest.param([f"apps/{app}" for app in APPS], id="all"),
    ],
)
async def test_the_apps_of_a_clone_have_nothing_that_a_swarm_refuses(files: list[str]) -> None:
    named = ":".join(f"compose/{file}.yaml" for file in ("swarm", *files))
    output, _ = await ComposeProject(ROOT, ENVIRONMENT | {"COMPOSE_FILE": named}).resolved()
    config = load_resolved(output)
    spec = parse("pierhead", config, DIALECTS)
    assert spec.services
    for name, one in spec.services.items():
        assert not_carried(create_body(one, f"pierhead-{name}-1", "1a2b3c4d", 1, (), "pierhead")) == ()
    assert "haproxy" in stack_file(config, Given(str(ROOT), (), {}, {}))["services"]
    first = config["services"][next(iter(spec.services))]
    with pytest.raises(SpecError, match=r"privileged: not possible on a Swarm: "):
        parse(
            "pierhead", {**config, "services": {**config["services"], "one": {**first, "privileged": True}}}, DIALECTS
        )
