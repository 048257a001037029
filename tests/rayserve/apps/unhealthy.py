"""A replica that fails its checks is replaced."""

import time

from ray import serve


@serve.deployment(health_check_period_s=0.5, health_check_timeout_s=2)
class Fragile:
    def __init__(self):
        self.broken = False
        self.born = time.time()

    def check_health(self):
        if self.broken:
            raise RuntimeError("broken")

    def break_it(self):
        self.broken = True
        return self.born

    def when(self):
        return self.born


app = Fragile.bind()
REQUESTS = []


def calls(handle):
    first = handle.break_it.remote().result()
    deadline = time.time() + 40
    while time.time() < deadline:
        try:
            if handle.when.remote().result(timeout_s=5) != first:
                break
        except Exception:
            pass
        time.sleep(0.2)
    yield handle.when.remote().result() > first
