"""Says where the controller is of another build than the command, and its answer cannot be read."""

from __future__ import annotations

from ..build import build_of
from .client import ControllerClient
from .errors import CommandError


def mismatch(error: Exception) -> CommandError | None:
    """The error for an answer that lacks a member because the controller is of another build; None if it is not."""
    try:
        info = ControllerClient.from_environment().get("/api/v1/openapi.json")["info"]
    except (CommandError, KeyError):
        return None
    ours, theirs = build_of(), info.get("x-build", "unknown")
    if ours == theirs:
        return None
    return CommandError(
        f"the controller is of another build ({theirs}) than this command ({ours}), which cannot read its answer "
        f"({type(error).__name__}: {error}); bring both to the same version, or run `pierhead` on the controller's "
        "machine"
    )
