"""OpenTelemetry's variables of .env, which every managed replica gets that does not set them itself. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pierhead.settings import PARENT_BASED, SAMPLERS

from .stack_options import StackOptions

_SAMPLERS = (*SAMPLERS, *(f"{PARENT_BASED}{word}" for word in SAMPLERS))
_PROTOCOLS = ("http/protobuf", "grpc")


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


TRACE_VARIABLES: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "OTEL_SDK_DISABLED": ("true or false", lambda text: text in ("true", "false")),
    "OTEL_EXPORTER_OTLP_ENDPOINT": (
        "an address such as http://collector:4318",
        lambda text: text.startswith(("http://", "https://")),
    ),
    "OTEL_EXPORTER_OTLP_PROTOCOL": (" or ".join(_PROTOCOLS), _PROTOCOLS.__contains__),
    "OTEL_EXPORTER_OTLP_HEADERS": ("name=value,name=value", lambda text: "=" in text),
    "OTEL_TRACES_SAMPLER": (", ".join(_SAMPLERS), _SAMPLERS.__contains__),
    "OTEL_TRACES_SAMPLER_ARG": ("a number from 0 to 1", _is_share),
    "OTEL_RESOURCE_ATTRIBUTES": ("name=value,name=value", lambda text: "=" in text),
}
"""What each expects, and whether a text is that."""


def stack_traces(stack: StackOptions) -> Mapping[str, str]:
    """Those that are set; each wrong one is a problem."""
    found: dict[str, str] = {}
    for name, (expected, is_right) in TRACE_VARIABLES.items():
        if text := str(stack.get(name) or ""):
            found[name] = text
            if not is_right(text):
                stack.expected(name, expected, "another text" if name.endswith("HEADERS") else text)
    return found
