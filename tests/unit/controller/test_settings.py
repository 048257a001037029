"""Environment -> settings; every wrong value is named, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.api_tokens import digest_of
from controller.errors import SettingsError
from controller.settings import DEFAULT_LIMITS, Settings, TokenRules


def test_empty_means_default(tmp_path: Path) -> None:
    needed = {"COMPOSE_PROJECT_NAME": "pierhead", "PIERHEAD_PROJECT_DIR": str(tmp_path)}
    settings = Settings.from_env(
        {**needed, "PIERHEAD_API_TOKEN": "", "PIERHEAD_LOG_LEVEL": "", "PIERHEAD_CDI_DIRS": ""}
    )
    assert settings == Settings.from_env(needed) == Settings(project="pierhead", project_dir=tmp_path)
    assert (settings.api_port, settings.discovery_port, settings.api_tokens) == (8100, 8101, ())
    assert settings.cdi_dirs == (Path("/etc/cdi"), Path("/var/run/cdi"))


def test_tokens(tmp_path: Path) -> None:
    env = {"COMPOSE_PROJECT_NAME": "p", "PIERHEAD_PROJECT_DIR": str(tmp_path)}
    entry = f"ci:deploy:{digest_of('x')}"
    settings = Settings.from_env(env | {"PIERHEAD_API_TOKEN": "hidden", "PIERHEAD_API_TOKENS": f" {entry}, "})
    assert [(one.name, one.role) for one in settings.api_tokens] == [("PIERHEAD_API_TOKEN", "admin"), ("ci", "deploy")]
    assert "hidden" not in repr(settings)
    with pytest.raises(SettingsError, match=r"^PIERHEAD_API_TOKENS: needs PIERHEAD_API_TOKEN as well"):
        Settings.from_env(env | {"PIERHEAD_API_TOKENS": entry})
    with pytest.raises(
        SettingsError, match=r"^PIERHEAD_API_TOKENS: expected name:role:hash, .*, found another form in entry 1"
    ):
        Settings.from_env(env | {"PIERHEAD_API_TOKEN": "secret", "PIERHEAD_API_TOKENS": "ci:boss"})


def test_trusted_proxies(tmp_path: Path) -> None:
    env = {"COMPOSE_PROJECT_NAME": "p", "PIERHEAD_PROJECT_DIR": str(tmp_path)}
    for text in ("10.1.2.3,10.2.0.0/16, 2001:DB8::/32", " 10.1.2.3 10.2.0.0/16\t2001:db8::/32 "):
        named = Settings.from_env(env | {"PIERHEAD_TRUSTED_PROXIES": text}).edge.trusted_proxies
        assert named == ("10.1.2.3/32", "10.2.0.0/16", "2001:db8::/32")
    for wrong in ("proxy", "10.0.0.1/8", "10.0.0.0/33", "fe80::1%eth0"):
        words = f"a network such as 10.0.0.0/8, with zeros after its first 8 bits, found '{wrong}'"
        with pytest.raises(SettingsError, match=f"^PIERHEAD_TRUSTED_PROXIES: expected an address or {words}$"):
            Settings.from_env(env | {"PIERHEAD_TRUSTED_PROXIES": f"10.1.2.3, {wrong}"})


def test_behind_trusted_proxies_websockets_of_an_address_are_those_of_many_clients(tmp_path: Path) -> None:
    env = {"COMPOSE_PROJECT_NAME": "p", "PIERHEAD_PROJECT_DIR": str(tmp_path)}
    proxies, written = {"PIERHEAD_TRUSTED_PROXIES": "10.0.0.0/8"}, {"PIERHEAD_CLIENT_WEBSOCKETS": "7"}
    found = [Settings.from_env(env | more).edge.client_websockets for more in ({}, proxies, proxies | written)]
    assert found == [None, 0, 7], "by half of a service's places; no bound; what the operator says"


def test_grafana_is_there_where_its_profile_is_asked_for(tmp_path: Path) -> None:
    env = {"COMPOSE_PROJECT_NAME": "p", "PIERHEAD_PROJECT_DIR": str(tmp_path), "PIERHEAD_GRAFANA_PORT": "3001"}
    found = {text: Settings.from_env(env | {"PIERHEAD_PROFILES": text}).grafana_port for text in ("", "a,grafana", "a")}
    assert found == {"": None, "a,grafana": 3001, "a": None}


def test_tls_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    env = {"COMPOSE_PROJECT_NAME": "p", "PIERHEAD_PROJECT_DIR": str(tmp_path), "PIERHEAD_TLS_DIR": "certs"}
    for text in ("", "off"):
        assert Settings.from_env(env | {"PIERHEAD_TLS": text}).tls_dir is None
    settings = Settings.from_env(env | {"PIERHEAD_TLS": "files", "PIERHEAD_HTTPS_PORT": "443"})
    assert (settings.tls_dir, settings.https_port) == ("certs", 443)
    assert Settings.from_env(env | {"PIERHEAD_TLS": "files", "PIERHEAD_TLS_DIR": ""}).tls_dir == "tls"
    with pytest.raises(SettingsError, match=r"^PIERHEAD_TLS: expected one of OFF, FILES, ACME, found 'ON'$"):
        Settings.from_env(env | {"PIERHEAD_TLS": "on"})


def test_what_an_acme_server_is_asked_for(tmp_path: Path) -> None:
    env = {
        "COMPOSE_PROJECT_NAME": "p",
        "PIERHEAD_PROJECT_DIR": str(tmp_path),
        "PIERHEAD_ACME_EMAIL": "ops@shop.example",
    }
    named = {"PIERHEAD_ACME_DOMAINS": "shop.example, www.shop.example"}
    assert not Settings.from_env(env | named).has_tls
    assert Settings.from_env(env | {"PIERHEAD_TLS": "files"}).has_tls
    env |= {"PIERHEAD_TLS": "acme"}
    settings = Settings.from_env(env | named)
    assert (settings.acme_domains, settings.tls_dir) == (("shop.example", "www.shop.example"), None)
    assert settings.has_tls
    for server in ("", "https://ca.internal:9000/acme/acme/directory", "https://localhost/"):
        Settings.from_env(env | named | {"PIERHEAD_ACME_SERVER": server})
    wrong = {
        "PIERHEAD_ACME_DOMAINS: PIERHEAD_TLS=acme needs the names that clients ask for": [""],
        "PIERHEAD_ACME_DOMAINS: PIERHEAD_TLS=acme needs .*; found 101 of them": ["a.example " * 101],
        "PIERHEAD_ACME_DOMAINS: expected names such as shop.example, in lower case": [
            *("*.shop.example", "127.0.0.1", "localhost", "Shop.example", "a..b", "shop.example:80", "-a.b", "a_b.c"),
            "https://shop.example",
            f"{'a' * 64}.example",
        ],
        "PIERHEAD_ACME_EMAIL: expected an email address for the account, found ": ["", "nobody", "a b@c.d", "$(x)@c.d"],
        "PIERHEAD_ACME_SERVER: expected the https address": ["http://a.example/dir", "https://a.example", "https:// /"],
    }
    for words, texts in wrong.items():
        for text in texts:
            with pytest.raises(SettingsError, match=f"^{words}"):
                Settings.from_env(env | named | {words.partition(":")[0]: text})


def test_rules_of_tokens(tmp_path: Path) -> None:
    env = {"COMPOSE_PROJECT_NAME": "p", "PIERHEAD_PROJECT_DIR": str(tmp_path)}
    of = "PIERHEAD_JWT_"
    empty = {f"{of}{name}": "" for name in ("DIR", "ALGORITHM", "ISSUER", "AUDIENCE")}
    assert Settings.from_env(env | empty) == Settings.from_env(env)
    assert (Settings.from_env(env).jwt_dir, Settings.from_env(env).tokens) == ("jwt", TokenRules("RS256", "", ""))
    texts = {"DIR": "keys/idp", "ALGORITHM": "es384", "ISSUER": "https://idp.example/a?b=(c)#1", "AUDIENCE": "api://x"}
    settings = Settings.from_env(env | {f"{of}{name}": text for name, text in texts.items()})
    assert settings.jwt_dir == "keys/idp"
    assert settings.tokens == TokenRules("ES384", "https://idp.example/a?b=(c)#1", "api://x")
    for algorithm in ("none", "HS256", "EdDSA"):
        with pytest.raises(SettingsError, match=f"^{of}ALGORITHM: expected one of RS256, RS384, .*, ES512, found "):
            Settings.from_env(env | {f"{of}ALGORITHM": algorithm})
    for name in ("ISSUER", "AUDIENCE"):
        for text in ("a b", "a'", 'a"', "a\\b", "a\nb", "}", "-i", "\u00e4", "x" * 501):
            with pytest.raises(SettingsError, match=f"^{of}{name}: expected a letter or a digit, and at most 499 more"):
                Settings.from_env(env | {f"{of}{name}": text})


def test_further_names_of_the_api(tmp_path: Path) -> None:
    env = {"COMPOSE_PROJECT_NAME": "p", "PIERHEAD_PROJECT_DIR": str(tmp_path)}
    named = Settings.from_env(env | {"PIERHEAD_API_HOSTS": " Gpu.example , b.example"}).api_hosts
    assert named == {"gpu.example", "b.example"}
    assert not Settings.from_env(env).api_hosts


def test_on_a_swarm_there_is_a_token_and_no_directory_of_the_project() -> None:
    on_swarm = {"COMPOSE_PROJECT_NAME": "pierhead", "PIERHEAD_ENGINE": "swarm"}
    with pytest.raises(SettingsError, match=r"^PIERHEAD_API_TOKEN: a Swarm's controller needs a token \(.*\)$"):
        Settings.from_env(on_swarm)
    settings = Settings.from_env(on_swarm | {"PIERHEAD_API_TOKEN": "a", "PIERHEAD_PROJECT_DIR": "/nowhere"})
    assert (settings.on_swarm, settings.project_dir, settings.secrets_dir) == (True, None, Path("/run/secrets"))


def test_one_client_address_has_a_fifth_of_the_places_unless_the_operator_says_otherwise(tmp_path: Path) -> None:
    env = {"COMPOSE_PROJECT_NAME": "p", "PIERHEAD_PROJECT_DIR": str(tmp_path), "PIERHEAD_CLIENT_CONNECTIONS": ""}
    default = Settings.from_env(env).edge
    assert (default.client_connections, default.client_requests) == (2000, 2000)
    assert default == DEFAULT_LIMITS
    smaller = Settings.from_env(env | {"PIERHEAD_MAX_CONNECTIONS": "50", "PIERHEAD_CLIENT_REQUESTS": "0"}).edge
    assert (smaller.client_connections, smaller.client_requests) == (10, 0)
    assert Settings.from_env(env | {"PIERHEAD_ROUTES": "shown"}).edge.shows_routes


def test_every_wrong_value_is_named() -> None:
    env = {
        "COMPOSE_PROJECT_NAME": "Pier Head",
        "PIERHEAD_PROJECT_DIR": "relative",
        "PIERHEAD_HTTPS_PORT": "70000",
        "PIERHEAD_IDLE_WEBSOCKET_S": "²",
        "PIERHEAD_GPU_CDI_KIND": "nvidia",
        "PIERHEAD_API_HOSTS": "a.example:8100",
        "PIERHEAD_LOG_LEVEL": "loud",
        "PIERHEAD_MAX_CONNECTIONS": "0",
        "PIERHEAD_CLIENT_CONNECTIONS": "-1",
        "PIERHEAD_ENGINE": "podman",
    }
    with pytest.raises(SettingsError) as caught:
        Settings.from_env(env)
    assert str(caught.value).splitlines() == [
        "PIERHEAD_ENGINE: expected one of DOCKER, SWARM, found 'PODMAN'",
        "COMPOSE_PROJECT_NAME: expected a Compose project name, found 'Pier Head'",
        "PIERHEAD_PROJECT_DIR: expected the absolute path of the project's directory, found 'relative'",
        "PIERHEAD_GPU_CDI_KIND: expected <vendor>/<class>, found 'nvidia'",
        "PIERHEAD_API_HOSTS: expected names of hosts without ports, separated by commas, found 'a.example:8100'",
        "PIERHEAD_LOG_LEVEL: expected one of DEBUG, INFO, WARNING, ERROR, found 'LOUD'",
        "PIERHEAD_MAX_CONNECTIONS: expected an integer between 1 and 30000, found '0'",
        "PIERHEAD_IDLE_WEBSOCKET_S: expected an integer between 1 and 86400, found '²'",
        "PIERHEAD_CLIENT_CONNECTIONS: expected an integer between 0 and 100000, found '-1'",
        "PIERHEAD_HTTPS_PORT: expected a port between 1 and 65535, found '70000'",
    ]


def test_where_alerts_go(tmp_path: Path) -> None:
    env = {"COMPOSE_PROJECT_NAME": "p", "PIERHEAD_PROJECT_DIR": str(tmp_path)}
    assert not Settings.from_env(env | {"PIERHEAD_ALERT_SMTP": "nonsense", "PIERHEAD_ALERT_MAIL": ""}).sends_alerts
    mail = {"PIERHEAD_ALERT_MAIL": "ops@a.example, b@a.example", "PIERHEAD_ALERT_SMTP": "smtp:25"}
    for more in (
        {},
        {"PIERHEAD_ALERT_REPEAT": "30m", "PIERHEAD_ALERT_SMTP_TLS": "off", "PIERHEAD_ALERT_FROM": "a@b.c"},
    ):
        assert Settings.from_env(env | mail | more).sends_alerts
    for name in ("PIERHEAD_ALERT_WEBHOOK", "PIERHEAD_ALERT_SLACK"):
        assert Settings.from_env(env | {name: "https://chat.example/hooks/secret"}).sends_alerts
        with pytest.raises(SettingsError) as failed:
            Settings.from_env(env | {name: "chat.example/hooks/secret"})
        assert str(failed.value) == f"{name}: expected an address such as https://chat.example/hooks/..."
    wrong = {
        "PIERHEAD_ALERT_SMTP: PIERHEAD_ALERT_MAIL needs the mail server": {"PIERHEAD_ALERT_SMTP": ""},
        "PIERHEAD_ALERT_SMTP: expected host:port, such as": {"PIERHEAD_ALERT_SMTP": "smtp.a.example"},
        "PIERHEAD_ALERT_MAIL: expected email addresses, separated by commas, found 'b'": {
            "PIERHEAD_ALERT_MAIL": "a@b.c,b"
        },
        "PIERHEAD_ALERT_FROM: expected an email address": {"PIERHEAD_ALERT_FROM": "ops"},
        "PIERHEAD_ALERT_REPEAT: expected a duration from 1m to 5d": {"PIERHEAD_ALERT_REPEAT": "200000d"},
        "PIERHEAD_ALERT_SMTP_TLS: expected one of ON, OFF": {"PIERHEAD_ALERT_SMTP_TLS": "maybe"},
    }
    for words, change in wrong.items():
        with pytest.raises(SettingsError, match=f"^{words}"):
            Settings.from_env(env | mail | change)
