"""check_health, a destructor, logging."""

import logging

from ray import serve

logger = logging.getLogger("ray.serve")


@serve.deployment(health_check_period_s=1, health_check_timeout_s=2)
class Checked:
    def __init__(self):
        self.checks = 0

    async def check_health(self):
        self.checks += 1

    def __call__(self):
        logger.info("called")
        return "ok"

    def checked(self):
        return self.checks > 0

    def __del__(self):
        pass


app = Checked.bind()
REQUESTS = [{"path": "/"}]


def calls(handle):
    import time

    deadline = time.time() + 15
    while not handle.checked.remote().result() and time.time() < deadline:
        time.sleep(0.1)
    yield handle.checked.remote().result()
