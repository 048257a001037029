"""Metrics of user code, and the logger."""

import logging

from ray import serve
from ray.serve import metrics
from starlette.requests import Request

logger = logging.getLogger("ray.serve")


@serve.deployment(logging_config={"log_level": "WARNING", "enable_access_log": False})
class Measured:
    def __init__(self):
        self.counter = metrics.Counter("my_counter", description="requests", tag_keys=("model",))
        self.counter.set_default_tags({"model": "123"})
        self.gauge = metrics.Gauge("my_gauge", description="size", tag_keys=("model",))
        self.histogram = metrics.Histogram("my_latency", description="ms", boundaries=[1, 10, 100], tag_keys=("model",))

    async def __call__(self, request: Request):
        self.counter.inc()
        self.counter.inc(2, tags={"model": "other"})
        self.gauge.set(5, tags={"model": "a"})
        self.histogram.observe(3.5, tags={"model": "a"})
        logger.warning("measured")
        try:
            self.counter.inc(1, tags={"unknown": "x"})
        except ValueError:
            return "ValueError"

    def wrong(self):
        self.counter.inc(1)
        yield "no name", lambda: metrics.Counter("")
        yield "inc 0", lambda: self.counter.inc(0)
        yield "inc text", lambda: self.counter.inc("1")
        yield "number as a tag", lambda: self.counter.inc(1, tags={"model": 5})
        yield "other tags", lambda: metrics.Counter("my_counter", tag_keys=("route",)).inc(1, tags={"route": "/"})
        yield "the first tags", lambda: self.counter.inc(1)
        yield "no tag", lambda: self.gauge.set(1)
        yield "text", lambda: self.gauge.set("x", tags={"model": "a"})
        yield "unknown default", lambda: self.gauge.set_default_tags({"other": "x"})
        yield "no boundaries", lambda: metrics.Histogram("no_boundaries")
        yield "unsorted", lambda: metrics.Histogram("unsorted", boundaries=[3, 1]).observe(2)
        yield "boundary 0", lambda: metrics.Histogram("boundary_0", boundaries=[0, 1])

    def errors(self):
        found = []
        for name, make in self.wrong():
            try:
                make()
                found.append([name, None])
            except Exception as error:
                found.append([name, type(error).__name__])
        return [*found, repr(serve.get_replica_context().replica_id.deployment_id)]


app = Measured.bind()
REQUESTS = [{"path": "/"}]


def calls(handle):
    yield handle.errors.remote().result()
