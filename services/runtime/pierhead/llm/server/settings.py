"""The LLM server's own settings from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pierhead.environment import Environment
from pierhead.errors import SettingsError
from pierhead.llm.server.models.cache import CACHE_VARIABLE
from pierhead.llm_config import VARIABLE, LLMConfig
from pydantic import ValidationError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """| variable | meaning |
    |---|---|
    | PIERHEAD_LLM_CONFIG | what is served: an LLMConfig as JSON; the controller sets it from x-serve.llm |
    | PIERHEAD_LLM_CACHE | where models and adapters from elsewhere are kept; default /cache |
    | PIERHEAD_ADMIN_TOKEN | what `Operate` asks for, as the admin port does; empty = nothing |
    """

    config: LLMConfig
    cache: Path
    admin_token: str = field(default="", repr=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ServerSettings:
        """Read the environment. Raises SettingsError naming what cannot be used."""
        env = Environment(environ)
        raw = env.text(VARIABLE)
        if not raw:
            raise SettingsError(
                f"{VARIABLE}: expected what to serve, as JSON, found nothing; the controller sets it for services with "
                'x-serve.llm; by hand: {"engine": "mock", "model_loading": {"model_id": "demo"}}'
            )
        try:
            config = LLMConfig.model_validate_json(raw)
        except ValidationError as error:
            problems = [_problem(each["loc"], each["msg"]) for each in error.errors(include_url=False)]
            raise SettingsError("\n".join(problems)) from None
        return cls(config, cache_directory(environ), env.text("PIERHEAD_ADMIN_TOKEN"))


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where models and adapters from elsewhere are kept."""
    return Path(Environment(environ).text(CACHE_VARIABLE, "/cache"))


def _problem(place: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join((VARIABLE, *map(str, place)))}: {message[0].lower()}{message[1:]}"
