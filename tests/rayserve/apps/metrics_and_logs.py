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


app = Measured.bind()
REQUESTS = [{"path": "/"}]
