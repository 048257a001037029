"""The gateway's settings and its map of models: what is right, and the words for what is wrong."""

from __future__ import annotations

import json

import pytest
from pierhead.errors import SettingsError
from pierhead.llm.gateway.models.model_map import VARIABLE, ModelRoute, read_models
from pierhead.llm.gateway.settings import GatewaySettings


def test_settings() -> None:
    environ = {"PIERHEAD_LLM_MODELS": '{"qwen": "llm-qwen"}'}
    settings = GatewaySettings.from_env(environ)
    assert settings.prefill_fallback
    more = {
        "PIERHEAD_LLM_PREFILL_FALLBACK": "false",
        "PIERHEAD_LLM_MAX_BODY_BYTES": "4096",
        "PIERHEAD_LLM_MAX_BODIES_BYTES": "1048576",
        "PIERHEAD_LLM_MEDIA_HOSTS": "images.example.com, Other.NET",
    }
    assert settings.media_hosts == frozenset()
    settings = GatewaySettings.from_env(environ | more)
    assert settings.media_hosts == {"images.example.com", "other.net"}
    assert not settings.prefill_fallback
    assert (settings.max_body_bytes, settings.max_bodies_bytes) == (4096, 1 << 20)


def test_wrong_settings_are_all_named() -> None:
    environ = {
        "PIERHEAD_LLM_MAX_BODY_BYTES": "1 GB",
        "PIERHEAD_LLM_MEDIA_HOSTS": "https://a.net",
        "PIERHEAD_LLM_MODELS_REFRESH_S": "nan",
        "PIERHEAD_LLM_MAX_BODIES_BYTES": "1048576",
    }
    with pytest.raises(SettingsError) as raised:
        GatewaySettings.from_env(environ)
    form = '{"<model>": "<service>"} or {"<model>": {"service": ..., "prefill": ..., "alias_of": ...}}'
    assert str(raised.value).splitlines() == [
        f"PIERHEAD_LLM_MODELS: expected JSON, {form}, found nothing",
        'PIERHEAD_LLM_MAX_BODY_BYTES: expected a number of bytes from 1024 to 62914560, found "1 GB"',
        'PIERHEAD_LLM_MEDIA_HOSTS: expected names of hosts, such as a.example.com,b.net, or *, found "https://a.net"',
        'PIERHEAD_LLM_MODELS_REFRESH_S: expected seconds from 0.1 to 3600, found "nan"',
        "PIERHEAD_LLM_MAX_BODIES_BYTES: expected at least PIERHEAD_LLM_MAX_BODY_BYTES, 33554432, found 1048576",
    ]


# ---- models

MODELS = {
    "qwen": "llm-qwen",
    "org/big:8b": {"service": "big", "prefill": "big-prefill"},
    "default": {"alias_of": "qwen"},
    "support": {"alias_of": "qwen:support-v2"},
    "elsewhere": {"service": "other", "alias_of": "served-as"},
}


@pytest.mark.parametrize(
    ("name", "route"),
    [
        ("qwen", ModelRoute("qwen", "qwen", "", "llm-qwen", None)),
        ("qwen:a", ModelRoute("qwen:a", "qwen", "a", "llm-qwen", None)),
        ("qwen:a:b", ModelRoute("qwen:a:b", "qwen", "a:b", "llm-qwen", None)),
        ("default", ModelRoute("qwen", "qwen", "", "llm-qwen", None)),
        ("default:a", ModelRoute("qwen:a", "qwen", "a", "llm-qwen", None)),
        ("support", ModelRoute("qwen:support-v2", "qwen", "support-v2", "llm-qwen", None)),
        ("org/big:8b", ModelRoute("org/big:8b", "org/big:8b", "", "big", "big-prefill")),
        ("elsewhere", ModelRoute("served-as", "served-as", "", "other", None)),
        ("support:a", None),
        ("org/big", None),
        ("qwen:", None),
        ("qwen:\n", None),
        ("Qwen", None),
    ],
)
def test_where_names_lead(name: str, route: ModelRoute | None) -> None:
    assert read_models({VARIABLE: json.dumps(MODELS)}).find(name) == route


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "expected JSON"),
        ("{}", "expected an object with at least one model"),
        ('["a"]', 'found an array'),
        ('{"a b": "x"}', '"a b": expected a model\'s name'),
        ('{"a": 7}',
         "a: expected a service's name or an object of service, prefill, alias_of, fallback, host, path, found 7"),
        ('{"a": ""}', 'a.service: expected a service\'s name, found ""'),
        ('{"a": {"prefill": "p"}}', "a: expected a service, or alias_of with the name of another model"),
        ('{"a": {"service": "x", "perfill": "p"}}',
         "a.perfill: unknown; there are service, prefill, alias_of, fallback, host, path"),
        ('{"a": {"service": "x", "fallback": "a"}}',
         'a.fallback: expected another of the names (none), found "a"'),
        ('{"a": {"service": "x", "fallback": "c"}, "b": "y"}',
         'a.fallback: expected another of the names (b), found "c"'),
        ('{"a": {"service": "x", "host": "A.example:80"}}',
         'a.host: expected a host\'s name in lower case, without a port, found "A.example:80"'),
        ('{"a": {"service": "x", "path": "a"}}',
         'a.path: expected a slash and one word, such as /qwen, found "a"'),
        ('{"a": {"service": "x", "path": "/v1"}}', "a.path: /v1 is the gateway's own; choose another"),
        ('{"a": {"service": "x", "path": "/health"}}', "a.path: /health is the gateway's own; choose another"),
        ('{"a": {"service": "x", "host": "a.b"}, "b": {"service": "y", "host": "a.b"}}',
         "b.host: a.b is another model's; choose another"),
        ('{"a": {"alias_of": "b"}}', 'a.alias_of: expected one of the models (none), found "b"'),
        ('{"a": "x", "b": {"alias_of": "a:"}}',
         'b.alias_of: expected the name of an adapter behind the colon, 128 characters at most, found "a:"'),
        ('{"a": "x", "b": {"alias_of": "a:' + "y" * 129 + '"}}',
         'b.alias_of: expected the name of an adapter behind the colon, 128 characters at most, found "a:yyy'),
        ('{"a": "x", "b": {"alias_of": "c"}, "c": {"alias_of": "a"}}',
         'b.alias_of: expected one of the models (a), found "c"'),
    ],
)  # fmt: skip
def test_wrong_maps(text: str, told: str) -> None:
    with pytest.raises(ValueError, match="PIERHEAD_LLM_MODELS: ") as raised:
        read_models({VARIABLE: text})
    assert told in str(raised.value)


def test_a_gateway_with_a_file_of_keys_of_an_earlier_build_does_not_start() -> None:
    environ = {VARIABLE: '{"a": "x"}', "PIERHEAD_LLM_KEYS_FILE": "/keys.json"}
    with pytest.raises(SettingsError, match=r"PIERHEAD_LLM_KEYS_FILE: keys are HAProxy's: write x-serve\.auth: key"):
        GatewaySettings.from_env(environ)


def test_several_variables_are_one_map() -> None:
    environ = {
        "PIERHEAD_LLM_MODELS": '{"other": {"service": "llm-beta", "alias_of": "beta"}, "fast": {"alias_of": "alpha"}}',
        "PIERHEAD_LLM_MODELS_OF_LLM_ALPHA": '{"alpha": "llm-alpha"}',
        "PIERHEAD_LLM_MODELS_OF_LLM_BETA": '{"beta": "llm-beta"}',
        "PIERHEAD_LLM_MODELS_OF_NOBODY": " ",
        "PIERHEAD_LLM_MODELS_REFRESH_S": "5",
    }
    models = read_models(environ)
    assert sorted(models.routes) == ["alpha", "beta", "fast", "other"]
    assert models.find("fast") == ModelRoute("alpha", "alpha", "", "llm-alpha", None)
    assert models.services == ("llm-beta", "llm-alpha")


def test_wrong_maps_of_several_variables_are_all_named() -> None:
    with pytest.raises(ValueError, match="PIERHEAD_LLM_MODELS") as raised:
        read_models({
            "PIERHEAD_LLM_MODELS_OF_A": '{"a": "x"}',
            "PIERHEAD_LLM_MODELS_OF_B": '{"a": "y", "b": 7}',
            "PIERHEAD_LLM_MODELS_OF_C": "[]",
        })  # fmt: skip
    form = '{"<model>": "<service>"} or {"<model>": {"service": ..., "prefill": ..., "alias_of": ...}}'
    assert str(raised.value).splitlines() == [
        "PIERHEAD_LLM_MODELS_OF_B: a: expected a model that PIERHEAD_LLM_MODELS_OF_A has not; leave one out",
        (
            "PIERHEAD_LLM_MODELS_OF_B: b: expected a service's name or an object of "
            "service, prefill, alias_of, fallback, host, path, found 7"
        ),
        f"PIERHEAD_LLM_MODELS_OF_C: expected an object with at least one model, {form}, found an array",
    ]
