"""What the controller relies on in the real `docker compose config`, in the releases that a machine may have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from controller.errors import SpecError
from controller.model.spec import GpuSlot, Spec
from controller.spec.compose import ComposeProject
from tests.unit.test_machine_scripts import ENV_LINES

ROOT = Path(__file__).parents[2]
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


def users_own(directory: Path, environment: Mapping[str, str] = ENVIRONMENT) -> str:
    """What the user's own `docker compose config` prints."""
    command = ["docker", "compose", "config"]
    done = subprocess.run(
        command, cwd=directory, env=dict(environment), capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


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


async def test_the_yaml_form_keeps_x_keys(tmp_path: Path) -> None:
    write(tmp_path / "compose.yaml", "services: {a: {image: a, scale: 0, x-serve: {replicas: 2}}}")
    assert "x-serve" in users_own(tmp_path)


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
    values = {
        "DOLLAR": "a$b",
        "DOUBLE": "a$$b",
        "YES": "yes",
        "DATE": "2020-01-01",
        "OCTAL": "010",
        "EQUALS": "=",
        "E": "1e6",
    }
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


async def test_gpus_as_compose_prints_them(tmp_path: Path) -> None:
    device = "{driver: nvidia, COUNT capabilities: [gpu]}"
    text = (
        "services: {a: {image: a, scale: 0, x-serve: {}, "
        f"deploy: {{resources: {{reservations: {{devices: [{device}]}}}}}}}}}}"
    )
    write(tmp_path / "compose.yaml", text.replace("COUNT", "count: 2,"))
    gpu = (await load(tmp_path)).services["a"].gpu
    assert gpu is not None
    assert gpu.count == 2
    for said in ("", "count: all,"):
        told = await problem(tmp_path, text.replace("COUNT", said))
        assert told.startswith("services.a.deploy.resources.reservations.devices[0].count: expected the number of GPUs")


@pytest.mark.parametrize(
    ("reservation", "device_ids"),
    [
        ("deploy: {resources: {reservations: {devices: [{driver: nvidia, capabilities: [gpu]}]}}}", ()),
        ("gpus: all", ()),
        (
            "deploy: {resources: {reservations: {devices: [{capabilities: [gpu], device_ids: [GPU-1, GPU-2]}]}}}",
            ("GPU-1", "GPU-2"),
        ),
    ],
)
async def test_a_reservation_beside_a_slot_as_compose_prints_it(
    tmp_path: Path, reservation: str, device_ids: tuple[str, ...]
) -> None:
    text = f"services: {{a: {{image: a, scale: 0, x-serve: {{gpu: {{memory: 16GiB}}}}, {reservation}}}}}"
    write(tmp_path / "compose.yaml", text)
    gpu = (await load(tmp_path)).services["a"].gpu
    assert gpu is not None
    assert (gpu.count, gpu.device_ids, gpu.slot) == (1, device_ids, GpuSlot(memory_bytes=16 * 1024**3))


async def test_limits_of_cpu_and_memory_as_compose_prints_them(tmp_path: Path) -> None:
    limits = "deploy: {resources: {limits: {cpus: 1.5, memory: 2g}, reservations: {cpus: 0.5, memory: 512m}}}"
    for written in (limits, "cpus: 1.5, mem_limit: 2g, mem_reservation: 512m"):
        write(tmp_path / "compose.yaml", f"services: {{a: {{image: a, scale: 0, x-serve: {{}}, {written}}}}}")
        host = (await load(tmp_path)).services["a"].container["HostConfig"]
        assert (host["NanoCpus"], host["Memory"], host["MemoryReservation"]) == (1_500_000_000, 2 * 2**30, 512 * 2**20)


async def test_the_reference_can_be_loaded() -> None:
    spec = await load(ROOT, COMPOSE_FILE="compose/reference.yaml", COMPOSE_PROJECT_NAME="reference")
    names = ["autoscaled", "gpu-slots", "language-model", "reference"]
    assert (spec.project, sorted(spec.services), spec.warnings) == ("reference", names, ())


async def test_the_same_files_give_the_same_spec(tmp_path: Path) -> None:
    write(tmp_path / "compose.yaml", "services: {a: {image: a, scale: 0, environment: {B: 1, A: 2}, x-serve: {}}}")
    first = await load(tmp_path)
    write(tmp_path / "compose.yaml", "services: {a: {x-serve: {}, environment: {A: 2, B: 1}, scale: 0, image: a}}")
    assert await load(tmp_path) == first


# ------------------------------------------------------------------------------------------------- what goes wrong

REST = ", scale: 0, x-serve: {}}}"


async def test_a_missing_variable(tmp_path: Path) -> None:
    told = await problem(tmp_path, "services: {a: {image: '${TAG:?which release}'" + REST)
    assert told == (
        'services.a.image: variable "TAG" has no value (which release): the controller takes variables from '
        f"{tmp_path}/.env and from its own environment, not from the shell that ran `docker compose up`; write TAG=... "
        f"into {tmp_path}/.env"
    )


async def test_a_variable_that_became_empty_is_a_warning(tmp_path: Path) -> None:
    write(tmp_path / "compose.yaml", "services: {a: {image: 'a${TAG}'" + REST)
    assert (await load(tmp_path)).warnings == (
        (
            f'variable "TAG" is not set and became empty: the controller takes variables from {tmp_path}/.env and from '
            "its own environment, not from the shell that ran `docker compose up`"
        ),
    )


async def test_a_missing_file(tmp_path: Path) -> None:
    rest = (
        f"relative names start at {tmp_path} (COMPOSE_FILE) or at the file that names it (include, extends, env_file), "
        f"and the controller sees what lies in {tmp_path} only"
    )
    assert await problem(tmp_path, None, COMPOSE_FILE="nope.yaml") == f"{tmp_path}/nope.yaml: no such file; {rest}"
    assert await problem(tmp_path, "include: [gone.yaml]") == f"{tmp_path}/gone.yaml: no such file; {rest}"
    told = await problem(tmp_path, "services: {a: {image: a, env_file: gone.env" + REST)
    assert told == f"{tmp_path}/gone.env: no such file; {rest}"


async def test_no_file_at_all(tmp_path: Path) -> None:
    # Compose looks in the directories above as well; there is none in a temporary one.
    assert await problem(tmp_path, None) == f"{tmp_path}: no configuration file provided: not found"


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
async def test_what_compose_itself_refuses_is_in_its_own_words_with_the_file(
    tmp_path: Path, written: str, said: str
) -> None:
    told = await problem(tmp_path, written)
    assert said in told
    assert f"{tmp_path}/compose.yaml: " in told


async def test_our_own_messages_arrive_through_compose(tmp_path: Path) -> None:
    told = await problem(tmp_path, "services: {ranker: {image: a, scale: 0, x-serve: {replicas: two}}}")
    assert told == 'services.ranker.x-serve.replicas: expected an integer >= 0, found "two"'


@pytest.mark.parametrize("lines", ENV_LINES)
def test_the_lines_of_an_env_file_that_the_scripts_read_too(tmp_path: Path, lines: str) -> None:
    (tmp_path / ".env").write_bytes(f"{lines}\n".encode())
    text = 'services: {a: {image: b, labels: {name: "${NAME-}"}}}'
    write(tmp_path / "compose.yaml", text)
    command = ["docker", "compose", "config", "--format", "json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout)["services"]["a"]["labels"]["name"] == ENV_LINES[lines]
