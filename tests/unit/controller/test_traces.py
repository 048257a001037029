"""Traces of requests, joined from what replicas tell, and as the API has them; the variables that replicas get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.files.parse import parse
from controller.files.traces import TRACE_VARIABLES
from controller.observe.prober import Subject
from controller.observe.traces import KeptByReplica
from controller.status.records.document import as_json
from controller.status.traces import MOST_OF_ONE, joined
from tests.unit.controller import compose_configs
from tests.unit.controller.compose_configs import PROJECT, config, problems_of
from tests.unit.controller.control import Control
from tests.unit.controller.test_api import error_of, serving
from tests.unit.controller.worlds import service

TRACE, OTHER = "a" * 32, "b" * 32


def told(
    trace: str = TRACE, span: str = "1" * 16, parent: str = "", began: float = 100.0, **more: Any
) -> dict[str, Any]:
    """One request, as a replica tells it."""
    made = {
        "trace": trace, "span": span, "parent": parent, "request": "mine", "why": "slow", "name": "GET /buy",
        "status": "200", "began": began, "seconds": 2.0, "spans": [], "left_out": 0,
    }  # fmt: skip
    return made | more


def call(span: str, parent: str, **more: Any) -> dict[str, Any]:
    """A span of a call, as a replica tells it."""
    made = {
        "span": span, "parent": parent, "kind": "client", "name": "shop.Ranker/Rank", "status": "OK", "began": 100.5,
        "seconds": 1.0, "attributes": {"replica": "ranker-1"}, "links": [],
        "events": [{"at": 100.6, "name": "is tried again: draining", "detail": "ranker-2"}],
    }  # fmt: skip
    return made | more


def test_the_parts_of_one_request_are_one_trace() -> None:
    above = KeptByReplica("shop", "shop-1", [told(parent="f" * 16, spans=[call("2" * 16, "1" * 16)])])
    # The clock of its node is behind: it begins before its caller does.
    below = KeptByReplica(
        "ranker", "ranker-1", [told(span="3" * 16, parent="2" * 16, began=99.0, name="Rank", status="OK")]
    )
    (trace,) = joined([below, above])
    assert [part.service for part in trace.parts] == ["shop", "ranker"]
    assert (trace.trace, trace.request, trace.service, trace.name, trace.status) == (
        TRACE,
        "mine",
        "shop",
        "GET /buy",
        "200",
    )
    (span,) = trace.parts[0].spans
    assert (span.kind, span.attributes, span.events[0].detail) == ("client", {"replica": "ranker-1"}, "ranker-2")


def test_a_request_from_haproxy_begins_there() -> None:
    waited = call("6" * 16, "", kind="proxy", name="HAProxy", began=97.0, seconds=5.0)
    above = KeptByReplica("shop", "shop-1", [told(parent="6" * 16, spans=[waited, call("2" * 16, "1" * 16)])])
    # A service that calls through HAProxy, too; the clock of its node is behind.
    again = call("7" * 16, "2" * 16, kind="proxy", name="HAProxy", began=90.0)
    below = KeptByReplica("ranker", "ranker-1", [told(span="3" * 16, parent="7" * 16, began=91.0, spans=[again])])
    (trace,) = joined([below, above])
    assert [part.service for part in trace.parts] == ["shop", "ranker"]
    assert (trace.began, trace.seconds) == (97.0, 5.0)


def test_the_newest_come_first_and_can_be_chosen() -> None:
    kept = [
        KeptByReplica("shop", "shop-1", [told(began=1.0), told(OTHER, began=2.0, request="other")]),
        KeptByReplica("ranker", "ranker-1", [told(span="3" * 16, parent="1" * 16, began=1.1)]),
    ]
    assert [each.trace for each in joined(kept)] == [OTHER, TRACE]
    assert [each.trace for each in joined(kept, limit=1)] == [OTHER]
    assert [each.trace for each in joined(kept, service="ranker")] == [TRACE]
    assert [each.trace for each in joined(kept, trace=TRACE)] == [TRACE]
    assert [each.trace for each in joined(kept, trace="other")] == [OTHER]
    again = KeptByReplica("ranker", "ranker-1", [told(span="5" * 16, request="second", began=3.0)])
    assert [each.trace for each in joined([*kept, again], trace="second")] == [TRACE], (
        "a client's trace of two requests"
    )
    assert joined(kept, service="nobody") == ()


_JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5) | st.just("1" * 16) | st.just(TRACE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(_JUNK | st.dictionaries(st.sampled_from([*told()]), _JUNK).map(lambda some: told() | some), max_size=5))
def test_what_is_no_trace_is_left_out_and_the_rest_can_be_shown(traces: Sequence[Any]) -> None:
    kept = [KeptByReplica("shop", "shop-1", [*traces, told()])]
    text = json.dumps(joined(kept), default=as_json, allow_nan=False)
    text.encode()  # no lone surrogate
    assert TRACE in text


def test_a_replica_cannot_tell_more_than_the_bound() -> None:
    spans = [call(f"{number:016x}", "1" * 16, name="x" * 100_000) for number in range(1, 1000)]
    (trace,) = joined([KeptByReplica("shop", "shop-1", [told(spans=spans, name="\x1b[2J" * 10_000)])])
    assert len(trace.parts[0].spans) == MOST_OF_ONE
    assert len(trace.parts[0].spans[0].name) == 1000
    assert "\x1b" not in trace.name
    assert (
        len(joined([KeptByReplica("shop", "shop-1", [told(f"{number:032x}") for number in range(1, 1000)])], limit=200))
        == 128
    )


async def test_the_api_has_them_and_says_who_was_silent(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web"), service("api", replicas=1))
    answers: dict[str, Sequence[Any] | None] = {"web": [told()], "api": None}

    async def ask(subject: Subject) -> Sequence[Any] | None:
        (name,) = [each.service for each in control.view.observed.containers if each.id == subject.container_id]
        return answers[name]

    control.ask_traces = ask
    async with serving(control, web=2, api=1) as client:
        document = await (await client.get("/api/v1/traces")).json()
        assert [each["trace"] for each in document["traces"]] == [TRACE]
        assert document["traces"][0]["parts"][0]["service"] == "web"
        (silent,) = document["silent"]
        assert "api" in silent
        assert (await (await client.get("/api/v1/traces?service=api")).json())["traces"] == []
        assert (await error_of(await client.get("/api/v1/traces?service=nobody")))[0] == 404
        assert (await error_of(await client.get("/api/v1/traces?limit=0")))[0] == 400


async def test_replicas_that_hang_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control.of(tmp_path, service("web"))

    async def hang(_: Subject) -> Sequence[Any] | None:
        await asyncio.get_running_loop().create_future()
        return ()

    control.ask_traces = hang
    monkeypatch.setattr("controller.observe.traces.LONGEST_S", 0.05)
    async with serving(control, web=2) as client:
        document = await (await client.get("/api/v1/traces")).json()
        assert (document["traces"], len(document["silent"])) == ([], 2)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("OTEL_SDK_DISABLED", "perhaps", 'expected true or false (it is set in .env), found "perhaps"'),
        ("OTEL_TRACES_SAMPLER", "sometimes", "always_off"),
        ("OTEL_TRACES_SAMPLER_ARG", "7", 'expected a number from 0 to 1 (it is set in .env), found "7"'),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "expected an address such as http://collector:4318"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "expected http/protobuf or grpc"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "secret", 'found "another text"'),
    ],
)
def test_wrong_variables_are_problems(name: str, text: str, said: str) -> None:
    (problem,) = problems_of(with_traces({name: text}, {}))
    assert problem.startswith(f"services.controller.environment.{name}: ")
    assert said in problem


def with_traces(words: dict[str, str], environment: dict[str, str]) -> Any:
    ranker = compose_configs.service({}, environment=environment)
    return config(ranker=ranker, controller={"image": "c", "environment": words})


@pytest.mark.parametrize(
    ("words", "own", "found"),
    [
        ({}, {}, {}),
        (dict.fromkeys(TRACE_VARIABLES, ""), {}, {}),
        (
            {"OTEL_TRACES_SAMPLER_ARG": "0.01", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"},
            {"OTEL_TRACES_SAMPLER_ARG": "1"},
            {"OTEL_TRACES_SAMPLER_ARG": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"},
        ),
    ],
)
def test_replicas_get_the_stacks_variables_unless_they_have_their_own(
    words: dict[str, str], own: dict[str, str], found: dict[str, str]
) -> None:
    project = with_traces(words, own)
    assert problems_of(project) == []
    environment = parse(PROJECT, project).services["ranker"].container["Env"]
    assert dict(each.split("=", 1) for each in environment if each.startswith("OTEL_")) == found
