"""What an `up` needs to know of the services that `docker compose config` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Services = Mapping[str, Mapping[str, Any]]
"""By name."""

_HERE = ("", "0.0.0.0", "127.0.0.1", "::")
"""Addresses that a connection to 127.0.0.1 reaches."""
_GATEWAY = "PIERHEAD_LLM_MODELS"
"""Any service is a gateway that has a variable whose name begins so, whatever its image."""
_OF_THE_STACK = r"pierhead/(?:python|llm-(?:gateway|none|cpu|cuda))(?::\S*)?"
"""The names of the images of compose/images.yaml."""
_BASE = re.compile(
    rf"^[^\S\n]*(?:FROM|from|ARG|arg)[^\S\n](?:.*[^\S\n]|.*=)?(?P<base>{_OF_THE_STACK})(?:[^\S\n].*)?$", re.MULTILINE
)
_FIRST_REQUESTS = {
    ("echo", "/echo"): "/echo?message=hi",
    ("recsys", "/recsys"): "/recsys/?user_id=7",
    ("llm-gateway", "/"): "/v1/models",
}


@dataclass(frozen=True)
class ServiceRoute:
    """A service that HTTP reaches from outside."""

    service: str
    path: str
    is_gateway: bool
    """Whether it has OpenAI's API."""
    host: str = ""
    """The name that requests must be sent to; "" = whatever name."""

    @property
    def first_request(self) -> str:
        """Whose success means that an app of the clone works; "" for other services."""
        return _FIRST_REQUESTS.get((self.service, self.path), "")

    def shown(self, *, of_clone: bool) -> str:
        """The path that a user is shown."""
        if self.is_gateway:
            return f"{self.path.rstrip('/')}/v1/models"
        return (of_clone and self.first_request) or self.path


def routes(services: Services) -> list[ServiceRoute]:
    """Of all services."""
    return [
        ServiceRoute(name, path, _is_gateway(one), str(_block(one).get("host") or ""))
        for name, one in services.items()
        if (path := str(_block(one).get("route") or "")).startswith("/")
    ]


def _is_gateway(service: Mapping[str, Any]) -> bool:
    return any(str(variable).startswith(_GATEWAY) for variable in service.get("environment") or {})


def ports(services: Services) -> Iterator[tuple[str, int]]:
    """Where each port of this machine that they publish is written, and the port."""
    for name, one in services.items():
        for port in one.get("ports") or ():
            published = str(port.get("published") or "")
            is_here = str(port.get("host_ip") or "") in _HERE and port.get("protocol", "tcp") == "tcp"
            if is_here and published.isdigit():
                yield f"services.{name}.ports", int(published)


def with_gpus(services: Services) -> list[str]:
    """The services that ask for a GPU."""
    return [name for name, one in services.items() if one.get("gpus") or _block(one).get("gpu") or _devices(one)]


def images_of_the_stack(services: Services) -> list[str]:
    """The images of compose/images.yaml that their Dockerfiles begin with, or that they run and do not build."""
    builds = [one["build"] for one in services.values() if one.get("build")]
    bases = [found["base"] for build in builds for found in _BASE.finditer(_dockerfile(build))]
    named = [str(one.get("image")) for one in services.values() if not one.get("build")]
    return sorted({_tagged(name) for name in (*bases, *(name for name in named if re.fullmatch(_OF_THE_STACK, name)))})


def _tagged(base: str) -> str:
    """As Docker reads it."""
    return base if ":" in base else f"{base}:latest"


def _dockerfile(build: Mapping[str, Any]) -> str:
    if inline := build.get("dockerfile_inline"):
        return str(inline)
    file = Path(build.get("context") or "") / (build.get("dockerfile") or "Dockerfile")
    try:
        return file.read_text(errors="replace")
    except OSError:  # a repository elsewhere; one that is missing is Docker's to say
        return ""


def takes_tokens(services: Services) -> bool:
    """Whether a service asks its clients for a JSON Web Token."""
    return any(_block(one).get("auth") == "jwt" for one in services.values())


def _block(service: Mapping[str, Any]) -> Mapping[str, Any]:
    block = service.get("x-serve")
    return block if isinstance(block, Mapping) else {}


def _devices(service: Mapping[str, Any]) -> Sequence[Any]:
    part: Any = service
    for key in ("deploy", "resources", "reservations", "devices"):
        part = part.get(key) or {}
    return list(part)
