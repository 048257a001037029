"""What the environment says to the gateway, beside `pierhead.Settings`. Read once, at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pierhead.errors import SettingsError

from services.llm.gateway.models.model_map import ModelMap, read_models

T = TypeVar("T")

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Half of what one message between services may have: images travel in the text."""

MAX_BODIES_BYTES = 512 * 1024 * 1024
"""Some 5,000 prompts of 100 KB. While a body waits for its answer the gateway has it some three times: as it came, in
the call, and on its way."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The gateway's settings.

    | variable | meaning |
    |---|---|
    | PIERHEAD_LLM_MODELS | JSON: which service answers for which model; see `model_map` |
    | PIERHEAD_LLM_MODELS_OF_* | more of it, so that several compose files can each add their own |
    | PIERHEAD_LLM_KEYS_FILE | file of the API keys; see `api_keys`. Without it everybody may do everything |
    | PIERHEAD_LLM_GATEWAYS | how many gateway processes share the keys' limits, default 1 |
    | PIERHEAD_LLM_MAX_BODY_BYTES | largest body that is taken, default 32 MiB; a larger one gets 413 |
    | PIERHEAD_LLM_MAX_BODIES_BYTES | room for the bodies that wait for an answer, default 512 MiB; beyond it 503 |
    | PIERHEAD_LLM_PREFILL_FALLBACK | true (default): without a prefill replica, decode does the whole; false: 503 |
    | PIERHEAD_LLM_MODELS_REFRESH_S | how often services are asked for their adapters, default 30 |
    """

    models: ModelMap
    keys_file: str | None = None
    gateways: int = 1
    max_body_bytes: int = MAX_BODY_BYTES
    max_bodies_bytes: int = MAX_BODIES_BYTES
    prefill_fallback: bool = True
    models_refresh_s: float = 30.0

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> GatewaySettings:
        """Read the environment. Raises SettingsError that names every bad variable, not only the first."""
        reader = _Reader(environ)
        read = reader.read
        keys_file = environ.get("PIERHEAD_LLM_KEYS_FILE", "").strip() or None
        settings = cls(
            models=reader.models(),
            keys_file=keys_file,
            gateways=read("PIERHEAD_LLM_GATEWAYS", 1, _from_to(1, 10_000), "an integer from 1 to 10000"),
            max_body_bytes=read(
                "PIERHEAD_LLM_MAX_BODY_BYTES", MAX_BODY_BYTES, _from_to(1024, 60 * 1024 * 1024),
                "a number of bytes from 1024 to 62914560",
            ),
            max_bodies_bytes=read(
                "PIERHEAD_LLM_MAX_BODIES_BYTES", MAX_BODIES_BYTES, _from_to(1024, 1 << 40),
                "a number of bytes from 1024 to 1099511627776",
            ),
            prefill_fallback=read("PIERHEAD_LLM_PREFILL_FALLBACK", True, _flag, "true or false"),
            models_refresh_s=read("PIERHEAD_LLM_MODELS_REFRESH_S", 30.0, _seconds, "seconds from 0.1 to 3600"),
        )  # fmt: skip
        if settings.max_bodies_bytes < settings.max_body_bytes:
            reader.problems.append(
                "PIERHEAD_LLM_MAX_BODIES_BYTES: expected at least PIERHEAD_LLM_MAX_BODY_BYTES, "
                f"{settings.max_body_bytes}, found {settings.max_bodies_bytes}"
            )
        if reader.problems:
            raise SettingsError("\n".join(reader.problems))
        return settings


class _Reader:
    """Reads typed values and collects what is wrong with them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.problems: list[str] = []

    def models(self) -> ModelMap:
        try:
            return read_models(self._environ)
        except ValueError as error:
            self.problems.append(str(error))
            return ModelMap({})

    def read(self, name: str, default: T, parse: Callable[[str], T], expected: str) -> T:
        raw = self._environ.get(name, "").strip()
        if not raw:
            return default
        try:
            return parse(raw)
        except ValueError:
            self.problems.append(f'{name}: expected {expected}, found "{raw}"')
            return default


def _from_to(least: int, most: int) -> Callable[[str], int]:
    def parse(raw: str) -> int:
        value = int(raw)
        if not least <= value <= most:
            raise ValueError
        return value

    return parse


def _flag(raw: str) -> bool:
    if raw.lower() not in ("true", "false", "1", "0"):
        raise ValueError
    return raw.lower() in ("true", "1")


def _seconds(raw: str) -> float:
    value = float(raw)
    if not 0.1 <= value <= 3600:
        raise ValueError
    return value
