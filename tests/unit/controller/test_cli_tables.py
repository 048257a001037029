"""What the command shows, for documents of the API, at the widths of real terminals. `|` marks where lines begin."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import RenderableType

from controller.model.reports import AutoscaleStatus
from controller.model.text import age
from controller.model.world import Server, ServerState
from controller.status.reasons import explained
from controller.status.records.answers import (
    AlertDocument,
    Alerts,
    EventDocument,
    HAProxyProcess,
    PlanDocument,
    RevisionDocument,
    Revisions,
    Route,
    Routes,
    ServiceTraffic,
    StepDocument,
    Traffic,
)
from controller.status.records.services import (
    Failure,
    GpuSlotUse,
    MachineDocument,
    RefusedAction,
    RejectionDocument,
    ReplicaState,
    Service,
    ServiceState,
    ShownAvailability,
)
from controller.tool import tables
from controller.tool.output import plain
from controller.tool.rows import rate, seconds
from controller.tool.why import Case
from controller.tool.why import page as why_page
from tests.unit.controller.cli_documents import AT, UUID, document, event, gpu, node, replica, rolling, row, settled

SHORTAGE = "it asks for 1 GPU and 0 of 1 are free: 1 held by ranker"


def traffic(rate: float, p50_s: float, p99_s: float) -> ServiceTraffic:
    return ServiceTraffic((rate,), (0.0,), (p50_s,), (p99_s,), (0.0,), (0.0,), (0.0,))


NOTHING = Traffic(AT, 5.0, {}, "")
TRAFFIC = Traffic(AT, 5.0, {"web": traffic(812.4, 0.0012, 0.0093), "ranker": traffic(1204.0, 0.0102, 1.31)}, "")
CRASHED = RejectionDocument("9f8e7d6c", "it crashed", AT, False, False, "9f8e7d6c@0")


def ranker() -> Service:
    """Two wanted, one there: no GPU for the other."""
    return row(
        "ranker",
        wanted=2,
        ready=1,
        converged=False,
        blocked=SHORTAGE,
        message=f"1 pending: {SHORTAGE}",
        route=None,
        grpc_services=("services.recsys.app.Ranker",),
        override=2,
        spec_replicas=1,
        in_flight=16,
        waiting=14,
        replicas=(
            replica("p-ranker-1a2b3c4d-1", gpus=(UUID,), ongoing=16),
            replica("", "PENDING", version="", message=SHORTAGE),
        ),
    )


GPUS = (gpu(UUID, name="H100", holder="p-ranker-1a2b3c4d-1"),)


def shown(page: Iterable[RenderableType], width: int) -> str:
    return plain(page, width)


def picture(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


def test_every_state_has_a_colour() -> None:
    states = {state for kind in (ReplicaState, ServiceState, ShownAvailability) for state in get_args(kind)}
    assert states - tables.STYLES.keys() == {"active"}, "what is usual is not marked"


def test_status_ends_with_what_the_machine_has_left() -> None:
    machine = MachineDocument(cores=16, load=3.42, memory_bytes=64 << 30, free_bytes=41 << 30)
    page = shown(tables.status(document(row(), machine=machine), TRAFFIC, 80), 80)
    assert page.splitlines()[-1] == "machine: 41.0 GiB of 64.0 GiB of memory are free, load 3.4 on 16 cores"


def test_status_on_a_narrow_terminal() -> None:
    page = tables.status(document(row(ready=1, wanted=1), ranker(), gpus=GPUS), TRAFFIC, 80)
    assert shown(page, 80) == picture("""
        SERVICE  STATE      READY  GPUS  IN FLIGHT  WAITING  REQ/S  P50     P99
        web      HEALTHY    1/1    -     0          0        812    1.2 ms  9.3 ms
        ranker   UNHEALTHY  1/2    1     16         14       1,204  10 ms   1.3 s

        ranker: 1 pending: it asks for 1 GPU and 0 of 1 are free: 1 held by ranker

        REPLICA              STATE    ADDRESS          GPU           IN FLIGHT
        p-web-1a2b3c4d-1     RUNNING  172.18.0.7:8080  -             0
        p-ranker-1a2b3c4d-1  RUNNING  172.18.0.7:8080  GPU-3f2c1b0a  16
        ranker (none yet)    PENDING  -                -             -

        ranker (none yet): it asks for 1 GPU and 0 of 1 are free: 1 held by ranker

        GPU           KIND  HELD BY
        GPU-3f2c1b0a  H100  p-ranker-1a2b3c4d-1
        """)


def test_a_column_without_room_is_left_out_before_anything_is_cut() -> None:
    long = row(replicas=(replica("pierhead-a-service-with-a-long-name-1a2b3c4d-1", gpus=(UUID,)),))
    text = shown(tables.replicas([long], 80).render(80), 80)
    assert ("ADDRESS" in text, "…" in text) == (False, False)


@given(st.lists(st.text("ab ", min_size=1, max_size=90), min_size=1, max_size=4), st.integers(60, 220), st.booleans())
def test_no_sentence_is_ever_cut(sentences: list[str], width: int, endless: bool) -> None:
    rows = [row(f"web{number}", message=f"<{said}>", replicas=()) for number, said in enumerate(sentences)]
    width = 100_000 if endless else width
    text = shown(tables.status(document(*rows), NOTHING, width), width)
    squeezed = "".join(text.split())
    for said in sentences:
        assert "".join(f"<{said}>".split()) in squeezed
    assert "…" not in squeezed
    if endless:
        assert len(text.splitlines()) == 1 + len(rows), "off a terminal a row is a line"


def test_what_is_wrong_with_everything_comes_first() -> None:
    broken = document(row(), spec_problems=("services.web.x-serve.rout: unknown key",), notices=("HAProxy is away",))
    text = shown(tables.status(broken, NOTHING, 80), 80)
    assert text.startswith("compose files: services.web.x-serve.rout: unknown key\nHAProxy is away\n")
    assert shown(tables.status(document(settled=False), NOTHING, 80), 80).startswith("the controller was just started")
    assert "no service has an x-serve block" in shown(tables.status(document(), NOTHING, 80), 80)


def test_what_fires_is_one_line() -> None:
    def firing(count: int) -> str:
        alerts = [
            AlertDocument("ErrorRate", f"web-{number}", "critical", "", "", "", AT, ("1",) if number else (), {})
            for number in range(count)
        ]
        found = Alerts(AT, tuple(alerts * 2), True, "")
        return shown(tables.status(document(row()), NOTHING, 400, found), 400).splitlines()[0]

    assert firing(2) == "alerts that fire: ErrorRate of web-0, ErrorRate of web-1 (silenced)"
    assert firing(10).endswith("ErrorRate of web-7 (silenced) and 2 more")
    assert "alerts" not in firing(0)
    away = Alerts(AT, (), True, "Alertmanager is away")
    assert shown(tables.status(document(row()), NOTHING, 400, away), 400).startswith(
        "not all is known of alerts: Alertmanager is away\n"
    )


@pytest.mark.parametrize(
    ("service", "words"),
    [
        (
            replace(rolling(), message="1a2b3c4d -> 9f8e7d6c: 1 of 2 replaced; 1 pending: no GPU is free"),
            "ROLLING, 1 of 2 ready; 1a2b3c4d -> 9f8e7d6c: 1 of 2 replaced; 1 pending: no GPU is free",
        ),
        (
            settled(message="version 9f8e7d6c was rolled back (it crashed)", rejected=CRASHED),
            "version 9f8e7d6c was rolled back (it crashed)",
        ),
        (settled(rejected=CRASHED), "version 9f8e7d6c was rejected: it crashed"),
        (settled(rejected=replace(CRASHED, is_refused=True)), "version 9f8e7d6c was refused: it crashed"),
    ],
)
def test_a_rollout_in_progress_is_described(service: Service, words: str) -> None:
    assert explained(service).summary == words


# ----------------------------------------------------------------------------------------------------------------- why


def case(service: Service, *events: EventDocument, steps: tuple[StepDocument, ...] = ()) -> Case:
    return Case(service, PlanDocument((), steps, (), (), ""), events, TRAFFIC.latest(service.name))


def test_why_of_a_service_that_is_short_of_a_gpu() -> None:
    step, other = (
        StepDocument(1, (), "create_container", name, service, f"create {name}", "1 of 2 replicas exist")
        for service, name in (("ranker", "p-ranker-1a2b3c4d-2"), ("web", "p-web-1a2b3c4d-2"))
    )
    text = shown(why_page(case(ranker(), event("create p-ranker-1a2b3c4d-1: 0 of 2"), steps=(step, other)), 110), 110)
    stamp = text.splitlines()[-1].split(" ok ")[0].strip()
    assert text == picture(f"""
        ranker is UNHEALTHY: 1 of 2 replicas ready
          version 1a2b3c4d, image pierhead/ranker:latest
          from outside: gRPC services.recsys.app.Ranker
          in flight 16, waiting 14; in the last 30 s 1,204 requests/s, p50 10 ms, p99 1.3 s

        How many
          2 wanted: set by scale; the compose files say 1 (`pierhead scale ranker auto` goes back to them)

        What is in the way
          1 pending: {SHORTAGE}

        Being done, and next
          create p-ranker-1a2b3c4d-2: 1 of 2 replicas exist

        Replicas
          REPLICA              STATE    ADDRESS          GPU           IN FLIGHT  WHY
          p-ranker-1a2b3c4d-1  RUNNING  172.18.0.7:8080  GPU-3f2c1b0a  16
          ranker (none yet)    PENDING  -                -             -          it asks for 1 GPU and 0 of 1 are
                                                                                  free: 1 held by ranker

        Last events (`pierhead events --service ranker` has all)
          {stamp} ok      create p-ranker-1a2b3c4d-1: 0 of 2
        """)


def test_why_of_a_crash_loop_has_the_log() -> None:
    failing = row(
        ready=0,
        converged=False,
        message="CRASH_LOOP: failed 4 times in a row",
        failure=Failure(4, AT - 12, "exited by itself with code 1; last line: boom"),
        refusals=(RefusedAction("start p-web-2", 3, 12.0, "no space left"),),
        replicas=(replica("p-web-1", "STARTING", message="not ready yet: 503 from :9100/readyz"),),
    )
    failed = event("p-web-0: exited by itself with code 1; its last log lines:\nTraceback\nboom", "replica_failed")
    text = shown(why_page(case(failing, failed), 200), 200)
    assert (
        picture("""
        What is in the way
          could not start p-web-2 3 times, next try in 12 s: no space left
          a replica failed 4 times in a row, last 12 s ago: exited by itself with code 1; last line: boom
          p-web-1: not ready yet: 503 from :9100/readyz

        Last failure
          30 s ago: p-web-0: exited by itself with code 1; its last log lines:
            | Traceback
            | boom
        """)
        in text
    )
    assert "(2 more lines)" in text


@pytest.mark.parametrize(
    ("phase", "offered"),
    [("WAITING", ["abort"]), ("BAKING", ["abort", "promote"]), ("ROLLING", ["abort"]), ("ROLLING_BACK", [])],
)
def test_why_of_a_rollout_offers_what_the_controller_would_take(phase: str, offered: list[str]) -> None:
    text = shown(why_page(case(rolling(phase=phase)), 120), 120)
    assert f"{phase}, 1 of 2 ready; 1a2b3c4d -> 9f8e7d6c: 1 of 2 replaced (for 60 s)" in text
    assert [way for way in ("abort", "promote") if f"pierhead {way} ranker" in text] == offered


POLICY = AutoscaleStatus(1, 8, 2, 0.0, 2)
PAUSED = "set by scale; the autoscaler (1 to 8) pauses until `pierhead scale web auto`"


@pytest.mark.parametrize(
    ("override", "autoscale", "words"),
    [
        (None, {}, "the compose files say so"),
        (4, {}, "set by scale; the compose files say 2 (`pierhead scale web auto` goes back to them)"),
        (
            None,
            {"load": 44.25, "wanted": 3},
            "the autoscaler decides, 1 to 8; the load is 44.2 requests, which need 3 replicas if they last",
        ),
        (
            4,
            {"target": 4, "load": 1, "wanted": 1, "paused": True},
            f"{PAUSED}; the load is 1.0 requests, which need 1 replicas",
        ),
        (
            None,
            {"problem": "KeyError: 'x'"},
            "the autoscaler decides, 1 to 8; its policy gives no number: KeyError: 'x'; 2 are held until then",
        ),
        (None, {"basis": "the query gives 12"}, "the autoscaler decides, 1 to 8; the query gives 12"),
    ],
)
def test_who_decides_how_many(override: int | None, autoscale: dict[str, Any], words: str) -> None:
    decided = row(override=override, autoscale=replace(POLICY, **autoscale) if autoscale else None)
    assert decided.who_decides == words


# ------------------------------------------------------------------------------------------------- gpus, routes


def test_the_headline_and_the_traffic_or_why_there_is_none() -> None:
    of_all = document(row(), ranker(), gpus=GPUS)
    assert tables.headline(of_all).plain.endswith(": 3 of 4 replicas ready, 1 of 1 GPUs held")
    without = replace(NOTHING, problem="no connection")
    assert shown(tables.status(of_all, without, 80), 80).startswith("no rates and quantiles: no connection\n")


def test_nodes_and_what_is_on_them() -> None:
    nodes = (node("n1", role="leader", replicas=2), node("n2", state="down", replicas=0, message="down: it is away"))
    here = row(ready=1, wanted=1, replicas=(replica("p-web-1a2b3c4d-1", node="n1"), replica("", "PENDING")))
    cards = (gpu(UUID, name="H100", holder="p-web-1a2b3c4d-1", node="n1"),)
    assert shown(tables.status(document(here, gpus=cards, nodes=nodes), NOTHING, 100), 100) == picture("""
        SERVICE  STATE    VERSION   READY  GPUS  IN FLIGHT  WAITING  REQ/S  P50  P99
        web      HEALTHY  1a2b3c4d  1/1    -     0          0        -      -    -

        REPLICA           STATE    NODE  ADDRESS          GPU  IN FLIGHT
        p-web-1a2b3c4d-1  RUNNING  n1    172.18.0.7:8080  -    0
        web (none yet)    PENDING  -     -                -    -

        GPU           NODE  KIND  HELD BY
        GPU-3f2c1b0a  n1    H100  p-web-1a2b3c4d-1

        NODE  ROLE    STATE  AVAILABILITY  REPLICAS  GPUS  ADDRESS    WHAT IS GOING ON
        n1    leader  ready  active        2         1/2   10.77.0.1
        n2    worker  down   active        0         1/2   10.77.0.1  down: it is away
        """)
    assert ", 1 of 2 nodes ready" in tables.headline(document(here, nodes=nodes)).plain
    assert "this stack runs on one machine" in shown(tables.nodes((), 80), 80)


def test_gpus_with_memory_and_slots_where_they_are_known() -> None:
    shared = gpu(
        UUID,
        name="H100",
        memory_bytes=80 * 2**30,
        used_bytes=41 * 2**29,
        free_bytes=40 * 2**30,
        slots=(GpuSlotUse("p-ranker-1", "24 GiB"), GpuSlotUse("p-echo-1", "16 GiB")),
    )
    foreign = replace(shared, uuid="MIG-1", name="", slots=(), used_bytes=None)
    faulty = gpu("GPU-2", fault="Xid 79", memory_bytes=80 * 2**30, free_bytes=80 * 2**30)
    found = document(gpus=(shared, foreign, faulty), gpu_memory_problem="nvidia-smi does not answer")
    assert shown(tables.gpus(found, 200), 200) == picture(f"""
        GPU                                       KIND  MEMORY    IN USE    FREE      HELD BY
        {UUID}  H100  80.0 GiB  20.5 GiB  40.0 GiB  p-ranker-1 (24 GiB), p-echo-1 (16 GiB)
        MIG-1                                     -     80.0 GiB  -         40.0 GiB  other processes
        GPU-2                                     -     80.0 GiB  -         80.0 GiB  no container (not used: Xid 79)
        nvidia-smi does not answer
        """)
    assert "GPU-2         -     free\n" in shown(tables.gpus(document(gpus=(*GPUS, gpu("GPU-2"))), 80), 80)
    assert "knows no GPU" in shown(tables.gpus(document(), 80), 80)


def server(name: str, **changes: Any) -> Server:
    return replace(Server("svc_web", name, "172.18.0.7:8080", ServerState.READY, up=True, sessions=3), **changes)


def route(match: str, service: str, *servers: Server, **changes: Any) -> Route:
    plain = Route("http" if match.startswith("/") else "grpc", match, None, service, False, True, 0, servers)
    return replace(plain, **changes)


def test_routes_and_the_servers_behind_them() -> None:
    web = (server("p-web-1"), server("p-web-2", up=False, sessions=0))
    listed = (
        route("/web", "web", *web, queued=4),
        route("p.v1.Web", "web", *web, queued=4),
        route("p.v1.Ranker", "ranker"),
        route("p.v1.New", "new", in_haproxy=False, application="eu"),
    )
    assert shown(tables.routes(Routes(AT, HAProxyProcess(1, AT, "3.0.11"), listed), 200), 200) == picture("""
        ROUTE               SERVICE  SERVERS  SESSIONS  QUEUED  WHAT IS GOING ON
        /web                web      1/2      3         4
        gRPC p.v1.Web       web      1/2      3         4
        gRPC p.v1.Ranker    ranker   0/0      0         0       no server takes requests: they are answered 503; see `pierhead why ranker`
        gRPC p.v1.New (eu)  new      0/0      0         0       HAProxy does not have it yet

        SERVER   STATE  ADDRESS          WEIGHT  SESSIONS  QUEUED  WHY
        p-web-1  ready  172.18.0.7:8080  1       3         0
        p-web-2  DOWN   172.18.0.7:8080  1       0         0       HAProxy's own check of it fails
        """)  # noqa: E501 - a terminal of 200 columns
    text = shown(tables.routes(Routes(AT, None, listed[3:]), 80), 80)
    assert text.startswith("HAProxy does not answer the controller")
    assert "does not have it yet" not in text


def test_revisions() -> None:
    listed = (
        RevisionDocument("9f8e7d6c", "pierhead/web:latest", "sha256:0123456789abcdef", AT - 300, True, False),
        RevisionDocument("1a2b3c4d", "", "", AT - 7200, False, True),
    )
    assert shown(tables.revisions(Revisions("web", AT, listed), 80), 80) == picture("""
        VERSION   AGE    IMAGE                IMAGE ID      NOW
        9f8e7d6c  5 min  pierhead/web:latest  0123456789ab  current
        1a2b3c4d  2 h    -                    -             stable
        """)
    assert "no version of web is known" in shown(tables.revisions(Revisions("web", AT, ()), 80), 80)


def test_figures() -> None:
    durations = [0.00042, 0.00251, 0.0123, 0.9994, 1.31, None]
    assert [seconds(value) for value in durations] == ["0.42 ms", "2.5 ms", "12 ms", "999 ms", "1.3 s", "-"]
    assert [rate(value) for value in (0.0, 12.34, 12345.6, None)] == ["0.0", "12.3", "12,346", "-"]
    assert [age(AT - ago, AT) for ago in (-5, 8, 300, 10_000, 400_000)] == ["0 s", "8 s", "5 min", "2 h", "4 d"]


# --------------------------------------------------------------------------------------------------------------- cells
