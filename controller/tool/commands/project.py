"""Commands about a project's directory: new, init, up, upgrade, down, and those that its own Python runs. They are for
the machine; the controller's image has no files for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from .. import output as out
from ..errors import BadInput, CommandError

Directory = Annotated[
    Path | None, typer.Argument(metavar="DIRECTORY", help="directory to create; its name becomes the project's")
]
Llm = Annotated[bool, typer.Option("--llm", help="a language model behind OpenAI's API  [DIRECTORY: chat]")]
Engine = Annotated[
    str, typer.Option("--engine", metavar="NAME", help="with --llm: vllm, or mock, which needs no model")
]
OnGpu = Annotated[bool, typer.Option("--gpu", help="with --llm: a model for one GPU in place of a small one for CPUs")]
Volumes = Annotated[bool, typer.Option("--volumes", help="remove its volumes too")]
Force = Annotated[bool, typer.Option("--force", help="also the stack of another directory that has its name")]
Images = Annotated[bool, typer.Option("--images", help="remove the images that were built only for this project")]
Kept = Annotated[str, typer.Argument(metavar="FILE", help="where the backup goes; it must not exist")]
Watch = Annotated[bool, typer.Option("--watch", help="keep running and follow each save, until Ctrl-C")]
Apps = Annotated[str, typer.Option("--apps", hidden=True, help="apps of Pierhead's own repository")]
Gpu = Annotated[str, typer.Option("--gpu", hidden=True, help="1: with the files that give GPUs to these apps")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT]...")]

HANDED_OVER = {
    "dev": "Serve an application without Docker, and reload it when its files change.",
    "build": "Print the compose file of an application.",
    "serve": "Serve one service of an application: what its image runs.",
    "proto": "Print the .proto of a service.",
    "contract": "Write the contracts that an application's image carries.",
    "import-ray": "Make a compose file of the YAML of Ray Serve's `serve build`.",
}
"""What `python -m pierhead` of the project's Python does; `pierhead COMMAND --help` explains each."""


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (new, init, up, upgrade, down):
        app.command()(command)
    app.command("build-images", hidden=True)(build_images)
    for name, words in HANDED_OVER.items():
        settings = {"ignore_unknown_options": True}
        app.command(name, help=words, context_settings=settings, add_help_option=False)(_handed_over(name))


def show_version(is_asked: bool) -> None:
    """Print the version and the build, and end, where that is asked."""
    if is_asked:
        with _told():
            from ..project import stack_files

            out.say(f"pierhead {stack_files.version()}, build {stack_files.build()}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Show the version and build, and exit.", is_eager=True, callback=show_version)
]


def pierhead(_: Version = False) -> None:
    """Shows what Pierhead's controller does and why, and asks it for changes."""


def new(directory: Directory = None, llm: Llm = False, engine: Engine = "vllm", gpu: OnGpu = False) -> None:
    """Write a new project: two services, their compose file, a Dockerfile and a test; with --llm, a language model.

    Example: pierhead new --llm chat
    """
    if not llm and (gpu or engine != "vllm"):
        raise BadInput("--engine and --gpu are for language models: add --llm")
    if not llm and directory is None:
        raise BadInput("DIRECTORY: name the directory to create. Example: pierhead new shop")
    with _told():
        from ..project.new import new as new_app
        from ..project.new_llm import new_llm

        out.say(new_llm(directory or Path("chat"), engine, gpu=gpu) if llm else new_app(directory or Path()))


def init() -> None:
    """Prepare the project of this directory for plain `docker compose up`.

    Writes .pierhead/ and, into .env, the project's name, files and ports. `up` does the same first.
    """
    with _told():
        from ..project import commands

        out.say(commands.init())


def up(watch: Watch = False, apps: Apps = "", gpu: Gpu = "") -> None:
    """Start the project of this directory and wait until every service serves.

    Installs a Docker Engine on Debian or Ubuntu where there is none, builds the images, starts the stack.
    """
    with _told():
        from ..project import commands

        commands.up(watch=watch, apps=apps, gpu=gpu)


def upgrade(file: Kept) -> None:
    """Bring the running stack to this build of the tool: write a backup of its state, then `up`.

    Without a backup nothing is changed. Clients are served in the meantime, and replicas are replaced one by one.

    Example: pierhead upgrade state.json
    """
    with _told():
        from ..project import commands

        commands.upgrade(file)


def build_images(apps: Apps = "", gpu: Gpu = "") -> None:
    """Build the images of Pierhead's own repository: `make build`."""
    with _told():
        from ..project import commands

        commands.build_images(apps, gpu)


def down(volumes: Volumes = False, force: Force = False, images: Images = False) -> None:
    """Stop and remove everything of the project, replicas included. Volumes and images stay."""
    with _told():
        from ..project import commands

        commands.down(volumes=volumes, force=force, images=images)


def _handed_over(name: str) -> Callable[..., None]:
    def run(arguments: Words = None) -> None:
        from ..project.handover import hand_over

        hand_over([name, *(arguments or [])])

    return run


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raise CommandError in the place of what the project's room raises."""
    from ...errors import ControllerError
    from ..project.programs import Told

    try:
        yield
    except Told as error:
        raise typer.Exit(error.exit_code) from None
    except ControllerError as error:
        told = CommandError(str(error))
        told.exit_code = error.exit_code
        raise told from None
