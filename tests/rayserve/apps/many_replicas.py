"""Several replicas, each of which answers a part."""

from ray import serve


@serve.deployment(num_replicas=3)
class Replica:
    def __init__(self):
        self.tag = serve.get_replica_context().replica_tag
        self.value = 0

    def who(self):
        return self.tag

    def set(self, value):
        self.value = value
        return serve.get_replica_context().rank.rank

    def get(self):
        return self.value


app = Replica.bind()
REQUESTS = []


def calls(handle):
    tags = {handle.who.remote().result() for _ in range(60)}
    yield len(tags)
    yield sorted(handle.broadcast("set", 5).results())
    yield handle.broadcast("get").results()
