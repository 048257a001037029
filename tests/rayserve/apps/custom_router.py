"""A request router of the application's own: the first argument names the replica."""

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_internal_replica_context
from ray.serve.request_router import FIFOMixin, LocalityMixin, MultiplexMixin, RequestRouter


class ByNumber(FIFOMixin, LocalityMixin, MultiplexMixin, RequestRouter):
    def initialize_state(self, step=1):
        self.step = step

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        near = self.rank_replicas_via_locality(candidate_replicas)[0]
        few = self.rank_replicas_via_multiplex(near, "no such model")[1]
        order = sorted(self.select_available_replicas(few), key=lambda each: each.replica_id.unique_id)
        number = pending_request.args[0] if pending_request and pending_request.args else 0
        if not isinstance(number, int):
            return [order]
        return [[order[number * self.step % len(order)]]]


@serve.deployment(
    num_replicas=3,
    ray_actor_options={"num_cpus": 0},
    request_router_config=RequestRouterConfig(request_router_class=ByNumber, request_router_kwargs={"step": 2}),
)
class Replica:
    def __init__(self):
        self.id = _get_internal_replica_context().replica_id

    def __call__(self, number):
        return self.id.unique_id


app = Replica.bind()

REQUESTS = [{"path": "/", "method": "HEAD"}]


def calls(handle):
    found = [[handle.remote(number).result() for _ in range(4)] for number in range(3)]
    yield [len(set(ids)) for ids in found]
    yield len({ids[0] for ids in found})
    order = sorted(ids[0] for ids in found)
    yield [order.index(ids[0]) for ids in found]
