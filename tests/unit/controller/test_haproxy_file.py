"""HAProxy's file when its master answers late, or refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from controller.errors import RoutingError, RoutingUnreachable
from controller.routing import haproxy_config as config
from controller.routing.haproxy_file import ConfigFile
from controller.routing.haproxy_text import hash_of
from tests.unit.controller.worlds import service

BEFORE, AFTER = config.render([service("web")]), config.render([service("web", route="/other")])
STATES = "1\n# be_name srv_name srv_addr srv_port srv_admin_state srv_op_state srv_id srv_uweight"


class HAProxy:
    """Its two sockets: it runs BEFORE, and its master fails at a reload."""

    def __init__(self, fault: RoutingError) -> None:
        self.fault = fault

    async def ask(self, line: str) -> str:
        return (await self.ask_all((line,)))[0]

    async def ask_all(self, lines: Sequence[str]) -> list[str]:
        answers = {
            "show info": "Version: 3.0.11",
            "get var proc.pierhead_routing": f"proc.pierhead_routing: type=str value=<{hash_of(BEFORE)}>",
            "show servers state": STATES,
        }
        return [answers[line] for line in lines]

    async def reload(self) -> None:
        raise self.fault


@pytest.mark.parametrize(
    ("fault", "kept"),
    [
        (RoutingUnreachable("the master did not answer"), AFTER),  # a worker that has read it may still come
        (RoutingError("HAProxy refused to load it"), BEFORE),
    ],
)
async def test_only_a_refused_configuration_is_taken_back(tmp_path: Path, fault: RoutingError, kept: str) -> None:
    (tmp_path / "haproxy.cfg").write_text(BEFORE)
    haproxy = cast("Any", HAProxy(fault))
    file = ConfigFile(tmp_path, haproxy, haproxy)
    with pytest.raises(RoutingError, match=str(fault)):
        await file.load(AFTER)
    assert hash_of(file.read()) == hash_of(kept)
