"""A constructor that raises: `serve.run` does."""

from ray import serve


@serve.deployment
class Fine:
    def __call__(self):
        return "fine"


@serve.deployment(max_constructor_retry_count=1)
class Broken:
    def __init__(self):
        raise ValueError("no weights")


@serve.deployment(user_config={"a": 1})
class NoReconfigure:
    pass


app = Fine.bind()
REQUESTS = [{"path": "/"}]


def calls(handle):
    try:
        serve.run(Broken.bind(), name="broken", route_prefix="/broken")
        yield "fine"
    except RuntimeError:
        yield "RuntimeError"
    serve.delete("broken")
    yield handle.remote().result()
