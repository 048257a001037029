"""`pierhead llm ...`: writes compose files for language models, which needs no running stack; and has all replicas of a
model sleep, wake up or drop their cache of prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import output as out
from .. import tables
from ..errors import BadInput, CommandError, TimedOut
from .options import Output, connect
from .options import Service as OneService

if TYPE_CHECKING:
    from pierhead.llm_config import LLMConfig

    from ...status.records.changes import LLMOperation
    from ..project.project import Project


APPS = Path("compose/apps")
"""Where `make up APPS=...` finds an app's file, from the clone's root."""
HEADER = "# Written by `pierhead llm build`; yours to change. compose/reference.yaml explains the keys.\n"

Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="SOURCE", help="a Hugging Face id, a directory inside the container, or s3:// or gs://"
    ),
]
Name = Annotated[str, typer.Option("--name", metavar="MODEL_ID", help="what clients call it  [default: from SOURCE]")]
Service = Annotated[str, typer.Option("--service", metavar="SERVICE", help="its service  [default: from MODEL_ID]")]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus", metavar="N", min=0, max=64, help="GPUs of each replica; 0 = CPU  [default: 1; 0 for openai and mock]"
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Option("--engine-arg", metavar="KEY=VALUE", help="one of engine_kwargs, VALUE as JSON or text; repeatable"),
]
Engine = Annotated[str, typer.Option("--engine", metavar="NAME", help="vllm, openai, mock, or an import path")]
Accelerator = Annotated[str, typer.Option("--accelerator", metavar="NAME", help='part of the GPUs\' name, as "H100"')]
Replicas = Annotated[int, typer.Option("--replicas", metavar="N", min=0, help="how many")]
MaxReplicas = Annotated[
    int, typer.Option("--max-replicas", metavar="N", min=0, help="autoscale from --replicas to this")
]
Policy = Annotated[str, typer.Option("--policy", metavar="NAME", help="how the gateway chooses a replica")]
LoraPath = Annotated[str, typer.Option("--lora", metavar="PATH", help="where LoRA adapters are")]
File = Annotated[Path | None, typer.Option("--file", metavar="FILE", help="write it there  [default: print it]")]
Force = Annotated[bool, typer.Option("--force", help="write over FILE")]
Level = Annotated[
    int, typer.Option("--level", metavar="1|2", min=1, max=2, help="1: weights to the machine's memory; 2: drop them")
]
Patience = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.1, max=3600.0, help="the most for each replica")
]

OPERATE_S = 300.0
"""After a sleep of level 2 the weights are read from disk again."""
ANSWER_S = 10.0
"""How much longer the controller may take to answer than its replicas."""


def register(app: typer.Typer) -> None:
    """Add these commands."""
    group = typer.Typer(
        help="Language models: their compose files, and operations on their replicas.", rich_markup_mode=None
    )
    for command in (build, sleep, wake):
        group.command()(command)
    group.command("reset-prefix-cache")(reset_prefix_cache)
    app.add_typer(group, name="llm")


def build(
    model: Model,
    name: Name = "",
    service: Service = "",
    engine: Engine = "vllm",
    gpus: Gpus = None,
    accelerator: Accelerator = "",
    replicas: Replicas = 1,
    max_replicas: MaxReplicas = 0,
    engine_arg: Arguments = None,
    lora: LoraPath = "",
    policy: Policy = "prefix",
    file: File = None,
    force: Force = False,
) -> None:
    """Write the compose file of a model: its service, and the gateway with the OpenAI API.

    Example: pierhead llm build --model Qwen/Qwen2.5-7B-Instruct --gpus 1 --file qwen.yaml
    """
    import yaml
    from pierhead.files import replace_file
    from pierhead.llm_app import WITHOUT_VLLM, llm_app, llm_service

    project = _project()
    place = _place(file, project) if file else None
    if file is not None and file.exists() and not force:
        raise BadInput(f"--file: {file} is there already; name another one, or write over it with --force")
    gpus = gpus if gpus is not None else int(engine not in WITHOUT_VLLM)
    config = _config(_fields(model, name, engine, gpus, accelerator, engine_arg or [], lora))
    service = service or _service_name(config.model_loading.model_id)
    autoscale = {"min": replicas, "max": max_replicas, "target_ongoing_requests": 64} if max_replicas else None
    tag = _tag(project)
    part = llm_service(config, gpus=gpus > 0, replicas=replicas, autoscale=autoscale, policy=policy, tag=tag)
    try:
        document = llm_app({service: part}, tag=tag)
    except ValueError as error:
        raise BadInput(f"--service: {error}; nothing was written") from None
    _check(document)
    text = HEADER + yaml.safe_dump(document, sort_keys=False, width=120)
    if file is None or place is None:
        out.say(text.rstrip("\n"))
        return
    try:
        replace_file(file, text.encode())
    except OSError as error:
        raise BadInput(
            f"--file: {file} cannot be written: {error.strerror}; or leave --file out, and end it with > {file}"
        ) from None
    out.say(
        f"{file}: service {service} serves {config.model_loading.model_id}. Start it: {_how_to_start(place, project)}"
    )


def _fields(
    model: str, name: str, engine: str, gpus: int, accelerator: str, arguments: list[str], lora: str
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "engine": engine,
        "model_loading": {"model_id": name or _model_id(model), "model_source": model},
        "tensor_parallel_size": max(gpus, 1),
        "engine_kwargs": _arguments(arguments),
    }
    if accelerator:
        fields["accelerator_type"] = accelerator
    if lora:
        fields["lora"] = {"dynamic_lora_loading_path": lora, "max_num_adapters_per_replica": 8}
    return fields


def _model_id(source: str) -> str:
    """The last part of a source's name, as people call a model: "Qwen/Qwen2.5-7B-Instruct" -> qwen2.5-7b-instruct."""
    return source.rstrip("/").rpartition("/")[2].partition("@")[0].lower()


def _service_name(model_id: str) -> str:
    """A valid DNS name."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in model_id.lower())
    return "llm-" + "-".join(filter(None, letters.split("-")))[:36].strip("-")


def _arguments(texts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in map(_argument, texts):
        if key in found:
            raise BadInput(f"--engine-arg: {key} is given twice; write one of them")
        found[key] = value
    return found


def _argument(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadInput(f'--engine-arg: expected KEY=VALUE such as max_model_len=8192, found "{text}"')
    try:
        return key.replace("-", "_"), json.loads(value)
    except ValueError:
        return key.replace("-", "_"), value


def _config(fields: dict[str, Any]) -> LLMConfig:
    from pierhead.llm_config import LLMConfig
    from pydantic import ValidationError

    try:
        return LLMConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInput(f"{where}: {first['msg']}, found {json.dumps(first['input'])}; nothing was written") from None


def _check(document: dict[str, Any]) -> None:
    """Raise BadInput for what the controller would refuse."""
    from ...errors import SpecError
    from ...files.parse import parse

    # Volumes are ours, and in the short form, which Compose rewrites before the controller sees it.
    services = {name: {**service, "volumes": []} for name, service in document["services"].items()}
    try:
        parse("pierhead", {"services": services})
    except SpecError as error:
        raise BadInput("\n".join([*error.problems, "nothing was written"])) from None


def _project() -> Project | None:
    """The clone or project that the command is typed in; None in a directory that is to become one."""
    from ..project.project import Project

    directory = os.environ.get("PIERHEAD_PROJECT_DIR")
    return Project(Path(directory)) if directory else None


def _tag(project: Project | None) -> str:
    """The tag of the stack's images, as a compose file there names it."""
    from pierhead.llm_app import TAG

    from ..project import stack_files

    return TAG if project and project.is_clone else stack_files.tag()


def _place(file: Path, project: Project | None) -> Path:
    """Return FILE relative to the project's root, as in COMPOSE_FILE.

    Raises BadInput for a file outside of it: the controller would not find it.
    """
    if project is None:
        return file
    try:
        return file.resolve().relative_to(project.root.resolve())
    except ValueError:
        inside = project.root / (APPS if project.is_clone else "") / file.name
        raise BadInput(
            f"--file: {file} is outside of {project.root}, and the controller sees only that; name {inside}, or leave "
            f"--file out, and end the command with > {file}"
        ) from None


def _how_to_start(place: Path, project: Project | None) -> str:
    from pierhead.compose_names import DEFAULT_NAMES

    is_clone = project is not None and project.is_clone
    if is_clone and place.suffix == ".yaml" and place.parent == APPS:
        return f"make up APPS={place.stem}"
    if not is_clone and str(place) in DEFAULT_NAMES:
        return "pierhead up"
    return f"add {place} to COMPOSE_FILE in .env, then {'make' if is_clone else 'pierhead'} up"


def sleep(service: OneService, level: Level = 1, timeout: Patience = OPERATE_S, output: Output = "text") -> None:
    """Make every ready replica free its accelerator's memory. Replicas answer no requests until `wake`."""
    _operate(service, "sleep", timeout, output, level=level)


def wake(service: OneService, timeout: Patience = OPERATE_S, output: Output = "text") -> None:
    """Undo `sleep` on every ready replica."""
    _operate(service, "wake", timeout, output)


def reset_prefix_cache(service: OneService, timeout: Patience = OPERATE_S, output: Output = "text") -> None:
    """Make every ready replica drop its cache of prompts."""
    _operate(service, "reset_prefix_cache", timeout, output)


def _operate(service: str, operation: LLMOperation, timeout_s: float, output: str, *, level: int = 1) -> None:
    """Have each replica do it and show the answers. Raises CommandError where a replica failed."""
    from ...status.records.changes import Operate

    as_json, verb = out.is_json(output), operation.replace("_", "-")
    answers = connect(timeout_s + ANSWER_S).operate(service, Operate(operation, level, timeout_s)).replicas
    if as_json:
        listed = [{"name": each.name, "done": each.done, "message": each.message} for each in answers]
        out.print_json({"service": service, "operation": verb, "replicas": listed})
    else:
        listing = tables.CellTable(("REPLICA", verb.upper()), "WHY NOT")
        for answer in answers:
            listing.add(answer.name, "done" if answer.done else "no", sentence=answer.message)
        console = out.console()
        out.show(listing.render(out.width(console)), console)
    failed = [answer for answer in answers if not answer.done]
    if failed:
        kind = TimedOut if all(answer.late for answer in failed) else CommandError
        raise kind(f"{service}: {len(failed)} of {len(answers)} ready replicas did not do it: {failed[0].message}")
