"""Handlers without a parameter for the request."""

from ray import serve


@serve.deployment
class Counter:
    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return self.count


app = Counter.bind()
REQUESTS = [{"path": "/"}, {"path": "/"}, {"path": "/"}]
