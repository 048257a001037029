"""What @serve.batch takes, and what it refuses."""

from ray import serve


@serve.deployment
def fine():
    return "fine"


app = fine.bind()
REQUESTS = []


def calls(handle):
    async def many(items):
        return items

    def plain(items):
        return items

    for options in (
        {"max_batch_size": 0},
        {"max_batch_size": 1.5},
        {"max_batch_size": 2.0},
        {"batch_wait_timeout_s": -1},
        {"batch_wait_timeout_s": "a"},
        {"max_concurrent_batches": 0},
        {"batch_size_fn": 3},
        {"max_batch_size": "a"},
    ):
        try:
            serve.batch(**options)(many)
            yield "fine"
        except (TypeError, ValueError) as error:
            yield type(error).__name__
    try:
        serve.batch(plain)
        yield "fine"
    except TypeError as error:
        yield type(error).__name__
    yield serve.batch(many).__name__
