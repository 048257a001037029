"""`make bench-llm`: `python -m tests.bench.llm ROUNDS=3 ...`. cases.py has the words, tests/bench/README.md the method.

Environment: PIERHEAD_BENCH_LLM_PEER_PYTHON, the interpreter of the environment with Ray Serve LLM
(prepare.py makes it); PIERHEAD_BENCH_PYTHON, the one that runs our services, by default this one.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from tests.bench import machine
from tests.bench.__main__ import haproxy_program
from tests.bench.llm import cases, plots, systems
from tests.bench.llm.cases import Options, OptionsError, Users, read
from tests.bench.llm.figures import Samples, error_rate, first_ms, lines, rate, tables
from tests.bench.llm.measure import Sample, measure
from tests.bench.processes import BenchError
from tests.bench.record import Page, directory_of, run_facts
from tests.bench.systems.running import Running, Workplace

HOW = """\
- All processes run on this host and share its cores: the users (one process), HAProxy, the gateway, replicas with the
  mock engine. The controller's Discovery lists the replicas for the gateway. Access log, metrics, request ids,
  admission and deadlines are on.
- The floor is one replica asked over a lane by the process of the users itself: what is beyond it is added by gateway
  and HTTP. Its time to the first token has the engine's 50 ms in it.
- The engine works in steps, as with continuous batching: one token for each request that runs, 50 times a second. As
  fast as it goes: an engine that makes tokens faster than anybody passes them on; what arrives while a part of the way
  is busy is passed on together, on both sides.
- Behind HAProxy gateway and replica share memory, as in the files that `pierhead llm build` writes, so the replica
  writes the events of a stream to the connections of HAProxy. Without it every event goes through the gateway.
- The same packages with nothing of ours: HAProxy, one aiohttp handler, one grpc.aio stream on which all tokens of a
  step travel as one message, an engine that repeats one token (tests/bench/bare/llm_*.py). No client is waited for,
  nothing is checked, counted, logged, limited or cancelled: about the least that this chain can cost in Python.
- Ray Serve LLM runs with its throughput flags, behind the same HAProxy program, with direct streaming
  (`RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1`, `stream_batching_interval_ms: 0`): HAProxy asks its router for a replica,
  and the LLM server answers through vLLM's own HTTP application: no gateway is on the way of tokens. The engine is the
  same mock one, whose events pass through as they are. CPU is that of all processes, of ours as well.
- A round measures one after the other, the next the other way round; medians over rounds, ratios and differences within
  a round, both with the lowest and the highest. What is not measured does not run, but for replicas without requests.
- Tokens count when they arrive; requests in flight at the end of a measurement are given up. An error is anything but
  status 200 and all tokens.
- Hit rates and loads are the engines' own, asked twice a second.
- A real vLLM runs twice on the CPU, with the same arguments, threads bound as vLLM binds them (two cores: the model has
  one): in our LLM server, asked through HAProxy and gateway, and as `vllm serve`, asked directly. Both are loaded, one
  generates. Every user gets one answer of exactly 128 tokens (ignore_eos; the usage says so), all begin together, and
  the clock stops at the last one's end. One way after the other, then the other way round; both get the same prompts.
  HAProxy, gateway and LLM server have the cores that the engine has, which with a GPU they would not."""


def main() -> int:
    """Run; 0 when everything was measured, 1 when something was not, 2 for wrong words, 130 after Ctrl-C."""
    try:
        options = read(sys.argv[1:])
    except OptionsError as error:
        print(f"bench-llm: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    directory = Path(tempfile.mkdtemp(prefix="ph-", dir="/tmp"))  # not TMPDIR: the paths of sockets are short
    try:
        return Bench(options, _workplace(options, directory)).run()
    except KeyboardInterrupt:
        print("\nbench-llm: interrupted; everything that it had started is stopped.", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Once: what is stopped in order must not be interrupted again."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _workplace(options: Options, directory: Path) -> Workplace:
    peer = os.environ.get("PIERHEAD_BENCH_LLM_PEER_PYTHON", "") if options.peer else ""
    return Workplace(
        directory=directory,
        python=Path(os.environ.get("PIERHEAD_BENCH_PYTHON", sys.executable)),
        peer_python=Path(peer) if peer else None,
        haproxy=haproxy_program(peer),
        device="cpu",
        seen_from_elsewhere="",
        torch_threads=1,
    )


class Bench:
    """One run."""

    def __init__(self, options: Options, work: Workplace) -> None:
        self._options, self._work = options, work
        self._samples: list[Sample] = []
        self._failures: list[str] = []
        words = [word for word in sys.argv[1:] if not word.endswith("=") and not word.startswith("OUT=")]
        self._run = run_facts(" ".join(["make bench-llm", *words]), **machine.versions(work))
        self._out = options.out or directory_of(self._run, "llm")
        self._began = time.monotonic()

    def run(self) -> int:
        """Every round of every part, then the page."""
        parts: dict[str, Callable[[int], None]] = {
            "overhead": self._overhead, "linear": self._linear, "prefix": self._prefix, "vllm": self._vllm,
        }  # fmt: skip
        for number in range(1, self._options.rounds + 1):
            for part in self._options.parts:
                if part == "overhead" or number <= (1 if part == "vllm" else self._long_rounds):
                    self._say(f"[round {number}/{self._options.rounds}] {part}")
                    parts[part](number)
                    self._write()
        for line in lines(Samples(self._samples), self._cores):
            self._say(f"{line.what}: {line.wanted}; found {line.found}")
        self._say(f"{self._out / 'README.md'}")
        return 1 if self._failures else 0

    @property
    def _long_rounds(self) -> int:
        """Rounds of what takes long: the peer needs a minute to start."""
        return max(1, self._options.rounds - 1)

    @property
    def _cores(self) -> int:
        return int(self._run["machine"]["cores"])

    # ---- parts

    def _overhead(self, number: int) -> None:
        users = replace(cases.STREAMS, count=16, tokens=32, warm_s=1.0) if self._options.quick else cases.STREAMS
        subjects = ["floor", "gateway", *(["haproxy", "relayed", "bare"] if self._work.haproxy else [])]
        if self._work.peer_python is not None and number <= self._long_rounds:
            subjects.append("peer")
        for subject in cases.order(subjects, number):
            for variant in ("", cases.FREE) if subject in cases.FREE_SUBJECTS else ("",):

                def visit(subject: str = subject, variant: str = variant) -> None:
                    engine = cases.FREE_ENGINE if variant else cases.OVERHEAD_ENGINE
                    start = systems.start_of(subject)
                    with start(self._work, engine) as running:
                        self._measure((number, "overhead", subject, variant), running, users)

                self._try(f"overhead, {subject} {variant}".rstrip(), visit)

    def _linear(self, number: int) -> None:
        counts = (1, 2) if self._options.quick else cases.REPLICAS

        def visit() -> None:
            with systems.site(self._work) as here:
                replicas = here.replicas(max(counts), cases.LINEAR_ENGINE)
                for count in cases.order([str(count) for count in counts], number):
                    with systems.site(self._work) as edge:
                        edge.hosts = here.hosts
                        address, _, kept = edge.gateway(replicas.addresses[: int(count)], "power_of_two")
                        running = Running(f"http://{address}", [*kept, *replicas.kept[: int(count)]])
                        users = cases.linear_users(int(count), quick=self._options.quick)
                        self._measure((number, "linear", count, ""), running, users)

        self._try("linear", visit)

    def _prefix(self, number: int) -> None:
        for case in cases.PREFIXES[:1] if self._options.quick else cases.PREFIXES:
            self._try(f"prefix, {case.workload}", lambda case=case: self._prefixes(number, case))  # type: ignore[misc]

    def _prefixes(self, number: int, case: cases.Prefixes) -> None:
        with systems.site(self._work) as here:
            replicas = here.replicas(2 if self._options.quick else cases.PREFIX_REPLICAS, cases.prefix_engine(case))
            users = replace(cases.PREFIX_USERS, workload=case.workload, count=case.users)
            if self._options.quick:
                users = replace(users, count=16, warm_s=1.0)
            for policy in cases.order(cases.POLICIES, number):
                replicas.reset_caches()
                with systems.site(self._work) as edge:
                    edge.hosts = here.hosts
                    address, _, kept = edge.gateway(replicas.addresses, policy)
                    running = Running(f"http://{address}", [*kept, *replicas.kept])
                    self._measure((number, "prefix", case.workload, policy), running, users, replicas.pages)

    def _vllm(self, number: int) -> None:
        """All of its rounds at once: it takes minutes to start."""
        warm, quick = cases.vllm_users(max(cases.VLLM_STREAMS), quick=True), self._options.quick
        limit_s = 60 + 10 * self._options.seconds

        def visit() -> None:
            with systems.both_vllms(self._work) as ways:
                for running in ways.values():
                    measure((0, "vllm", "", "warm"), running, warm, limit_s)
                for pair in range(number, number + self._options.rounds * cases.VLLM_PAIRS):
                    for streams in cases.VLLM_STREAMS:
                        users = cases.vllm_users(streams, quick=quick)
                        for way in cases.order(list(ways), pair):
                            self._measure((pair, "vllm", str(streams), way), ways[way], users, seconds=limit_s)

        self._try("vllm", visit)

    # ---- what they share

    def _measure(
        self, where: tuple[int, str, str, str], running: Running, users: Users, pages: Sequence[str] = (),
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        sample = measure(where, running, users, seconds or self._options.seconds, pages)
        self._samples.append(sample)
        hits = "" if sample.hit_rate is None else f"   hit rate {sample.hit_rate:.1%}"
        self._say(
            f"    {' '.join(where[2:]):32} {rate(sample):8.0f} tokens/s   TTFT p50 {first_ms(50)(sample):7.1f} ms   "
            f"p99 {first_ms(99)(sample):7.1f} ms{hits}   errors {error_rate(sample):.2%}"
        )

    def _try(self, what: str, visit: Callable[[], None]) -> None:
        try:
            visit()
        except BenchError as error:
            self._failures.append(f"{what}: {error}")
            self._say(f"    FAILED: {what}: {error}")

    def _write(self) -> None:
        samples = Samples(self._samples)
        self._out.mkdir(parents=True, exist_ok=True)
        how = HOW
        if samples.errors():
            how += "\n- Errors: " + "; ".join(f"{count} {kind}" for kind, count in samples.errors().items()) + "."
        if self._failures:
            how += "\n- Not measured: " + "; ".join(each.splitlines()[0] for each in self._failures) + "."
        Page(
            "LLM serving: overhead, linearity, routing by prefix, a real vLLM",
            self._run,
            lines=lines(samples, self._cores),
            tables=tables(samples, self._cores),
            pictures=plots.draw_all(samples, self._out),
            how=how,
            figures={"samples": [sample.as_json() for sample in self._samples], "failures": self._failures},
        ).write(self._out)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.0f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
