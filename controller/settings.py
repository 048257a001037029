"""The controller's settings, read from the environment. A wrong value keeps the controller from starting."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from .api_tokens import FORM, ApiToken, read_tokens
from .errors import SettingsError

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
ENGINES = ("DOCKER", "SWARM")
CDI_KIND = re.compile(r"[a-z0-9][a-z0-9.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
PROJECT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
TOKEN_ALGORITHMS = tuple(f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in (256, 384, 512))
"""By which JSON Web Tokens may be signed: by private keys of an identity provider, never by a shared secret."""
CLAIM = re.compile(r"([A-Za-z0-9][!#-&(-\[\]-~]{0,499})?")
"""It is put into HAProxy's configuration: no spaces, quotes and backslashes. "" = none."""
CLAIM_WORDS = "a letter or a digit, and at most 499 more signs without spaces, quotes and backslashes"
API_SOCKETS = Path("/run/pierhead")
"""Of the machine, where each stack has the Unix socket of its API; compose/compose.yaml mounts it."""
HOSTS = re.compile(r"\s*([A-Za-z0-9_.-]+( *, *[A-Za-z0-9_.-]+)*)?\s*")
DOMAIN = re.compile(r"(?=.{4,253}\Z)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
EMAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+")
EMAIL_OR_NONE = re.compile(rf"({EMAIL.pattern})?")
REPEAT = re.compile(r"[1-5]d|([1-9][0-9]?|1[01][0-9]|120)h|[1-9][0-9]{0,3}m")
REPEAT_WORDS = "a duration from 1m to 5d, such as 30m, 4h or 1d"
HOST_AND_PORT = re.compile(r"([A-Za-z0-9.-]+:[0-9]{1,5})?")
DIRECTORY_OF_ACME = re.compile(r"https://[A-Za-z0-9.-]+(:[0-9]{1,5})?/[!-~]*")
WEBHOOK = re.compile(r"https?://[^\s/?#@]+(/\S*)?")
ALERT_RECEIVERS = ("PIERHEAD_ALERT_WEBHOOK", "PIERHEAD_ALERT_SLACK", "PIERHEAD_ALERT_MAIL")
"""With any of these the stack has an Alertmanager."""
LETS_ENCRYPT = "https://acme-v02.api.letsencrypt.org/directory"
MOST_DOMAINS = 100
"""In one certificate: what Let's Encrypt gives."""


def api_socket(project: str, directory: Path = API_SOCKETS) -> Path:
    """The Unix socket at which a stack's API answers users of the machine."""
    return directory / f"{project}.sock"


def network(text: str) -> str:
    """An address or a network in its shortest form. Raises ValueError, also for an address with a zone (`%eth0`), which
    HAProxy does not take.
    """
    if "%" in text:
        raise ValueError(text)
    return str(ipaddress.ip_network(text))


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Bounds at HAProxy, for connections and for what it tells, and whom it believes. A bound of one client address
    that is 0 is off.
    """

    connections: int = 10_000
    """Open connections of HTTP clients, and the same number of gRPC clients (PIERHEAD_MAX_CONNECTIONS)."""
    concurrent_streams: int = 100
    """Calls that one HTTP/2 connection may have open (PIERHEAD_MAX_CONCURRENT_STREAMS)."""
    idle_websocket_s: int = 600
    """A WebSocket on which neither side sends anything is closed after this time (PIERHEAD_IDLE_WEBSOCKET_S)."""
    client_connections: int = 2000
    """Open connections of one client address (PIERHEAD_CLIENT_CONNECTIONS); left out, a fifth of `connections`."""
    client_requests: int = 2000
    """Requests of one client address in flight (PIERHEAD_CLIENT_REQUESTS); left out, likewise."""
    client_requests_per_s: int = 0
    """Requests of one client address, on average over 10 s (PIERHEAD_CLIENT_REQUESTS_PER_S)."""
    client_websockets: int | None = None
    """Open WebSockets of one client address (PIERHEAD_CLIENT_WEBSOCKETS); None = those that leave as many places of the
    service free. 0, none, is the default behind trusted proxies, whose address all clients have."""
    shows_routes: bool = False
    """`/-/routes` and errors for unknown routes and gRPC services list what there is (PIERHEAD_ROUTES=shown)."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks, as 10.0.0.0/8, whose word on a request's client is passed on (PIERHEAD_TRUSTED_PROXIES)."""

    @property
    def queued_requests(self) -> int:
        """Requests that may wait for a service without max_queued_requests: half of the connections, so that one
        overloaded service leaves room for the others.
        """
        return max(1, self.connections // 2)


DEFAULT_LIMITS = EdgeLimits()


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a client's JSON Web Token must say (x-serve.auth: jwt)."""

    algorithm: str = "RS256"
    """Of TOKEN_ALGORITHMS; a token that names another one is refused (PIERHEAD_JWT_ALGORITHM)."""
    issuer: str = ""
    """Its `iss`; "" = any (PIERHEAD_JWT_ISSUER)."""
    audience: str = ""
    """Its `aud`, or one of them; "" = any (PIERHEAD_JWT_AUDIENCE)."""


DEFAULT_TOKENS = TokenRules()


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings. Ports are those inside the container."""

    project: str
    """Compose project name (COMPOSE_PROJECT_NAME)."""
    project_dir: Path | None
    """The project's directory, at the same path as on the host (PIERHEAD_PROJECT_DIR). None on a Swarm, which has the
    compose files."""
    state_dir: Path = Path("/var/lib/pierhead")
    haproxy_run: Path = Path("/run/haproxy")
    gpu_cdi_kind: str = "nvidia.com/gpu"
    cdi_dirs: tuple[Path, ...] = (Path("/etc/cdi"), Path("/var/run/cdi"))
    controller_image: str = "pierhead/controller:latest"
    """The controller's own image, in which the probe for GPUs runs (PIERHEAD_TAG is its tag)."""
    api_host: str = "0.0.0.0"
    api_port: int = 8100
    api_sockets: Path = Path("/run/pierhead/api")
    """Where this container has the machine's directory of sockets."""
    discovery_port: int = 8101
    api_tokens: tuple[ApiToken, ...] = ()
    """Of callers of the API: PIERHEAD_API_TOKEN, which allows everything, and those of PIERHEAD_API_TOKENS. With any,
    each caller at the port needs one; with none, callers are on this machine. On a Swarm there is always one."""
    api_hosts: frozenset[str] = frozenset()
    """Names, in lower case, by which the API may be asked in addition to those that nobody can register
    (PIERHEAD_API_HOSTS)."""
    secrets_dir: Path = Path("/run/secrets")
    """Where a Swarm puts the controller's certificate."""
    log_level: str = "INFO"
    edge: EdgeLimits = DEFAULT_LIMITS
    """Bounds at HAProxy."""
    tls_dir: str | None = None
    """The directory of the project that has HAProxy's certificates (PIERHEAD_TLS_DIR); None = it has none from there
    (PIERHEAD_TLS is not "files")."""
    acme_domains: tuple[str, ...] = ()
    """Of the certificate that an ACME server gives (PIERHEAD_ACME_DOMAINS); none = PIERHEAD_TLS is not "acme"."""
    https_port: int = 8443
    """The port of the host at which clients reach HTTPS (PIERHEAD_HTTPS_PORT)."""
    jwt_dir: str = "jwt"
    """The directory of the project that has the public keys of tokens (PIERHEAD_JWT_DIR)."""
    tokens: TokenRules = DEFAULT_TOKENS
    haproxy_silence_s: int = 10
    """How long HAProxy may hang before its container is restarted (PIERHEAD_HAPROXY_SILENCE_S)."""
    on_swarm: bool = False
    """Replicas run on the nodes of the Swarm that this machine manages (PIERHEAD_ENGINE=swarm); otherwise here."""
    sends_alerts: bool = False
    """The stack has an Alertmanager: an ALERT_RECEIVERS is set."""
    webhook: str = ""
    """Where events that failed or warn are sent (PIERHEAD_WEBHOOK); "" = nowhere."""
    grafana_port: int | None = None
    """Of Grafana on the machine (PIERHEAD_GRAFANA_PORT); None = COMPOSE_PROFILES does not ask for it."""
    is_manual: bool = False
    """New versions wait for `pierhead deploy` (PIERHEAD_DEPLOY=manual); otherwise they are rolled out at once."""

    @property
    def has_tls(self) -> bool:
        """Whether clients come over TLS."""
        return bool(self.tls_dir is not None or self.acme_domains)

    @property
    def api_socket(self) -> Path:
        """The Unix socket of the API, as this container sees it."""
        return api_socket(self.project, self.api_sockets)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Read the settings; raises SettingsError with every problem found, one a line."""
        reader = _EnvironmentReader(env)
        on_swarm = reader.choice("PIERHEAD_ENGINE", ENGINES, "DOCKER") == "SWARM"
        tls = reader.choice("PIERHEAD_TLS", ("OFF", "FILES", "ACME"), "OFF")
        settings = cls(
            project=reader.matching("COMPOSE_PROJECT_NAME", PROJECT_NAME, "a Compose project name", None),
            project_dir=None if on_swarm else reader.directory("PIERHEAD_PROJECT_DIR"),
            gpu_cdi_kind=reader.matching("PIERHEAD_GPU_CDI_KIND", CDI_KIND, "<vendor>/<class>", "nvidia.com/gpu"),
            cdi_dirs=tuple(Path(part) for part in (env.get("PIERHEAD_CDI_DIRS") or "/etc/cdi:/var/run/cdi").split(":")),
            controller_image=f"pierhead/controller:{env.get('PIERHEAD_TAG') or 'latest'}",
            api_tokens=reader.tokens(is_needed=on_swarm),
            api_hosts=reader.hosts("PIERHEAD_API_HOSTS"),
            log_level=reader.choice("PIERHEAD_LOG_LEVEL", LOG_LEVELS, "INFO"),
            edge=_edge_limits(reader),
            tls_dir=(env.get("PIERHEAD_TLS_DIR") or "tls") if tls == "FILES" else None,
            acme_domains=reader.acme() if tls == "ACME" else (),
            https_port=reader.integer("PIERHEAD_HTTPS_PORT", 1, 65535, 8443, "a port"),
            jwt_dir=env.get("PIERHEAD_JWT_DIR") or "jwt",
            tokens=TokenRules(
                algorithm=reader.choice("PIERHEAD_JWT_ALGORITHM", TOKEN_ALGORITHMS, "RS256"),
                issuer=reader.matching("PIERHEAD_JWT_ISSUER", CLAIM, CLAIM_WORDS, ""),
                audience=reader.matching("PIERHEAD_JWT_AUDIENCE", CLAIM, CLAIM_WORDS, ""),
            ),
            haproxy_silence_s=reader.integer("PIERHEAD_HAPROXY_SILENCE_S", 1, 86_400, 10),
            on_swarm=on_swarm,
            sends_alerts=reader.alerts(),
            webhook=reader.address("PIERHEAD_WEBHOOK"),
            grafana_port=reader.grafana(),
            is_manual=reader.choice("PIERHEAD_DEPLOY", ("AUTO", "MANUAL"), "AUTO") == "MANUAL",
        )
        if reader.problems:
            raise SettingsError("\n".join(reader.problems))
        return settings


class _EnvironmentReader:
    """Typed reads that collect all problems, so that one error names them all."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.problems: list[str] = []
        self._env = env

    def matching(self, name: str, pattern: re.Pattern[str], expected: str, default: str | None) -> str:
        value = self._env.get(name) or default
        if value is None:
            self.problems.append(f"{name}: expected {expected}, found nothing (compose/compose.yaml sets it)")
            return ""
        if not pattern.fullmatch(value):
            self.problems.append(f"{name}: expected {expected}, found {value!r}")
        return value

    def directory(self, name: str) -> Path:
        value = self._env.get(name, "")
        path = Path(value)
        if not path.is_absolute() or not path.is_dir():
            found = repr(value) if value else "nothing"
            self.problems.append(f"{name}: expected the absolute path of the project's directory, found {found}")
        return path

    def tokens(self, *, is_needed: bool) -> tuple[ApiToken, ...]:
        of_stack, named = self._env.get("PIERHEAD_API_TOKEN"), self._env.get("PIERHEAD_API_TOKENS") or ""
        if is_needed and not of_stack:
            self.problems.append("PIERHEAD_API_TOKEN: a Swarm's controller needs a token (`make up` makes one)")
        if named.strip() and not of_stack:
            self.problems.append("PIERHEAD_API_TOKENS: needs PIERHEAD_API_TOKEN as well, which the command has")
        try:
            return read_tokens(of_stack, named)
        except ValueError as error:
            self.problems.append(f"PIERHEAD_API_TOKENS: expected {FORM}, found {error}")
            return ()

    def alerts(self) -> bool:
        """Whether alerts are sent; what the Alertmanager's container has is checked."""
        if not any(self._env.get(name) for name in ALERT_RECEIVERS):
            return False
        self.address("PIERHEAD_ALERT_WEBHOOK")
        self.address("PIERHEAD_ALERT_SLACK")
        mails, server = self._env.get("PIERHEAD_ALERT_MAIL") or "", "PIERHEAD_ALERT_SMTP"
        if mails and not self._env.get(server):
            self.problems.append(f"{server}: PIERHEAD_ALERT_MAIL needs the mail server, such as smtp.shop.example:587")
        for mail in mails.split(",") if mails else ():
            if not EMAIL.fullmatch(mail.strip()):
                self.problems.append(
                    f"PIERHEAD_ALERT_MAIL: expected email addresses, separated by commas, found {mail!r}"
                )
        self.matching("PIERHEAD_ALERT_FROM", EMAIL_OR_NONE, "an email address", "")
        self.matching(server, HOST_AND_PORT, "host:port, such as smtp.shop.example:587", "")
        self.choice("PIERHEAD_ALERT_SMTP_TLS", ("ON", "OFF"), "ON")
        self.matching("PIERHEAD_ALERT_REPEAT", REPEAT, REPEAT_WORDS, "4h")
        return True

    def address(self, name: str) -> str:
        """An address, which is a secret: an error does not show it."""
        value = self._env.get(name) or ""
        try:
            is_address = not value or (
                WEBHOOK.fullmatch(value) and urlsplit(value).hostname and urlsplit(value).port != 0
            )
        except ValueError:
            is_address = False
        if not is_address:
            self.problems.append(f"{name}: expected an address such as https://chat.example/hooks/...")
        return value

    def grafana(self) -> int | None:
        profiles = {each.strip() for each in (self._env.get("PIERHEAD_PROFILES") or "").split(",")}
        if not profiles & {"grafana", "*"}:
            return None
        return self.integer("PIERHEAD_GRAFANA_PORT", 1, 65535, 3000, "a port")

    def hosts(self, name: str) -> frozenset[str]:
        value = self.matching(name, HOSTS, "names of hosts without ports, separated by commas", "")
        return frozenset(host.strip().lower() for host in value.split(",") if host.strip())

    def acme(self) -> tuple[str, ...]:
        """The domains; what else the container that asks the ACME server has, is checked too."""
        name = "PIERHEAD_ACME_DOMAINS"
        domains = tuple((self._env.get(name) or "").replace(",", " ").split())
        if not 0 < len(domains) <= MOST_DOMAINS:
            found = f"{len(domains)} of them" if domains else "nothing"
            self.problems.append(
                f"{name}: PIERHEAD_TLS=acme needs the names that clients ask for, 1 to {MOST_DOMAINS}, such as "
                f"shop.example,www.shop.example; found {found}"
            )
        for domain in domains:
            if not DOMAIN.fullmatch(domain):
                self.problems.append(
                    f"{name}: expected names such as shop.example, in lower case, and no addresses and no *, for which "
                    f"HTTP-01 gives no certificate; found {domain!r}"
                )
        self.matching("PIERHEAD_ACME_EMAIL", EMAIL, "an email address for the account", "")
        self.matching(
            "PIERHEAD_ACME_SERVER", DIRECTORY_OF_ACME, "the https address of an ACME server's directory", LETS_ENCRYPT
        )
        return domains

    def networks(self, name: str) -> tuple[str, ...]:
        found = []
        for text in (self._env.get(name) or "").replace(",", " ").split():
            try:
                found.append(network(text))
            except ValueError:
                self.problems.append(
                    f"{name}: expected an address or a network such as 10.0.0.0/8, with zeros after its first 8 bits, "
                    f"found {text!r}"
                )
        return tuple(found)

    def integer(self, name: str, low: int, high: int, default: int, what: str = "an integer") -> int:
        value = self._env.get(name) or str(default)
        # Digits of other scripts pass str.isdigit() and int(), and thousands of digits are refused by int().
        if not (value.isascii() and value.isdigit() and len(value) < 10 and low <= int(value) <= high):
            self.problems.append(f"{name}: expected {what} between {low} and {high}, found {value!r}")
            return default
        return int(value)

    def integer_if_given(self, name: str, low: int, high: int) -> int | None:
        return self.integer(name, low, high, 0) if self._env.get(name) else None

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = (self._env.get(name) or default).upper()
        if value not in choices:
            self.problems.append(f"{name}: expected one of {', '.join(choices)}, found {value!r}")
            return default
        return value


def _edge_limits(reader: _EnvironmentReader) -> EdgeLimits:
    connections = reader.integer("PIERHEAD_MAX_CONNECTIONS", 1, 30_000, 10_000)
    a_fifth, proxies = max(1, connections // 5), reader.networks("PIERHEAD_TRUSTED_PROXIES")
    websockets = reader.integer_if_given("PIERHEAD_CLIENT_WEBSOCKETS", 0, 100_000)
    return EdgeLimits(
        connections=connections,
        concurrent_streams=reader.integer("PIERHEAD_MAX_CONCURRENT_STREAMS", 1, 10_000, 100),
        idle_websocket_s=reader.integer("PIERHEAD_IDLE_WEBSOCKET_S", 1, 86_400, 600),
        client_connections=reader.integer("PIERHEAD_CLIENT_CONNECTIONS", 0, 100_000, a_fifth),
        client_requests=reader.integer("PIERHEAD_CLIENT_REQUESTS", 0, 1_000_000, a_fifth),
        client_requests_per_s=reader.integer("PIERHEAD_CLIENT_REQUESTS_PER_S", 0, 100_000, 0),
        client_websockets=0 if proxies and websockets is None else websockets,
        shows_routes=reader.choice("PIERHEAD_ROUTES", ("HIDDEN", "SHOWN"), "HIDDEN") == "SHOWN",
        trusted_proxies=proxies,
    )
