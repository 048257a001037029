from __future__ import annotations

import yaml

from tests.bench.cases import OURS, VARIANTS
from tests.bench.processes import ROOT
from tests.bench.systems.containers import override
from tests.bench.systems.ours import CHAINS

APPS = ROOT / "compose" / "apps"


def test_replicas_are_the_chains_and_the_rest_of_x_serve_stays() -> None:
    services = yaml.safe_load((APPS / "recsys.yaml").read_text())["services"]
    changed = override(CHAINS["ours", "dlrm"], OURS, services)["services"]
    assert {name: each["x-serve"]["replicas"] for name, each in changed.items()} == {"recsys": 2, "ranker": 1}
    assert changed["recsys"]["x-serve"] == {**services["recsys"]["x-serve"], "replicas": 2}
    assert "environment" not in changed["recsys"]


def test_variants_set_x_serve_keys_where_there_are_such_and_variables_else() -> None:
    services = yaml.safe_load((APPS / "echo.yaml").read_text())["services"]
    of = {variant.key: override(CHAINS["ours", "echo"], variant, services)["services"] for variant in VARIANTS}
    assert of["ours:two-loops"]["echo-child"]["x-serve"]["run_user_code_in_separate_thread"] is True
    assert of["ours:grpc"]["echo"]["environment"] == {"PIERHEAD_TRANSPORT": "grpc"}
    # A service refuses HTTP handlers on another loop.
    assert "run_user_code_in_separate_thread" not in of["ours:two-loops"]["echo"]["x-serve"]
    assert of["ours:grpc"]["echo-child"]["environment"] == {"PIERHEAD_TRANSPORT": "grpc"}
