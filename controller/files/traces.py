"""OpenTelemetry's variables of .env, which every managed replica gets that does not set them itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from .stack_options import StackOptions

TRACE_VARIABLES = (
    "OTEL_SDK_DISABLED",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "OTEL_RESOURCE_ATTRIBUTES",
)


def stack_traces(stack: StackOptions) -> Mapping[str, str]:
    """Those that are set."""
    return {name: str(value) for name in TRACE_VARIABLES if (value := stack.get(name))}
