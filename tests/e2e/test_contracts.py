"""Versions of an application of service classes that replace each other on the real stack, under load.

`-s` prints the figures.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.load import Load
from tests.harness.shared_stacks import WrittenStack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

APPS = Path(__file__).parent / "apps"
SHOP = (APPS / "two_classes.yaml").read_text()
CONNECTIONS = 8
BASE = f"pierhead/python:{os.environ.get('PIERHEAD_TAG', 'latest')}"
GROWS = {
    "user: int, items: list[int]": "user: int, items: list[int], most: int = 10",
    "[3, 1, 2])": "[3, 1, 2], most=2)",
    "return sorted(items)": "return sorted(items)[:most]",
}
SHRINKS = {"user: int, items: list[int]": "items: list[int]", "rank(7, ": "rank("}
FIELD = "app.Ranker.rank(user): was removed"

Build = Callable[..., None]


@pytest.fixture
def build(written: WrittenStack, tmp_path: Path) -> Iterator[Build]:
    """Builds a version of the application."""
    made: list[str] = []

    def build(tag: str, changes: dict[str, str], *, contract: bool = True) -> None:
        shutil.copytree(APPS / "two_classes", tmp_path / tag)
        app = tmp_path / tag / "app.py"
        text = app.read_text()
        for before, after in changes.items():
            assert before in text
            text = text.replace(before, after)
        app.write_text(text)
        name = f"pierhead-test-two-classes:{tag}"
        arguments = {"BASE": BASE, "CONTRACT": str(contract).lower()}
        written.docker.images.build(path=str(tmp_path / tag), tag=name, buildargs=arguments, rm=True)
        made.append(name)

    yield build
    written.become("services: {}\n")
    for name in made:
        written.docker.images.remove(name, force=True)


@pytest.fixture
def shop(written: WrittenStack, build: Build) -> WrittenStack:
    """The first version of the application."""
    build("v1", {})
    written.become(SHOP, ranker=2, shop=2)
    eventually(lambda: all(written.service(name)["stable"] for name in ("ranker", "shop")), "both count as proved")
    eventually(lambda: written.get("/shop").body == b"[1, 2, 3]", "it answers")
    return written


def roll(stack: WrittenStack, tag: str) -> None:
    stack.write(SHOP.replace("pierhead-test-two-classes:v1", f"pierhead-test-two-classes:{tag}"))


def has_rolled(stack: WrittenStack, before: dict[str, str]) -> bool:
    rows = [stack.service(name) for name in before]
    return all(
        row["stable"] == row["offered"] != before[row["name"]] and not row["rollout"] and row["converged"]
        for row in rows
    )


def versions(stack: WrittenStack) -> dict[str, str]:
    return {name: stack.service(name)["stable"] for name in ("ranker", "shop")}


def is_refused(stack: WrittenStack, name: str) -> bool:
    row = stack.service(name)
    return bool(row["rejected"] and row["rejected"]["is_refused"] and not row["rollout"])


def test_a_field_with_a_default_is_added_and_a_used_one_is_not_removed(shop: WrittenStack, build: Build) -> None:
    before = versions(shop)
    build("v2", GROWS)
    build("v3", SHRINKS)
    with Load([shop.url("/shop")], connections=CONNECTIONS) as load:
        roll(shop, "v2")
        eventually(lambda: has_rolled(shop, before), "the field is there in both services", within_s=120)
        eventually(lambda: shop.get("/shop").body == b"[1, 2]", "callers use it")
        grown, replicas = versions(shop), shop.replica_ids()
        roll(shop, "v3")
        eventually(lambda: is_refused(shop, "ranker") and is_refused(shop, "shop"), "both services are refused")
        plan = shop.pierhead("plan").stdout
        assert shop.pierhead("wait-ready").returncode == 1
    print(f"\n{plan}\n{load.result}")
    for name in ("ranker", "shop"):
        assert f"rollout of {name}: " in plan
        assert f"{FIELD}" in shop.service(name)["message"]
        assert shop.service(name)["state"] == "DEPLOY_FAILED"
        assert FIELD in shop.pierhead("why", name).stdout
    assert FIELD in " ".join(plan.split())
    load.assert_no_failure()
    assert versions(shop) == grown
    assert shop.replica_ids() == replicas, "nothing was started"


def test_without_a_contract_in_the_image_the_first_replica_is_compared(shop: WrittenStack, build: Build) -> None:
    before = versions(shop)
    build("v3", SHRINKS, contract=False)
    with Load([shop.url("/shop")], connections=CONNECTIONS) as load:
        roll(shop, "v3")
        eventually(lambda: is_refused(shop, "ranker"), "the first replica was compared", within_s=120)
        shop.wait_settled(ranker=2, shop=2)
        assert shop.service("shop")["rollout"]["phase"] == "WAITING", "its callee goes first"
    print(f"\n{load.result}")
    load.assert_no_failure()
    assert versions(shop) == before
    assert any(FIELD in said for said in shop.messages("rolled_back"))
