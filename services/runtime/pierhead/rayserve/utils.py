"""Ray Serve's module of this name."""

from pierhead.rayserve.context import get_trace_context

__all__ = ["get_trace_context"]
