"""What a plain handler that is an async generator answers."""

from ray import serve


@serve.deployment
class Async:
    async def __call__(self, request):
        yield "a"
        yield "b"


app = Async.bind()
REQUESTS = [{"path": "/"}]
