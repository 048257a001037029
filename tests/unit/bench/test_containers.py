from __future__ import annotations

from typing import Any

import yaml

from tests.bench.cases import OURS, VARIANTS, Subject
from tests.bench.processes import ROOT
from tests.bench.systems.containers import override
from tests.bench.systems.ours import CHAINS


def changed(app: str, file: str, subject: Subject) -> dict[str, Any]:
    services = yaml.safe_load((ROOT / "compose" / "apps" / f"{file}.yaml").read_text())["services"]
    found: dict[str, Any] = override(CHAINS["ours", app], subject, services)["services"]
    return found


def test_replicas_are_the_chains_and_a_variants_settings_go_to_the_services_that_take_them() -> None:
    dlrm = changed("dlrm", "recsys", OURS)
    assert {name: each["x-serve"]["replicas"] for name, each in dlrm.items()} == {"recsys": 2, "ranker": 1}
    assert dlrm["recsys"]["x-serve"]["route"] == "/recsys", "the rest of x-serve stays"
    of = {variant.key: changed("echo", "echo", variant) for variant in VARIANTS}
    assert of["ours:two-loops"]["echo-child"]["x-serve"]["run_user_code_in_separate_thread"] is True
    # A service refuses HTTP handlers on another loop.
    assert "run_user_code_in_separate_thread" not in of["ours:two-loops"]["echo"]["x-serve"]
    assert [each["environment"] for each in of["ours:grpc"].values()] == [{"PIERHEAD_TRANSPORT": "grpc"}] * 2
