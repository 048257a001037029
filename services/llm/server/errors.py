"""What goes wrong in an LLM replica. PierheadErrors, so that each has its gRPC status and HTTP code."""

from __future__ import annotations

from pierhead.errors import BadRequest, PierheadError


class LLMStartError(PierheadError):
    """The engine or its model could not be loaded: says what, where, why, and what to do."""


class LLMRequestError(BadRequest):
    """A request that this engine refuses."""


class NotSupported(BadRequest):
    """Something that this engine does not have."""
