"""What `dev --processes` has to know of an application: a process of its own imports it and says so, as JSON.

So `dev` itself imports nothing of the user's, and each version begins in an interpreter that knows no other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pierhead.classes.target import NoService, NoTarget, bound_at
from pierhead.dev.project import FolderFiles
from pierhead.runner.graph import graph_of
from pierhead.runner.processes import ServiceFacts, facts_of
from pierhead.runner.runner import NoApplication, ProcessFailed
from pierhead.tracebacks import user_traceback


class Described(NamedTuple):
    """An application."""

    services: Mapping[str, ServiceFacts]
    """By name, callers before their callees."""
    files: Sequence[Path]
    """Of the project's modules that it imports."""


_NO_TARGET: Final = 2
"""Exit code of a process that prints why its target names nothing."""


async def described(target: str) -> Described:
    """Describe an application in the current directory. Raises ProcessFailed, NoTarget."""
    command = [sys.executable, "-m", __name__, target]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, start_new_session=True)
    try:
        said, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode == _NO_TARGET and said:
        raise NoTarget(said.decode())
    if process.returncode != 0:
        raise ProcessFailed("see above")
    found = json.loads(said)
    services = {name: ServiceFacts(*facts) for name, facts in found["services"].items()}
    return Described(services, [Path(file) for file in found["files"]])


def describe(target: str) -> str:
    """The JSON. Raises NoService, NoApplication, and what the module raises."""
    with contextlib.redirect_stdout(sys.stderr):  # what the module prints is no part of it
        graph = graph_of(bound_at(target))
    services = {name: facts_of(bound) for name, bound in graph.items()}
    files = sorted(map(str, FolderFiles(Path.cwd()).imported_files()))
    try:
        return json.dumps({"services": services, "files": files})
    except (TypeError, ValueError) as error:
        raise NoApplication(f"a keyword of a class has a value that JSON cannot hold: {error}") from None


def main() -> None:
    """Print it. Exits with 1 where it cannot."""
    try:
        sys.stdout.write(describe(sys.argv[1]))
    except NoTarget as error:
        sys.stdout.write(str(error))
        sys.exit(_NO_TARGET)
    except (NoService, NoApplication) as error:
        sys.exit(str(error))
    except Exception as error:
        sys.exit(user_traceback(error))


if __name__ == "__main__":
    main()
