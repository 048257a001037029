"""The stack on a Swarm: its file, its images' names, its certificates."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import docker
import pytest
import requests

from controller.errors import EngineError, InvalidRequest, SpecError
from controller.files.pem import WrongFiles
from controller.model.spec import Spec
from controller.swarm.certificates import DAYS, Identity
from controller.swarm.up import __main__ as program
from controller.swarm.up import operator_files
from controller.swarm.up.images import logins, place_of, with_digests
from controller.swarm.up.secrets import CA, CONTROLLER, EDGE, Kept, Set, steps, with_files
from controller.swarm.up.settings import StackSettings
from controller.swarm.up.stack_file import Given, stack_file
from controller.swarm.up.swarm_calls import Swarm, addresses
from controller.swarm.up.up import Up
from tests.harness.certificates import made as made_certificate
from tests.harness.certificates import write
from tests.harness.tokens import made as made_key
from tests.harness.tokens import public
from tests.unit.controller.test_certificates import shake_hands
from tests.unit.controller.test_haproxy_config import WEB

GIVEN = Given("/srv/clone", ["metrics"], {"db": "registry/db:1@sha256:00"}, {"edge.pem": "shop_edge-1"}, "token")
NOW = 1_900_000_000.0
DAY_S = 86_400


def config(**db: Any) -> dict[str, Any]:
    """What Compose prints of files with a service of the user's, one with x-serve, and one of another profile."""
    services = {
        "db": {"image": "postgres:17", "networks": {"default": None}, **db},
        "ranker": {"image": "ranker", "x-serve": {}},
        "debug": {"image": "debug", "profiles": ["debug"]},
    }
    return {
        "name": "shop",
        "services": services,
        "networks": {"default": {"name": "shop_default"}},
        "volumes": {"data": {"name": "shop_data"}, "unused": {"name": "shop_unused"}},
        "configs": {"settings": {"name": "shop_settings-1", "external": True}},
        "secrets": {"edge.pem": {"name": "edge.pem", "external": True}},
    }


def test_a_service_without_x_serve_is_in_the_file_with_what_swarm_has_in_place_of_composes_keys() -> None:
    made = stack_file(
        config(
            command=["postgres"],
            environment={"HELLO": "{{.Node.ID}}"},
            restart="unless-stopped",
            mem_limit="1073741824",
            shm_size="268435456",
            extra_hosts=["ldap=10.0.0.1"],
            ports=[{"mode": "ingress", "target": 5432, "published": "5432", "protocol": "tcp"}],
            volumes=[{"type": "volume", "source": "data", "target": "/var/lib/postgresql", "volume": {}}],
            secrets=[{"source": "edge.pem", "target": "/run/secrets/edge.pem"}],
            configs=[{"source": "settings", "target": "/etc/settings"}],
            deploy={"placement": {"constraints": ["node.hostname == n1"]}},
            depends_on={"ranker": {"condition": "service_started"}},
        ),
        GIVEN,
    )
    assert made["services"] == {
        "db": {
            "image": "registry/db:1@sha256:00",
            "command": ["postgres"],
            "environment": {"HELLO": '{{"{{"}}.Node.ID}}'},
            "deploy": {
                "placement": {"constraints": ["node.hostname == n1"]},
                "restart_policy": {"condition": "any"},
                "endpoint_mode": "dnsrr",
                "labels": {"pierhead.clone": "/srv/clone"},
                "resources": {"limits": {"memory": "1073741824"}},
            },
            "extra_hosts": ["ldap:10.0.0.1"],
            "ports": [{"target": 5432, "published": 5432, "mode": "host", "protocol": "tcp"}],
            "networks": {"default": None},
            "volumes": [
                {"type": "volume", "source": "data", "target": "/var/lib/postgresql"},
                {"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": 268435456}},
            ],
            "secrets": [{"source": "edge.pem", "target": "/run/secrets/edge.pem"}],
            "configs": [{"source": "settings", "target": "/etc/settings"}],
        }
    }
    assert made["networks"] == {"default": {"external": True, "name": "shop_default"}}
    assert made["volumes"] == {"data": {"name": "shop_data"}}
    assert made["secrets"] == {"edge.pem": {"external": True, "name": "shop_edge-1"}}
    assert made["configs"] == {"settings": {"external": True, "name": "shop_settings-1"}}


@pytest.mark.parametrize(
    ("definition", "told"),
    [
        ({"privileged": True}, "services.db.privileged: not possible on a Swarm: write cap_add"),
        ({"network_mode": "host"}, "services.db.network_mode: not possible on a Swarm: remove it, and write networks"),
        ({"invented": 1}, "services.db.invented: `docker stack deploy` has no such key"),
        ({"gpus": "all"}, "services.db.gpus: not possible on a Swarm: write x-serve"),
        ({"networks": {"default": {"ipv4_address": "10.0.0.9"}}}, "services.db.networks.default.ipv4_address: not po"),
        (
            {"ports": [{"target": 1, "published": "1", "host_ip": "127.0.0.1"}]},
            "services.db.ports[0].host_ip: not possi",
        ),
        ({"ports": [{"target": 1, "published": "1-9"}]}, "services.db.ports[0].published: expected one port"),
        ({"deploy": {"endpoint_mode": "vip"}}, "services.db.deploy.endpoint_mode: expected dnsrr"),
        (
            {"volumes": [{"type": "bind", "source": "/srv/clone/db/init.sql", "target": "/init"}]},
            "services.db.volumes[0].source: /srv/clone/db/init.sql is only on this machine: write it as configs",
        ),
        (
            {"volumes": [{"type": "volume", "source": "data", "target": "/data"}]},
            "services.db.volumes[0].source: volume data is on one node, and Swarm may start the service on another one",
        ),
        (
            {"volumes": [{"type": "tmpfs", "target": "/t", "tmpfs": {"size": "1024", "mode": 448}}]},
            "services.db.volumes[0].tmpfs.mode: `docker stack deploy` has no such key; remove it",
        ),
        (
            {"volumes": [{"type": "bind", "source": "/d", "target": "/d", "bind": {"recursive": "disabled"}}]},
            "services.db.volumes[0].bind.recursive: `docker stack deploy` has no such key; remove it",
        ),
        ({"tmpfs": ["/t:size=1m,mode=700"]}, "services.db.tmpfs: not possible on a Swarm: mode=700; it has size"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_be_lost_on_the_way_is_refused_by_name(definition: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError) as caught:
        stack_file(config(**definition), GIVEN)
    assert [problem[: len(told)] for problem in caught.value.problems] == [told]


def test_images_have_their_own_names_in_the_registry_and_their_digests_in_the_files() -> None:
    assert place_of("pierhead/echo:1", "10.0.0.1:5000") == ("10.0.0.1:5000/pierhead/echo", "1")
    assert place_of("ghcr.io/team/app", "registry.internal/a") == ("registry.internal/a/team/app", "latest")
    files = {"services": {"db": {"image": "a", "build": {}}, "other": {"image": "b", "build": {}}}}
    assert with_digests(files, {"db": "a@sha256:00"})["services"] == {
        "db": {"image": "a@sha256:00"},
        "other": {"image": "b", "build": {}},
    }


def test_the_controller_is_given_its_token_and_the_logins_of_private_registries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = {"auth": base64.b64encode(b"ada:secret").decode()}
    written = {"auths": {"registry.internal:5000": login, "other.internal": login}}
    (tmp_path / "config.json").write_text(json.dumps(written))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert logins(["10.0.0.1:5000/app:1@sha256:00"]) == b""
    assert json.loads(logins(["registry.internal:5000/app:1@sha256:00"])) == {
        "auths": {"registry.internal:5000": login}
    }

    files = {"name": "shop", "services": {"controller": {"environment": {}, "secrets": [{"source": "edge.pem"}]}}}
    given = replace(GIVEN, secrets={"edge.pem": "shop_edge-1", "logins": "shop_logins-1"})
    made = stack_file({**config(), **files}, given)
    assert made["secrets"]["logins"] == {"external": True, "name": "shop_logins-1"}
    controller = made["services"]["controller"]
    assert [one.get("target") for one in controller["secrets"]] == [None, "/root/.docker/config.json"]
    assert controller["environment"]["PIERHEAD_API_TOKEN"] == "token"


def test_a_network_has_the_subnets_that_the_files_name() -> None:
    made = addresses({"ipam": {"config": [{"subnet": "10.1.0.0/16", "gateway": "10.1.0.1"}]}})
    assert made is not None
    assert [one["Subnet"] for one in made["Config"]] == ["10.1.0.0/16"]
    assert addresses({"ipam": {}}) is None


def test_certificates_stay_until_they_are_due_and_a_new_authority_is_trusted_before_it_is_used() -> None:
    (first,) = steps("shop", {}, NOW)
    assert steps("shop", _there(first), NOW + DAY_S) == [_there(first)]

    late = NOW + 0.7 * DAYS * DAY_S
    trusted, renewed = steps("shop", _there(first), late)
    assert (trusted[EDGE], trusted[CONTROLLER]) == (_there(first)[EDGE], _there(first)[CONTROLLER])
    assert trusted[CA] == renewed[CA]
    assert {one.labels["pierhead.authority"] in _text(trusted[CA]) for one in (first[EDGE], renewed[EDGE])} == {True}
    assert len({one.name for one in (first[EDGE], first[CONTROLLER], renewed[EDGE], renewed[CONTROLLER])}) == 4
    assert steps("shop", _there(renewed), late) == [_there(renewed)]

    # A rollout that ended half-way: one service has the new certificate, the other one does not.
    half = _there({CA: renewed[CA], EDGE: renewed[EDGE], CONTROLLER: first[CONTROLLER]})
    both, _ = steps("shop", half, late)
    assert all(one.labels["pierhead.authority"] in _text(both[CA]) for one in (first[EDGE], renewed[EDGE]))


@pytest.mark.parametrize("killed_at", [None, "the first step", "the second step"])
def test_while_certificates_are_rotated_every_edge_and_every_controller_know_each_other(
    tmp_path: Path, killed_at: str | None
) -> None:
    """Nodes get a step's secrets one after the other, so both ends may have those of the step or those before. An `up`
    that is killed leaves the edges a step ahead of the controllers: the next one continues from there.
    """
    now, pems = time.time(), dict[str, str]()

    def planned(used: Set, at: float) -> list[Set]:
        found = steps("shop", used, at)
        pems.update({one.name: _text(one) for each in found for one in each.values() if one.data})
        return found

    def know_each_other(edges: list[Set], controllers: list[Set]) -> None:
        for edge, controller in product(edges, controllers):
            names = edge[EDGE].name, controller[CONTROLLER].name
            of_edge, of_controller = (Identity(pems[name], "") for name in names)
            by_edge, by_controller = pems[edge[CA].name], pems[controller[CA].name]
            assert shake_hands(tmp_path, of_controller, of_edge, by_controller, by_server=by_edge)
            assert shake_hands(tmp_path, of_edge, of_controller, by_edge, "controller", by_server=by_controller)

    (edges,) = planned({}, now - 0.7 * DAYS * DAY_S)
    controllers = edges
    rollout = planned(_there(edges), now)
    assert len(rollout) == 2
    if killed_at == "the second step":
        edges = controllers = rollout[0]
    if killed_at:
        edges = rollout[0] if killed_at == "the first step" else rollout[1]
        used = {EDGE: edges[EDGE], CONTROLLER: controllers[CONTROLLER]}
        same = {CA: edges[CA]} if edges[CA].name == controllers[CA].name else {}
        rollout = planned(_there({**used, **same}), now)
    for step in rollout:
        know_each_other([edges, step], [controllers, step])
        edges = controllers = step
    assert planned(_there(edges), now) == [_there(edges)], "nothing is left to do"


def _there(made: Set) -> Set:
    """As Swarm lists them: without their content."""
    return {key: Kept(one.name, one.labels) for key, one in made.items()}


def _text(secret: Kept) -> str:
    return secret.data.decode() if secret.data else ""


OWN = {"networks": {"default": None}, "secrets": [{"source": "ca.pem"}], "environment": {}, "image": "pierhead"}


def test_the_operators_files_are_secrets_of_haproxy_and_of_the_controller() -> None:
    secrets = {"ca.pem": "shop_ca-1", "tls/a b.pem": "shop_tls-a-b-1", "jwt/0a.pem": "shop_jwt-0a-1"}
    files = {**config(), "secrets": {"ca.pem": {"external": True}}}
    files["services"] |= {"haproxy": {**OWN, "ports": []}, "controller": OWN}
    made = stack_file(files, replace(GIVEN, secrets=secrets, https_port=9443))
    there = [
        {"source": "shop_tls-a-b-1", "target": "tls/a b.pem", "mode": 0o400},
        {"source": "shop_jwt-0a-1", "target": "jwt/0a.pem", "mode": 0o400},
    ]
    for name in ("haproxy", "controller"):
        assert made["services"][name]["secrets"] == [{"source": "ca.pem"}, *there]
    assert "secrets" not in made["services"]["db"]
    assert made["services"]["haproxy"]["ports"] == [
        {"target": 8443, "published": 9443, "mode": "host", "protocol": "tcp"}
    ]
    assert made["secrets"] == {
        name: {"external": True, "name": secret}
        for name, secret in {"ca.pem": "shop_ca-1", "shop_jwt-0a-1": "shop_jwt-0a-1"}.items()
    } | {"shop_tls-a-b-1": {"external": True, "name": "shop_tls-a-b-1"}}
    plain = stack_file(files, replace(GIVEN, secrets={"ca.pem": "shop_ca-1"}))
    assert plain["services"]["haproxy"]["ports"] == []
    assert plain["services"]["haproxy"]["secrets"] == [{"source": "ca.pem"}]


def test_an_operators_file_is_kept_under_the_digest_of_its_content(tmp_path: Path) -> None:
    pem = made_certificate("shop.example", now=NOW)
    write(tmp_path / "tls" / "ca.pem", *pem)
    write(tmp_path / "jwt" / "b.pem", public(made_key("ES256")))
    settings = StackSettings(
        "shop", str(tmp_path), https_port=8443, tls_dir="tls", jwt_dir="jwt", jwt_algorithm="ES256"
    )
    files = operator_files.certificates(settings, NOW)
    assert files.keys() == {"tls/ca.pem"}
    assert "".join(pem).encode() == files["tls/ca.pem"].data
    assert re.fullmatch(r"shop_tls-ca-[0-9a-f]{12}", files["tls/ca.pem"].name)
    assert operator_files.certificates(replace(settings, tls_dir=""), NOW) == {}
    write(tmp_path / "tls" / "ca.pem", *made_certificate("shop.example", now=NOW))
    assert operator_files.certificates(settings, NOW)["tls/ca.pem"].name != files["tls/ca.pem"].name

    open_, closed = (Spec("shop", {"web": replace(WEB, auth=auth)}) for auth in ("none", "jwt"))
    assert operator_files.keys(settings, open_, NOW) == {}
    before = operator_files.keys(settings, closed, NOW)
    write(tmp_path / "jwt" / "a.pem", public(made_key("ES256")))
    both = operator_files.keys(settings, closed, NOW)
    assert (len(before), len(both)) == (1, 2)
    assert before.items() <= both.items(), "the file of a key has its name whatever others there are"
    write(tmp_path / "jwt" / "b.pem", public(made_key("RS256")))
    with pytest.raises(WrongFiles, match="PIERHEAD_JWT_ALGORITHM=ES256"):
        operator_files.keys(settings, closed, NOW)


def test_certificates_that_are_not_to_stay_go_in_a_step_of_their_own() -> None:
    first, second, files, leaving = ({key: Kept(key, {})} for key in ("ca.pem", "edge.pem", "jwt/a.pem", "tls/a.pem"))
    assert with_files([first, second], files, {}) == [first | files, second | files]
    assert with_files([first, second], files, leaving) == [
        first | leaving | files,
        second | leaving | files,
        second | files,
    ]


class RunningStack(docker.APIClient):
    """A Swarm on which the stack `shop` runs, with these secrets by their files, as Swarm lists them."""

    def __init__(self, secrets: dict[str, str]) -> None:
        super().__init__(version="1.44")
        files = [{"File": {"Name": f"/run/secrets/{key}"}, "SecretName": name} for key, name in secrets.items()]
        self._spec: dict[str, Any] = {"Labels": {}, "TaskTemplate": {"ContainerSpec": {"Secrets": files}}}
        self._secrets = [{"Spec": {"Name": name, "Labels": {}}} for name in secrets.values()]

    def services(self, filters: Any = None, status: Any = None) -> list[dict[str, Any]]:
        return [{"ID": name, "Spec": {**self._spec, "Name": f"shop_{name}"}} for name in ("haproxy", "controller")]

    def secrets(self, filters: Any = None) -> list[dict[str, Any]]:
        return self._secrets


def test_a_second_up_finds_the_certificates_that_are_in_use() -> None:
    there = {CA: "shop_ca-1", EDGE: "shop_edge-1", CONTROLLER: "shop_controller-1"}
    swarm = Swarm(RunningStack({**there, "tls/ca.pem": "shop_tls-ca-1"}), "shop")
    assert {key: one.name for key, one in swarm.used_secrets().items()} == there
    assert swarm.secrets_of("haproxy")["tls/ca.pem"] == "shop_tls-ca-1"


def test_a_deployment_is_refused_where_the_nodes_lack_keys_that_it_asks_for(tmp_path: Path) -> None:
    write(tmp_path / "jwt" / "a.pem", public(made_key("ES256")))
    (tmp_path / "tls").mkdir()  # which a deployment does not send
    settings = StackSettings("shop", str(tmp_path), tls_dir="tls", jwt_dir="jwt", jwt_algorithm="ES256")
    files = config()
    files["services"]["ranker"] = {"image": "ranker", "scale": 0, "x-serve": {"route": "/", "auth": "jwt"}}
    files["services"]["controller"] = {"image": "pierhead", "environment": {"PIERHEAD_ENGINE": "swarm"}}
    up = Up(RunningStack({CA: "shop_ca-1"}), settings, files, print)
    with pytest.raises(InvalidRequest, match=r"^the nodes do not have the public keys in jwt, .*: `pierhead up` gives"):
        asyncio.run(up.files())


class StackWithRegistry(RunningStack):
    """One whose own registry is on a node, which may have been removed from the Swarm."""

    def __init__(self, *, is_removed: bool) -> None:
        super().__init__({})
        self._spec["TaskTemplate"]["Placement"] = {"Constraints": ["node.id == n7"]}
        self._is_removed = is_removed

    def services(self, filters: Any = None, status: Any = None) -> list[dict[str, Any]]:
        names = "haproxy", "controller", "registry"
        return [{"ID": name, "Spec": {**self._spec, "Name": f"shop_{name}"}} for name in names]

    def inspect_node(self, node_id: Any) -> dict[str, Any]:
        if self._is_removed:
            raise docker.errors.NotFound(f"node {node_id} not found")
        return {"ID": node_id, "Status": {"Addr": "10.0.0.7"}}

    def info(self) -> dict[str, Any]:
        return {"Swarm": {"NodeID": "n1", "NodeAddr": "10.0.0.1"}}


def test_a_registry_whose_node_was_removed_comes_to_the_node_of_the_next_up() -> None:
    files = config()
    files["services"] = {"controller": {"image": "pierhead", "environment": {"PIERHEAD_ENGINE": "swarm"}}}
    settings = StackSettings("shop", "/srv/clone", registry="here")
    up = Up(StackWithRegistry(is_removed=False), settings, files, print)
    assert (up._given({}, {}).registry_node, up._registry()) == ("n7", "10.0.0.7:5000")
    up = Up(StackWithRegistry(is_removed=True), settings, files, print)
    assert (up._given({}, {}).registry_node, up._registry()) == ("n1", "10.0.0.1:5000")
    with pytest.raises(InvalidRequest, match="no node of the Swarm has the stack's registry: `pierhead up` starts it"):
        asyncio.run(up.files())


def test_a_docker_that_does_not_answer_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(*_: object, **options: Any) -> None:
        raise subprocess.TimeoutExpired("docker", options["timeout"])

    def lost(*_: object) -> None:
        raise requests.ReadTimeout("read timed out")

    monkeypatch.setattr(subprocess, "run", silent)
    up = Up(docker.APIClient(version="1.44"), StackSettings("shop", "/srv/clone"), config(), print)
    with pytest.raises(EngineError, match="`docker stack deploy` has not ended after 300 s"):
        up._deploy({})
    monkeypatch.setattr(program, "run", lost)
    monkeypatch.setenv("PIERHEAD_STACK", '{"project": "shop", "clone": "/srv/clone"}')
    assert (program.main(), capsys.readouterr().err) == (
        EngineError.exit_code,
        "the Docker Engine says: read timed out\n",
    )
