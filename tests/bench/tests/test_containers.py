from __future__ import annotations

from typing import Any

import yaml

from tests.bench.cases import EIGHT, OURS, TRITON, VARIANTS, Subject
from tests.bench.processes import ROOT
from tests.bench.systems.containers import override
from tests.bench.systems.ours import chain_of


def changed(chain: str, file: str, subject: Subject) -> dict[str, Any]:
    services = yaml.safe_load((ROOT / "compose" / "apps" / f"{file}.yaml").read_text())["services"]
    found: dict[str, Any] = override(chain_of(subject, chain), subject, services)["services"]
    return found


def test_replicas_are_the_chains_or_the_subjects_and_a_variants_settings_go_to_both_services() -> None:
    dlrm = changed("dlrm", "recsys", OURS)
    assert {name: each["x-serve"]["replicas"] for name, each in dlrm.items()} == {"recsys": 2, "ranker": 1}
    triton = changed("dlrm", "triton", TRITON)
    assert {name: each["x-serve"]["replicas"] for name, each in triton.items()} == {"recsys": 2, "triton": 1}
    assert "autoscale" not in triton["triton"]["x-serve"], "one replica in every round"
    assert dlrm["recsys"]["x-serve"]["route"] == "/recsys", "the rest of x-serve stays"
    assert [each["x-serve"]["replicas"] for each in changed("echo", "echo", EIGHT[0]).values()] == [8, 8]
    of = {variant.key: changed("echo", "echo", variant) for variant in VARIANTS}
    assert [each["environment"] for each in of["ours:grpc"].values()] == [{"PIERHEAD_TRANSPORT": "grpc"}] * 2
