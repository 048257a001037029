"""What a plain handler that is a generator answers."""

from ray import serve


@serve.deployment
class Sync:
    def __call__(self, request):
        yield "a"
        yield "b"


app = Sync.bind()
REQUESTS = [{"path": "/"}]
