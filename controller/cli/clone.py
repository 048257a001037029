"""Warns when the program's code differs from the clone's: a clone may change after the image was built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

INSTALLED = Path(__file__).resolve().parents[1]
"""The package `controller` that this program is part of."""


def stale_words(environment: Mapping[str, str], installed: Path = INSTALLED) -> str:
    """A one-line warning that the image's code differs from the clone's; "" where it does not, or cannot be compared.

    The clone is the project's directory, mounted into the controller's container at its own path. About a hundred small
    files are compared (10 ms).
    """
    if not (project := environment.get("PIERHEAD_PROJECT_DIR")):
        return ""
    checkout = Path(project) / "controller"
    # Another project may have a directory of that name; Pierhead's has this file.
    if not (checkout / "cli" / "clone.py").is_file() or checkout.resolve() == installed:
        return ""
    try:
        other = next(_different(checkout, installed), None)
    except OSError:  # a file was removed during the comparison; the next command compares again
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
