"""How a run was made, in the words of its report. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.answers import USERS
from tests.bench.results import Results
from tests.bench.statistics import Samples, Spread

QUIET_CORES = 0.05
"""The report names a use by the rest of the machine during a measurement that is above this."""

PROCESSES = """\
- Both sides are processes of this host behind the same HAProxy program, the one that the peer brings; ours with the
  configuration that our controller writes, without controller and Prometheus."""
CONTAINERS = """\
- Ours is the stack as `make up` starts it: containers, controller, Prometheus, default logging, HAProxy asked at its
  published port. The same chain with nothing of ours runs in containers of the same images. The peer and the bare
  processes of the ablation are processes of this host, behind the HAProxy program that the peer brings. Another network
  namespace is joined to the host by a virtual cable; its requests come as those of another machine."""
PEER = """\
- Ray Serve has every throughput flag on: `RAY_SERVE_ENABLE_HA_PROXY`, `RAY_SERVE_THROUGHPUT_OPTIMIZED`,
  `RAY_SERVE_HAPROXY_TCP_NODELAY`. Its dashboard is off. Ours has admission, deadlines, metrics, request ids and its
  default access lines."""
WATCHED = "Both watch for clients that leave, to cancel what is done for them."
UNWATCHED = """\
Every request carries `x-request-disconnect-disabled: ?1`, as in the makers' benchmark: the peer then does not watch for
  clients that leave. Ours does."""
ANSWERS = """\
- Answers are compared before each measurement: the echo's text, every event of a stream, the scores of {users} users.
  Model, weights and candidates are the same; the batch's window is each side's better one of 2 and 5 ms (the peer's 5,
  ours 2); PyTorch has {threads} thread(s) on each side."""
ROUNDS = """\
- A round measures one side after the other, the next round the other way round; what is not measured does not run.
  Closed loops are wrk's, one thread (for both sides it fills in for answers that took over twice the mean interval);
  open loops and first events: tests/bench/load/generator.py. tests/bench/README.md has the details."""


def paragraphs(results: Results) -> Iterator[str]:
    """One list item each."""
    run = results.run
    yield PROCESSES if run["mode"] == "processes" else CONTAINERS
    yield f"{PEER} {WATCHED if run['watch'] else UNWATCHED}"
    yield ANSWERS.format(users=len(USERS), threads=run["torch_threads"])
    yield ROUNDS
    noise = noise_of(Samples(results.samples))
    if noise:
        yield f"- {noise}"
    yield f"- Versions: {'; '.join(f'{name} {version}' for name, version in run['versions'].items())}."
    if run["uncommitted"]:
        yield "- The tree had uncommitted changes."


def noise_of(samples: Samples) -> str:
    """How quiet the machine was."""
    rest = Spread.of(sample.rest_cores for sample in samples.all)
    taken = Spread.of(sample.stolen_cores for sample in samples.all)
    if rest is None or taken is None:
        return ""
    loud = sum(sample.rest_cores > QUIET_CORES for sample in samples.all)
    return (
        f"The rest of the machine used {rest.median:.2f} cores (most in one measurement: {rest.high:.2f}); "
        f"the hypervisor took {taken.median:.2f} (most: {taken.high:.2f})."
        + (f" In {loud} of {len(samples.all)} measurements it was more than {QUIET_CORES:g}." if loud else "")
    )
