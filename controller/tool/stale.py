"""Says where the controller's image is of other code than the command, which its answers tell."""

from __future__ import annotations

from ..build import current_build


def stale_words(where: str, theirs: str) -> str:
    """A one-line warning that the controller's image is of other code than the command; "" where it is not.

    `where`: "clone" or "directory", what the stack was started from; "" where it is another machine's. `theirs`: the
    controller's build.
    """
    if not where or not theirs or (ours := current_build()) == theirs:
        return ""
    if where == "clone":
        return (
            f"pierhead: the controller's image is of other code than this clone (build {theirs}, the clone's is "
            f"{ours}); `make up` builds and starts the clone's, `make build` only builds it"
        )
    return (
        f"pierhead: the controller's image is of other code than this tool (build {theirs}, the tool's is {ours}); "
        "`pierhead up` brings both together"
    )
