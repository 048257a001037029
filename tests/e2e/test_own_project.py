"""What a user does who has the wheel and no clone: a new project, and a compose file that was there before.

The tool is installed into an environment outside of the repository. Its images have a tag of their own; they are built
on base images that are here, so no registry is asked.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml
from openai import OpenAI, PermissionDeniedError
from openai.types.chat import ChatCompletionUserMessageParam
from pierhead.testing import Stack
from PIL import Image

from tests.harness.collector import collecting
from tests.harness.load import Load
from tests.harness.ports import free_ports
from tests.harness.stack import ROOT, request
from tests.harness.user import COMMAND_S, TAG, User, own_ports, remove_images
from tests.harness.waiting import eventually
from tests.harness.wheel import build_wheel, environment

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(900)]

PAGES_CLASSES = re.findall(
    r'^```python title="(my_package/[\w.]+)"\n(.*?)^```',
    (ROOT / "docs/how-to/language-models.md").read_text(),
    re.DOTALL | re.MULTILINE,
)
"""Files and their text."""
UP_TO_DATE, FAILED = " s after the save of app.py.", "The next save tries it again."
FOREIGN = """\
services:
  db:
    image: debian:bookworm-slim
    command: [sleep, infinity]
    init: true
    volumes: ["./data:/data:ro", "kept:/kept"]
  web:
    build: .
    scale: 0
    env_file: [web.env]
    depends_on: [db]
    x-serve:
      replicas: 1
      route: /
      port: 8080
      health: {probe: {path: /}}
volumes:
  kept: {}
"""
FOREIGN_IMAGE = f"""\
FROM pierhead/python:{TAG}
USER pierhead
CMD ["sh", "-c", "cd /tmp && echo $SAYS > index.html && exec python -m http.server 8080"]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield environment(tmp_path_factory.mktemp("tool") / "venv", wheel)
    remove_images(TAG, "raysapptest-", "raysllmtest-")


@pytest.fixture(scope="module")
def shop(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """A new project, brought up; the tests are one story, in this order."""
    begins = User(programs, tmp_path_factory.mktemp("somewhere"))
    assert "pierhead up" in begins.does("pierhead", "new", "own-shop test")
    user = User(programs, begins.directory / "own-shop test")
    project = user.directory / "compose.yaml"
    project.write_bytes(project.read_bytes().replace(b"\n", b"\r\n"))
    began = time.monotonic()
    (user.directory / ".env").write_bytes(
        own_ports().replace("\n", "\r\n").encode() + b"COMPOSE_PROJECT_NAME=ownshoptest"
    )
    with user.cleaned_up():
        said = user.does("pierhead", "up")
        print(f"up: {time.monotonic() - began:.0f} s\n{said}")
        assert "In .env: COMPOSE_FILE=compose.yaml:.pierhead/stack.yaml" in said
        yield user


def test_a_new_project_answers_after_three_commands(shop: User) -> None:
    status, body = shop.get("/?name=Ada")
    assert (status, json.loads(body)) == (200, {"greeting": "Hello, Ada!"})
    assert shop.services()["greeter"]["ready"] == 1
    assert "service Greeter {" in shop.does("pierhead", "proto", "app:Greeter"), "by the tool's own Python"
    assert b"\r\n" in (shop.directory / ".env").read_bytes()


def test_it_is_scaled_from_a_directory_below(shop: User) -> None:
    below = shop.directory / "src"
    below.mkdir()
    User(shop.programs, below).does("pierhead", "scale", "greeter", "2")
    assert shop.services()["greeter"]["ready"] == 2
    assert "greeter" in User(shop.programs, below).does("pierhead", "why", "greeter")
    assert "controls project ownshoptest" in shop.does("pierhead", "logs", "controller")


def test_plain_compose_and_an_upgrade_to_the_same_build_change_nothing(shop: User) -> None:
    before = shop.containers()
    shop.does("docker", "compose", "up", "--detach")
    assert shop.containers() == before
    shop.does("pierhead", "upgrade", "state.json", PIERHEAD_API_URL="http://127.0.0.1:9")  # the API of another stack
    assert shop.containers() == before
    assert json.loads((shop.directory / "state.json").read_text())["project"] == "ownshoptest"


def test_it_is_served_without_docker_by_the_tools_own_python(shop: User) -> None:
    port, began = free_ports(1)[0], time.monotonic()
    command = [str(shop.programs / "pierhead"), "dev", "app:app", "--port", str(port)]
    with subprocess.Popen(command, cwd=shop.directory, env={"PATH": os.environ["PATH"]}) as dev:
        try:
            url = f"http://127.0.0.1:{port}/?name=Ada"
            eventually(lambda: request(url).json == {"greeting": "Hello, Ada!"}, "dev answers")
            print(f"dev: {time.monotonic() - began:.1f} s")
        finally:
            dev.terminate()


def test_a_test_has_a_stack_of_its_own(shop: User) -> None:
    """`pierhead.testing.Stack` of the same directory, while its stack is up."""
    own = {"PYTHONPATH": "", "PIERHEAD_TAG": TAG, "PATH": f"{shop.programs}:{os.environ['PATH']}"}
    with Stack(shop.directory / "compose.yaml", environment=own, command=[str(shop.programs / "pierhead")]) as stack:
        answer = request(f"{stack.base_url}/?name=Ada")
        assert (answer.status, json.loads(answer.body)) == (200, {"greeting": "Hello, Ada!"})
    labels = [f"com.docker.compose.project={stack.project}"]
    engine = docker.from_env()
    assert engine.containers.list(all=True, filters={"label": labels}) == []
    assert engine.images.list(f"{stack.project}-*") == [], "what it built is gone"
    assert shop.setting("COMPOSE_PROJECT_NAME") == "ownshoptest"
    assert shop.get("/?name=Ada")[0] == 200, "the other one still serves"


def test_a_save_is_served_within_seconds(shop: User, tmp_path: Path) -> None:
    """`up --watch`, under load. What does not become ready changes nothing, and says where it fails.

    With a bake time that the test does not live to see. How long an edit takes is printed: it depends on the machine.
    """
    project = shop.directory / "compose.yaml"
    project.write_bytes(project.read_bytes().replace(b"replicas: 1", b"replicas: 1\r\n      rollout: {bake_s: 600}"))
    app, said = shop.directory / "app.py", tmp_path / "watch.txt"
    good = app.read_text()
    last_good = good.replace("Hello", "Moin")
    raising = last_good.replace("self.greeter = greeter", "raise RuntimeError('no such model')")
    url = f"http://127.0.0.1:{shop.setting('PIERHEAD_HTTP_PORT')}/?name=Ada"

    def answer() -> object:
        return request(url).json

    def ends(text: str, words: str) -> str:
        """What is said once a save was carried out, or was not."""
        before = len(said.read_text())
        app.write_text(text)
        eventually(lambda: words in said.read_text()[before:], words)
        return said.read_text()[before:]

    edits = (
        (good.replace("Hello", "Salut"), {"greeting": "Salut, Ada!"}),
        (good.replace('"greeting"', '"answer"'), {"answer": "Hello, Ada!"}),
        (last_good, {"greeting": "Moin, Ada!"}),
    )
    took: list[float] = []

    def until_answered(expected: object) -> None:
        began = time.monotonic()
        eventually(lambda: answer() == expected, f"the answer is {expected}", every_s=0.01)
        took.append(time.monotonic() - began)

    with said.open("w") as output, Load([url], connections=4, pause_s=0.05) as load:
        with shop.begins("pierhead", "up", "--watch", output=output) as watch, ThreadPoolExecutor() as clients:
            eventually(lambda: "Watching the files of greeter, web." in said.read_text(), "it watches")
            for text, expected in edits:
                answered = clients.submit(until_answered, expected)
                ends(text, UP_TO_DATE)
                answered.result()
            print(f"first new answer after {', '.join(f'{seconds:.1f} s' for seconds in took)}\n{said.read_text()}")
            assert "SyntaxError: invalid syntax (app.py:1)" in ends("def broken(:", FAILED)
            told = ends(raising, FAILED)
            assert re.search(r"RuntimeError: no such model \(app.py:\d+\)", told), told
            assert answer() == {"greeting": "Moin, Ada!"}, "the last good one serves"
            ends(good, "Rolling out greeter web ...")
            os.killpg(watch.pid, signal.SIGINT)  # Ctrl-C reaches what it has started too
            assert watch.wait(COMMAND_S) == 0
        assert said.read_text().endswith(
            "The stack keeps running: `pierhead status` shows it, `pierhead down` removes it.\n"
        )
        eventually(lambda: answer() == {"greeting": "Hello, Ada!"}, "the controller ends what was begun")
    load.assert_no_failure()
    shop.does("pierhead", "deploy", "--now")
    before = shop.containers()
    shop.does("pierhead", "up")
    assert shop.containers() == before, "nothing is hidden: the images say it all"


def test_a_new_language_model_answers_the_openai_client(programs: Path, tmp_path: Path) -> None:
    """`new --llm`, `up`, the example client, the project's own test in a stack of its own; then a second model."""
    begins = User(programs, tmp_path / "models")
    begins.directory.mkdir()
    assert "pierhead up" in begins.does("pierhead", "new", "--llm", "--engine", "mock", "own chat test")
    user, began = User(programs, begins.directory / "own chat test"), time.monotonic()
    (user.directory / ".env").write_text(own_ports())
    with user.cleaned_up():
        said = user.does("pierhead", "up")
        client = OpenAI(base_url=f"http://127.0.0.1:{user.setting('PIERHEAD_HTTP_PORT')}/v1", api_key="none")
        asked: ChatCompletionUserMessageParam = {"role": "user", "content": "What is the capital of France?"}

        def answers(model: str) -> bool:
            whole = client.chat.completions.create(model=model, messages=[asked], max_tokens=8)
            return bool(whole.choices[0].message.content)

        assert answers("mock")
        print(f"from nothing to an answer: {time.monotonic() - began:.0f} s\n{said}")
        assert user.does(sys.executable, "chat.py", "What is the capital of France?").strip()
        tested = user.does(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_chat.py")
        assert "1 passed" in tested
        before = user.containers()
        build = ("pierhead", "llm", "build", "--engine", "mock", "--model", "second", "--file", "second.yaml")
        assert "add second.yaml to COMPOSE_FILE in .env, then pierhead up" in user.does(*build)
        env = user.directory / ".env"
        env.write_text(env.read_text().replace("COMPOSE_FILE=compose.yaml:", "COMPOSE_FILE=compose.yaml:second.yaml:"))
        user.does("pierhead", "validate")
        user.does("pierhead", "up")
        assert {model.id for model in client.models.list()} == {"mock", "second"}
        assert answers("second")
        replicas = {name for name in before if "-llm-" in name and "gateway" not in name}
        assert replicas <= set(user.containers()), "the first model is not affected"


def test_an_engine_and_a_server_of_the_page_serve_in_the_image_of_a_new_language_model(
    programs: Path, tmp_path: Path
) -> None:
    """`up --watch` follows the saves: first of the compose file, then of the engine."""
    begins = User(programs, tmp_path / "classes")
    begins.directory.mkdir()
    begins.does("pierhead", "new", "--llm", "--engine", "mock", "own classes test")
    user, said = User(programs, begins.directory / "own classes test"), tmp_path / "watch.txt"
    (user.directory / ".env").write_text(own_ports())
    compose, engine = user.directory / "compose.yaml", user.directory / "my_package" / "engine.py"
    for file, text in PAGES_CLASSES:
        (user.directory / file).write_text(text)
    with user.cleaned_up():
        user.does("pierhead", "up")
        client = OpenAI(base_url=f"http://127.0.0.1:{user.setting('PIERHEAD_HTTP_PORT')}/v1", api_key="none")

        def answer(words: str) -> str:
            asked: ChatCompletionUserMessageParam = {"role": "user", "content": words}
            events = client.chat.completions.create(model="mock", messages=[asked], stream=True)
            return "".join(event.choices[0].delta.content or "" for event in events)

        with (
            said.open("w") as output,
            user.begins("pierhead", "up", "--watch", output=output) as watch,
        ):
            eventually(lambda: "Watching the files of llm." in said.read_text(), "it watches")
            mine = "engine: my_package.engine:MyEngine\n        server_cls: my_package.server:MyServer"
            compose.write_text(compose.read_text().replace("engine: mock", mine))
            eventually(lambda: answer("how are you") == "HOW ARE YOU", "the engine of the page answers", within_s=120)
            with pytest.raises(PermissionDeniedError, match="secrets are not allowed here"):
                answer("a secret")
            engine.write_text(engine.read_text().replace("str.upper", "str.title"))
            eventually(lambda: answer("how are you") == "How Are You", "the saved one answers", within_s=120)
            os.killpg(watch.pid, signal.SIGINT)
            assert watch.wait(COMMAND_S) == 0


def test_an_existing_compose_file_runs_with_it(shop: User, tmp_path: Path) -> None:
    user = User(shop.programs, tmp_path / "others web test")
    (user.directory / "data").mkdir(parents=True)
    (user.directory / "web.env").write_text("SAYS=hello\n")
    ports = own_ports()
    (user.directory / ".env").write_text(ports)
    (user.directory / "Dockerfile").write_text(FOREIGN_IMAGE)
    (user.directory / "compose.yaml").write_text(FOREIGN.replace("    scale: 0\n", ""))
    missing = user.type("pierhead", "up")
    assert missing.returncode == 2, missing.stdout
    assert "services.web.scale: expected 0, found nothing, which means 1" in missing.stderr
    assert "write scale: 0 here" in missing.stderr
    assert (user.directory / ".env").read_text() == ports, "nothing was chosen, so nothing was started"
    (user.directory / "compose.yaml").write_text(FOREIGN)
    with user.cleaned_up():
        said = user.does("pierhead", "up")
        assert "http://127.0.0.1:" in said
        eventually(lambda: user.get("/") == (200, b"hello\n"), "the foreign service answers")
        assert set(user.services()) == {"web"}
        name = user.setting("COMPOSE_PROJECT_NAME")
        assert f"{name}-db-1" in user.containers(), "Compose's own"
        user.does("pierhead", "down")
        assert user.containers() == {}
        volumes = docker.from_env().volumes.list(filters={"name": f"{name}_kept"})
        assert len(volumes) == 1, "volumes stay"
    assert shop.get("/?name=Ada")[0] == 200, "the other project still serves"


PRIVATE = """\
services:
  web:
    image: {registry}/team/web:1
    command: [sh, -c, "cd /tmp && exec python -m http.server 8080"]
    init: true # as process 1 it would wait for SIGKILL
    scale: 0
    x-serve:
      replicas: 1
      route: /
      port: 8080
      health: {{probe: {{path: /}}}}
      rollout: {{bake_s: 0}}
"""
REGISTRY_CONFIG = """\
version: 0.1
storage: {filesystem: {rootdirectory: /var/lib/registry}}
http: {addr: "0.0.0.0:5000"}
auth: {htpasswd: {realm: test, path: /etc/docker/registry/users}}
"""
USERS = "ada:$2b$12$sk60YfW8lSc7IYBzs2jX9uOMqWO35EA5IzgMiIcNsV6IZ..YrXXQK\n"


@pytest.fixture
def private_registry(tmp_path: Path) -> Iterator[str]:
    """HOST:PORT of a registry that wants a login: ada, lovelace."""
    engine = docker.from_env()
    build = ["docker", "build", "--quiet", "--network", "host", "--tag", f"pierhead/registry:{TAG}"]
    subprocess.run([*build, str(ROOT / "compose" / "registry")], check=True, timeout=COMMAND_S)
    files = {"config.yml": REGISTRY_CONFIG, "users": USERS}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    [port] = free_ports(1)
    container = engine.containers.run(
        f"pierhead/registry:{TAG}", detach=True, ports={"5000/tcp": ("127.0.0.1", port)},
        volumes=[f"{tmp_path / name}:/etc/docker/registry/{name}:ro" for name in files],
    )  # fmt: skip
    try:
        eventually(lambda: request(f"http://127.0.0.1:{port}/v2/").status == 401, "the registry asks for a login")
        yield f"127.0.0.1:{port}"
    finally:
        container.remove(force=True, v=True)


def test_an_image_of_a_private_registry_comes_with_the_user_s_login(
    shop: User, private_registry: str, tmp_path: Path
) -> None:
    user, registry = User(shop.programs, tmp_path / "private web test"), private_registry
    user.directory.mkdir()
    (user.directory / ".env").write_text(own_ports())
    (user.directory / "compose.yaml").write_text(PRIVATE.format(registry=registry))
    stranger, ada = {"DOCKER_CONFIG": str(tmp_path / "stranger")}, {"DOCKER_CONFIG": str(tmp_path / "ada")}
    user.does("docker", "login", "--username", "ada", "--password", "lovelace", registry, **ada)
    for tag in "12":
        image = f"{registry}/team/web:{tag}"
        user.does("docker", "tag", f"pierhead/python:{TAG}", image)
        user.does("docker", "push", "--quiet", image, **ada)
        user.does("docker", "rmi", image)

    refused = user.type("pierhead", "up", **stranger)
    assert refused.returncode == 1
    assert f"Not on this machine: {registry}/team/web:1. " in refused.stderr
    assert "docker login" in refused.stderr
    assert user.containers() == {}, "nothing was started"
    with user.cleaned_up():
        try:
            user.does("pierhead", "up", **ada)
            assert user.get("/")[0] == 200
            compose = user.directory / "compose.yaml"
            compose.write_text(compose.read_text().replace("web:1", "web:2"))
            blocked = eventually(lambda: user.services()["web"]["blocked"], "the controller has no login")
            assert "`docker login` and `pierhead up` bring it" in blocked
            assert user.get("/")[0] == 200, "running services are not affected"
            user.does("pierhead", "up", **ada)
            eventually(lambda: user.services()["web"]["converged"], "the new image runs")
        finally:
            (user.directory / "compose.yaml").write_text(PRIVATE.format(registry=registry))
    user.does("docker", "rmi", *(f"{registry}/team/web:{tag}" for tag in "12"))


RAYS_APPLICATION = """\
from pierhead import rayserve as serve


class OutOfStock(Exception):
    def __init__(self, item):
        super().__init__(item)
        self.item = item


@serve.deployment(num_replicas=2, user_config={"factor": 2})
class Model:
    def reconfigure(self, config):
        self.factor = config["factor"]

    def predict(self, x):
        if x == 13:
            raise OutOfStock("tea")
        return x * self.factor

    def count(self, most):
        yield from range(most)


@serve.deployment
class Api:
    def __init__(self, model):
        self.model = model

    async def __call__(self, request):
        try:
            value = await self.model.predict.remote(int(request.query_params["x"]))
        except OutOfStock as error:
            return {"out of stock": error.item}
        return [value, [item async for item in self.model.options(stream=True).count.remote(3)]]


app = Api.bind(Model.bind())
"""


def builds(user: User, target: str) -> None:
    """The compose file and the Dockerfile of an application of Ray Serve, on the base image of these tests."""
    user.does("python", "-m", "pierhead", "build", target, "-o", "compose.yaml", "--dockerfile")
    dockerfile = user.directory / "Dockerfile"
    first, _, rest = dockerfile.read_text().partition("\n")
    dockerfile.write_text(f"{first.partition(':')[0]}:{TAG}\n{rest}")


def test_an_application_of_ray_serve_runs_as_services(programs: Path, tmp_path: Path) -> None:
    user = User(programs, tmp_path / "rays application")
    user.directory.mkdir()
    (user.directory / "app.py").write_text(RAYS_APPLICATION)
    (user.directory / ".env").write_text("COMPOSE_PROJECT_NAME=raysapptest\n")
    builds(user, "app:app")
    compose = user.directory / "compose.yaml"

    def answer(x: int) -> Any:
        status, body = user.get(f"/?x={x}")
        return json.loads(body) if status == 200 else (status, body)

    with user.cleaned_up():
        user.does("pierhead", "up")
        assert answer(4) == [8, [0, 1, 2]]
        assert answer(13) == {"out of stock": "tea"}
        before = user.containers()
        compose.write_text(compose.read_text().replace("factor: 2", "factor: 5"))
        eventually(lambda: answer(4) == [20, [0, 1, 2]], "the new user_config is in force", within_s=60)
        assert user.containers() == before


LLM_APPS = ROOT / "tests" / "rayserve" / "llm_apps"
CHAT: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def llm_programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("llm-tool") / "venv", f"{wheel}[llm,rayserve]", "fastapi")


@pytest.mark.parametrize(
    ("application", "path", "body", "answer"),
    [
        ("custom_engine", "/v1/chat/completions", CHAT, "small: hello"),
        ("custom_server", "/v1/chat/completions", CHAT, "small: added words"),
        ("custom_ingress", "/custom/endpoint", {"text": "hello"}, "small: hello"),
    ],
)
def test_an_application_of_ray_serve_llm_runs_as_services(
    application: str, path: str, body: dict[str, Any], answer: str, llm_programs: Path, tmp_path: Path
) -> None:
    """The examples of its guide that have classes of the user's own: a custom engine, server and ingress."""
    user = User(llm_programs, tmp_path / "application")
    user.directory.mkdir()
    for file in ("custom_engine.py", f"{application}.py"):
        on_a_cpu = 'placement_group_config={"bundles": [{"CPU": 1}]}, **more)'
        (user.directory / file).write_text((LLM_APPS / file).read_text().replace("**more)\n\n", f"{on_a_cpu}\n\n"))
    (user.directory / "requirements.txt").write_text("pierhead[llm]\nfastapi\n")
    (user.directory / ".env").write_text(f"COMPOSE_PROJECT_NAME=raysllmtest\n{own_ports()}")
    builds(user, f"{application}:app")

    with user.cleaned_up():
        user.does("pierhead", "up")
        assert said(user, path, body) == answer


def said(user: User, path: str, body: dict[str, Any]) -> str:
    """The words of an answer."""
    url = f"http://127.0.0.1:{user.setting('PIERHEAD_HTTP_PORT')}{path}"
    found = request(url, "POST", json.dumps(body).encode(), headers={"content-type": "application/json"})
    assert found.status == 200, found.body
    whole = json.loads(found.body)
    words: str = whole["answer"] if "answer" in whole else whole["choices"][0]["message"]["content"]
    return words


CLASSES_IN_YAML = """\
applications:
- name: own-app
  import_path: ray.serve.llm:build_openai_app
  route_prefix: /
  args:
    llm_configs:
    - model_loading_config: {model_id: small}
      llm_engine: custom_engine:MyCustomEngine
      server_cls: custom_server:CustomLLMServer
      placement_group_config: {bundles: [{CPU: 1}]}
    - model_loading_config: {model_id: own}
      llm_engine: custom_engine:MyCustomEngine
      placement_group_config: {bundles: [{CPU: 1}]}
"""


def classes_of(file: str) -> str:
    """A module of the guide without the application that it builds: the YAML says that."""
    classes = (LLM_APPS / file).read_text().partition("\n\ndef config_of")[0].partition("\n\napp = ")[0]
    return classes.replace("from custom_engine import config_of\n", "")


def test_classes_that_ray_serve_llm_s_yaml_names_run_in_the_user_s_image(llm_programs: Path, tmp_path: Path) -> None:
    user = User(llm_programs, tmp_path / "application")
    user.directory.mkdir()
    files = ("custom_engine.py", "custom_server.py")
    for file in files:
        (user.directory / file).write_text(classes_of(file))
    (user.directory / "serve.yaml").write_text(CLASSES_IN_YAML)
    (user.directory / "Dockerfile").write_text(f"FROM pierhead/llm-none:{TAG}\nCOPY {' '.join(files)} ./\n")
    (user.directory / ".env").write_text(f"COMPOSE_PROJECT_NAME=raysllmtest\n{own_ports()}")
    user.does("python", "-m", "pierhead", "import-ray", "serve.yaml", "-o", "compose.yaml")

    with user.cleaned_up():
        user.does("pierhead", "up")
        assert said(user, "/v1/chat/completions", CHAT) == "small: added words"
        assert said(user, "/v1/chat/completions", {**CHAT, "model": "own"}) == "own: hello"


GALLERY = ROOT / "docs" / "examples"
REDIS_OF_DEBIAN = {"image: redis:8": "build: redis", "[redis-server,": "[redis-server, --protected-mode, 'no',"}
"""The image of the example takes connections from other containers as it is."""
REDIS_IMAGE = """\
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*
USER redis
WORKDIR /data
"""


def copied(example: str, programs: Path, into: Path) -> User:
    """A user with the files of an example of the gallery, on the base image of these tests."""
    shutil.copytree(GALLERY / example, into)
    dockerfile = into / "Dockerfile"
    dockerfile.write_text(re.sub(r"^FROM pierhead/python:\S+", f"FROM pierhead/python:{TAG}", dockerfile.read_text()))
    (into / ".env").write_text(f"COMPOSE_PROJECT_NAME=owngallerytest\n{own_ports()}")
    return User(programs, into)


def test_the_fraud_example_decides_also_without_redis(programs: Path, tmp_path: Path) -> None:
    user = copied("fraud", programs, tmp_path / "fraud")
    compose = user.directory / "compose.yaml"
    for its_own, debians in REDIS_OF_DEBIAN.items():  # where no registry answers
        assert its_own in compose.read_text()
        compose.write_text(compose.read_text().replace(its_own, debians))
    (user.directory / "redis").mkdir()
    (user.directory / "redis" / "Dockerfile").write_text(REDIS_IMAGE)

    cards = itertools.count()

    def decision(amount: float) -> dict[str, Any]:
        """Of a card that has paid nothing before."""
        url = f"http://127.0.0.1:{user.setting('PIERHEAD_HTTP_PORT')}/payments"
        body = json.dumps({"card": str(next(cards)), "amount": amount}).encode()
        decided: dict[str, Any] = request(url, "POST", body, headers={"content-type": "application/json"}).json
        return decided

    with user.cleaned_up():
        user.does("pierhead", "up")
        eventually(lambda: decision(20) == {"decision": "accept", "risk": 0.027}, "Redis answers in time")
        eventually(lambda: decision(9000)["decision"] == "refuse", "a large payment is refused")
        user.does("docker", "compose", "stop", "redis")
        assert decision(20) == {"decision": "review", "risk": None}


def test_the_example_with_pictures_names_colours_and_sends_its_spans(programs: Path, tmp_path: Path) -> None:
    user = copied("pictures", programs, tmp_path / "pictures")
    made = io.BytesIO()
    Image.new("RGB", (2000, 1500), "red").save(made, "PNG")
    gateway = docker.from_env().networks.get("bridge").attrs["IPAM"]["Config"][0]["Gateway"]
    with user.cleaned_up(), collecting(gateway) as collector:
        with (user.directory / ".env").open("a") as env:
            env.write(f"OTEL_EXPORTER_OTLP_ENDPOINT={collector.url}\n")
        user.does("pierhead", "up")
        url = f"http://127.0.0.1:{user.setting('PIERHEAD_HTTP_PORT')}/colours"
        traced = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        assert request(url, "POST", made.getvalue(), traced).json == {"red": 1.0}
        services, trace = {"upload", "decoder", "classifier"}, bytes.fromhex("0af7651916cd43dd8448eb211c80319c")
        eventually(lambda: collector.services_of(trace) == services, "each service's spans are at the collector")
        eventually(lambda: "batch Classifier.shares" in collector.names_of(trace), "and that of the batch")


def test_the_workflow_of_the_page_passes_in_a_new_project(programs: Path, wheel: Path, tmp_path: Path) -> None:
    """The steps of its job `test`, in their order, as a runner types them."""
    begins = User(programs, tmp_path)
    begins.does("pierhead", "new", "owncitest")
    user = User(programs, tmp_path / "owncitest")
    (user.directory / ".env").write_text(own_ports())
    job = yaml.safe_load((GALLERY / "ci" / "workflow.yaml").read_text())["jobs"]["test"]
    typed = [step["run"] for step in job["steps"] if "run" in step]
    assert "pierhead down" in typed[-1]
    with user.cleaned_up():
        printed = [user.does("bash", "-eo", "pipefail", "-c", text, PIERHEAD_WHEEL=str(wheel)) for text in typed]
        assert '{"greeting": "Hello, Ada!"}' in "".join(printed)
        assert (user.directory / "bundle.txt").exists()
        assert user.containers() == {}, "the last step has removed it"
