"""Whether the program is of the same code as the clone that it is called from: a clone changes after a build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

INSTALLED = Path(__file__).resolve().parents[1]
"""The package `controller` that this program is part of."""


def stale_words(environment: Mapping[str, str], installed: Path = INSTALLED) -> str:
    """Say in one line that the controller's image is of other code than the clone; "" where it is not, or who knows.

    The clone is the project's directory, which the controller's container has at its own path. Some hundred small
    files are compared (10 ms), so no command needs a build to know.
    """
    if not (project := environment.get("PIERHEAD_PROJECT_DIR")):
        return ""
    checkout = Path(project) / "controller"
    # Somebody else's project may have a directory of that name: ours has this very file.
    if not (checkout / "cli" / "clone.py").is_file() or checkout.resolve() == installed:
        return ""
    try:
        other = next(_different(checkout, installed), None)
    except OSError:  # a file that goes while it is compared; the next command looks again
        return ""
    if other is None:
        return ""
    return (
        f"pierhead: the controller's image is of other code than this clone (controller/{other} differs); "
        f"`make up` builds and starts the clone's, `make build` only builds it"
    )


def _different(checkout: Path, installed: Path) -> Iterator[Path]:
    ours, theirs = (
        {path.relative_to(where): path for path in sorted(where.rglob("*.py"))} for where in (checkout, installed)
    )
    yield from sorted(ours.keys() ^ theirs.keys())
    for name in ours:
        if ours[name].read_bytes() != theirs[name].read_bytes():
            yield name
