"""What every Document does, asked of Swarm's configs in memory and of a real Swarm of one node."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from docker import APIClient

from controller.engines.docker import open_client
from controller.errors import StateChanged, StateTooLarge, StateUnreachable, StoreError
from controller.storage.store import Override, StateStore
from controller.swarm.state.configs import DOCUMENT, LIMIT, Head, SwarmConfigs, SwarmDocument
from controller.swarm.state.holder import StateHolder, prepare
from controller.swarm.state.lease import RENEW_S, TAKE_S
from controller.swarm.state.text import KeptText
from tests.debian_image import debian_image
from tests.fakes.fake_swarm_configs import FakeSwarm
from tests.harness import swarm_rig
from tests.harness.swarm_rig import SwarmRig


@pytest.fixture(scope="module")
def manager(docker_client: APIClient) -> Iterator[APIClient]:
    """A client of the one node of a Swarm."""
    image = debian_image(docker_client)
    swarm_rig.build_or_skip()
    with SwarmRig().running([image]) as rig, rig.nodes[0].client() as client:
        yield client


@pytest_asyncio.fixture(params=["fake", pytest.param("swarm", marks=pytest.mark.engine)])
async def configs(request: pytest.FixtureRequest) -> AsyncIterator[SwarmConfigs]:
    if request.param == "fake":
        yield FakeSwarm().manager()
        return
    real = SwarmConfigs(request.getfixturevalue("manager"))
    yield real
    real.close()


@pytest.fixture
def name() -> str:
    return f"shop-{secrets.token_hex(3)}_pierhead-state"


@pytest.fixture
def document(configs: SwarmConfigs, name: str) -> SwarmDocument:
    return SwarmDocument(configs, name)


async def head_of(document: SwarmDocument) -> Head:
    head = await document.head()
    assert head is not None
    return head


async def contents(configs: SwarmConfigs, name: str) -> set[str]:
    return {config.name for config in await configs.labelled(DOCUMENT, name)}


async def test_what_is_written_is_read_by_others(configs: SwarmConfigs, name: str, document: SwarmDocument) -> None:
    assert await document.head() is None
    await document.create({"epoch": "0"})
    with pytest.raises(StateChanged):
        await document.create({})
    first = await head_of(document)
    assert (first.labels, first.content) == ({"epoch": "0"}, "")
    await document.replace(first, {"epoch": "1", "words": 'a "b", c=d'}, b"one")
    second = await head_of(SwarmDocument(configs, name))
    assert second.labels == {"epoch": "1", "words": 'a "b", c=d'}
    assert await document.content(second) == b"one"
    assert second.version > first.version
    await document.replace(second, {})
    third = await head_of(document)
    assert (third.labels, third.content) == ({}, second.content), "without a new content the former one stays"
    await document.replace(third, {}, b"two")
    assert await document.content(await head_of(document)) == b"two"
    assert await document.content(third) is None
    assert len(await contents(configs, name)) == 1


async def test_a_write_from_an_old_version_leaves_nothing(
    configs: SwarmConfigs, name: str, document: SwarmDocument
) -> None:
    await document.create({})
    old = await head_of(document)
    await document.replace(old, {"holder": "a"}, b"a's")
    for content in (None, b"b's"):
        with pytest.raises(StateChanged):
            await document.replace(old, {"holder": "b"}, content)
    now = await head_of(document)
    assert (now.labels, await document.content(now)) == ({"holder": "a"}, b"a's")
    assert await contents(configs, name) == {now.content}


async def test_of_writers_at_once_one_succeeds(configs: SwarmConfigs, name: str, document: SwarmDocument) -> None:
    await document.create({})
    head = await head_of(document)
    writers = [SwarmDocument(configs, name) for _ in range(4)]
    done = await asyncio.gather(
        *(writer.replace(head, {"holder": str(number)}, b"x") for number, writer in enumerate(writers)),
        return_exceptions=True,
    )
    assert sum(result is None for result in done) == 1
    assert all(isinstance(result, StateChanged) for result in done if result is not None)
    now = await head_of(document)
    assert done[int(now.labels["holder"])] is None
    assert await contents(configs, name) == {now.content}


async def test_a_removed_document_refuses_and_versions_continue(configs: SwarmConfigs, document: SwarmDocument) -> None:
    await document.create({})
    before = await head_of(document)
    await document.replace(before, {}, b"one")
    before = await head_of(document)
    for each in (document.name, document.name, *await contents(configs, document.name)):
        await configs.remove(each)
    assert await contents(configs, document.name) == set()
    with pytest.raises(StateChanged):
        await document.replace(before, {"holder": "a"}, b"a's")
    await document.create({})
    assert (await head_of(document)).version > before.version


async def test_a_sweep_removes_what_no_write_can_name(
    configs: SwarmConfigs, name: str, document: SwarmDocument
) -> None:
    """And keeps what another writer has just created, and what was set aside."""
    await document.create({})
    await configs.create(f"{name}-lost", {DOCUMENT: name}, b"its writer was killed")
    aside = await document.set_aside(b"damaged")
    await document.replace(await head_of(document), {}, b"one")
    head = await head_of(document)
    await configs.create(f"{name}-new", {DOCUMENT: name}, b"about to be named")
    await document.sweep(head)
    assert await contents(configs, name) == {head.content, f"{name}-new"}
    kept = await configs.inspect(aside)
    assert kept is not None
    assert kept.data == b"damaged"
    await configs.remove(aside)


async def test_the_limit_is_the_largest_that_is_kept(document: SwarmDocument) -> None:
    await document.create({})
    await document.replace(await head_of(document), {}, bytes(LIMIT))
    head = await head_of(document)
    assert await document.content(head) == bytes(LIMIT)
    with pytest.raises(StateTooLarge, match="512001"):
        await document.replace(head, {}, bytes(LIMIT + 1))
    assert await head_of(document) == head


async def test_a_text_is_replaced_and_read_by_others(configs: SwarmConfigs, name: str, document: SwarmDocument) -> None:
    mine, theirs = KeptText(document), KeptText(SwarmDocument(configs, name))
    assert (await theirs.edition(), await theirs.read()) == ("", None)
    editions = []
    for text in ("services: {}", "x" * 2 * LIMIT):
        await mine.write(text)
        assert await theirs.read() == text
        editions.append(await theirs.edition())
    await theirs.write("y", {"files": "a:b", "digest": "1"})
    await mine.write("z", {"digest": "2"})
    assert (await head_of(document)).labels == {"files": "a:b", "digest": "2"}
    await asyncio.gather(mine.write("a"), theirs.write("b"))
    assert await theirs.read() in ("a", "b")
    assert len({*editions, await mine.edition()}) == 3
    assert len(await contents(configs, name)) == 1


async def test_the_state_goes_from_one_controller_to_the_next(configs: SwarmConfigs, document: SwarmDocument) -> None:
    await prepare(document)
    first, second = StateHolder(document), StateHolder(SwarmDocument(configs, document.name))
    assert await first.take(asyncio.Event())
    renewal = asyncio.create_task(first.run())
    store = StateStore(first.rows)
    store.overrides.put("web", Override(4, 2))
    await store.stored()
    waiting = asyncio.create_task(second.take(asyncio.Event()))
    await asyncio.sleep(2 * RENEW_S)
    assert (first.acts(), second.acts()) == (True, False)
    renewal.cancel()
    await asyncio.wait([renewal])
    await first.release()
    async with asyncio.timeout(TAKE_S):
        assert await waiting
    assert (first.acts(), second.acts()) == (False, True)
    assert second.epoch > first.epoch
    assert dict(StateStore(second.rows).overrides) == {"web": Override(4, 2)}


@pytest.mark.engine
async def test_an_engine_that_is_no_manager_is_reported(manager: APIClient) -> None:
    """The machine's own engine, which is in no Swarm."""
    real = SwarmConfigs(client := open_client())
    with pytest.raises(StateUnreachable, match="not a swarm manager"):
        await SwarmDocument(real, "shop_pierhead-state").head()
    real.close()
    client.close()


def test_a_name_that_swarm_cannot_take_is_refused_before_anything_is_written(configs: SwarmConfigs) -> None:
    with pytest.raises(StoreError, match="shorter"):
        SwarmDocument(configs, f"{'p' * 40}_pierhead-state")
