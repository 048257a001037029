"""Sync methods run in threads, several at a time."""

import threading
import time

from ray import serve


@serve.deployment(max_ongoing_requests=4)
class Threads:
    def __init__(self):
        self.barrier = threading.Barrier(3)

    def meet(self):
        self.barrier.wait(timeout=20)
        return threading.current_thread() is not threading.main_thread()

    def slow(self):
        time.sleep(0.05)
        return serve.get_replica_context().deployment

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def cls(cls, x):
        return [cls.__name__, x]


app = Threads.bind()
REQUESTS = []


def calls(handle):
    yield [response.result() for response in [handle.meet.remote() for _ in range(3)]]
    yield handle.slow.remote().result()
    yield handle.static.remote(1).result()
    yield handle.cls.remote(2).result()
