"""The command line: `pierhead COMMAND`. It talks to the REST API, inside the controller's container or, with
PIERHEAD_API_URL and PIERHEAD_API_TOKEN, from anywhere.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from pierhead.interrupt import INTERRUPTED

from . import completion
from . import output as out
from .client import mismatch
from .commands import (
    alerts,
    backup,
    bundle,
    callers,
    change,
    console,
    follow,
    inside,
    keys,
    llm,
    look,
    node,
    offline,
    project,
)
from .errors import EXIT_CODES, BadInput, CommandError
from .help import Grouped

EPILOG = "\n".join(["\b\nExit codes:", *(f"  {code:3}  {words}" for code, words in EXIT_CODES.items())])

app = typer.Typer(
    name="pierhead",
    cls=Grouped,
    help="Shows what Pierhead's controller does and why, and asks it for changes.",
    epilog=EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (
    project, look, console, follow, inside, change, node, offline, llm, keys, alerts, backup, bundle, callers,
):  # fmt: skip
    module.register(app)


app.callback()(project.pierhead)


@app.command("completion")
def print_completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish", autocompletion=completion.shells)],
) -> None:
    """Print the completion script of a shell.

    For this session: source <(pierhead completion bash). For good, put that line into ~/.bashrc.
    """
    if shell not in completion.SHELLS:
        raise BadInput(f"SHELL: expected {', '.join(completion.SHELLS)}, found {shell!r}")
    out.say(completion.script(shell))


def main() -> NoReturn:
    """Run the command line; never returns."""
    try:
        _begin()
        _check_encoding(sys.argv[1:])
        code = _run(sys.argv[1:] or ["--help"])
        sys.stdout.flush()
    except SystemExit as error:
        # Typer would treat a closed pipe as a failure.
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        _end_unread()
    except CommandError as error:
        out.complain(str(error))
        sys.exit(error.exit_code)
    except typer.TyperException as error:
        out.complain(one_line(error))
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _end_unread()
    sys.exit(code if isinstance(code, int) else 0)


def _begin() -> None:
    """Prepare any command: Ctrl-C, and completion."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # before this there was nothing to clean up
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("_PIERHEAD_COMPLETE"):
        completion.serve_the_shell()


def _run(arguments: Sequence[str]) -> object:
    """Run a command; return its exit code. Raises CommandError where a controller of another build answered."""
    try:
        return app(args=arguments, prog_name="pierhead", standalone_mode=False)
    except (KeyError, TypeError) as error:
        if other := mismatch(error):
            raise other from error
        raise


def _end_unread() -> NoReturn:
    """End after the reader closed the pipe (`| head`); the interpreter must not flush the output at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def _check_encoding(arguments: Sequence[str]) -> None:
    """Raise BadInput for an argument that is not UTF-8, which could neither be shown nor sent."""
    for number, argument in enumerate(arguments, start=1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise BadInput(f"argument {number}: expected UTF-8, found {os.fsencode(argument)!r}") from None


def one_line(error: typer.TyperException) -> str:
    """Return a usage error in one line that names the help."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "pierhead"
    return f"{' '.join(error.format_message().split())} (`{path} --help` explains it)"
