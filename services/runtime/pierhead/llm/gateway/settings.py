"""The gateway's own settings from the environment, besides `pierhead.Settings`. Read once, at the start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pierhead.environment import Environment
from pierhead.llm.gateway.body.media import EVERY_HOST
from pierhead.llm.gateway.models.model_map import ModelMap, read_models

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Half of what one message between services may have: images travel in the text."""

MAX_BODIES_BYTES = 512 * 1024 * 1024
"""Some 5,000 prompts of 100 KB. While a body waits for its answer the gateway has it some three times: as it came, in
the call, and on its way."""

_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The gateway's settings.

    | variable | meaning |
    |---|---|
    | PIERHEAD_LLM_MODELS | JSON: the service of each model; see `model_map` |
    | PIERHEAD_LLM_MODELS_OF_* | further models, so that several compose files can each add their own |
    | PIERHEAD_LLM_MAX_BODY_BYTES | largest body, default 32 MiB; a larger one gets 413 |
    | PIERHEAD_LLM_MAX_BODIES_BYTES | room for the bodies that wait for an answer, default 512 MiB; beyond it 503 |
    | PIERHEAD_LLM_MEDIA_HOSTS | where engines may fetch what a request names, default nowhere; see `media_hosts` |
    | PIERHEAD_LLM_PREFILL_FALLBACK | true (default): without a prefill replica, decode does the whole; false: 503 |
    | PIERHEAD_LLM_MODELS_REFRESH_S | how often services are asked for their adapters, default 30 |
    """

    models: ModelMap
    max_body_bytes: int = MAX_BODY_BYTES
    max_bodies_bytes: int = MAX_BODIES_BYTES
    media_hosts: frozenset[str] = frozenset()
    prefill_fallback: bool = True
    models_refresh_s: float = 30.0

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> GatewaySettings:
        """Read the environment. Raises SettingsError that names every bad variable, not only the first."""
        env = Environment(environ)
        settings = cls(
            models=_models(env),
            max_body_bytes=env.integer(
                "PIERHEAD_LLM_MAX_BODY_BYTES", MAX_BODY_BYTES, 1024, 60 * 1024 * 1024,
                "a number of bytes from 1024 to 62914560",
            ),
            max_bodies_bytes=env.integer(
                "PIERHEAD_LLM_MAX_BODIES_BYTES", MAX_BODIES_BYTES, 1024, 1 << 40,
                "a number of bytes from 1024 to 1099511627776",
            ),
            media_hosts=media_hosts(env),
            prefill_fallback=env.flag("PIERHEAD_LLM_PREFILL_FALLBACK", True),
            models_refresh_s=env.read("PIERHEAD_LLM_MODELS_REFRESH_S", 30.0, _refresh_s, "seconds from 0.1 to 3600"),
        )  # fmt: skip
        if settings.max_bodies_bytes < settings.max_body_bytes:
            env.problems.append(
                "PIERHEAD_LLM_MAX_BODIES_BYTES: expected at least PIERHEAD_LLM_MAX_BODY_BYTES, "
                f"{settings.max_body_bytes}, found {settings.max_bodies_bytes}"
            )
        if env.text("PIERHEAD_LLM_KEYS_FILE"):  # without it this gateway would serve everybody
            env.problems.append(
                "PIERHEAD_LLM_KEYS_FILE: keys are HAProxy's: write x-serve.auth: key into the gateway's service, make "
                "its keys by `pierhead keys create`, and remove this variable"
            )
        env.check()
        return settings


def media_hosts(env: Environment) -> frozenset[str]:
    """The hosts from which engines may fetch images, sound and video that requests name; EVERY_HOST stands for all."""
    expected = "names of hosts, such as a.example.com,b.net, or *"
    return env.read("PIERHEAD_LLM_MEDIA_HOSTS", frozenset(), _hosts, expected)


def _hosts(raw: str) -> frozenset[str]:
    found = frozenset(each.strip().lower() for each in raw.split(","))
    if not all(each == EVERY_HOST or _HOST.fullmatch(each) for each in found):
        raise ValueError
    return found


def _models(env: Environment) -> ModelMap:
    try:
        return read_models(env.variables)
    except ValueError as error:
        env.problems.append(str(error))
        return ModelMap({})


def _refresh_s(raw: str) -> float:
    value = float(raw)
    if not 0.1 <= value <= 3600:
        raise ValueError
    return value
