"""Options that are set later, names, and handles by name."""

from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment(name="first", num_replicas=1, max_ongoing_requests=7, ray_actor_options={"num_cpus": 0.1})
class Model:
    def __init__(self, value=0):
        self.value = value

    def __call__(self):
        return self.value


other = Model.options(name="second", num_replicas=2)


@serve.deployment
class Ingress:
    def __init__(self, one: DeploymentHandle, two: DeploymentHandle):
        self.handles = [one, two]

    async def __call__(self):
        by_name = serve.get_deployment_handle("second")
        return [await handle.remote() for handle in (*self.handles, by_name)] + [
            handle.deployment_name for handle in self.handles
        ]


app = Ingress.bind(Model.bind(1), other.bind(value=2))
REQUESTS = [{"path": "/"}]


def calls(handle):
    yield [Model.name, Model.num_replicas, Model.max_ongoing_requests, other.name, other.num_replicas]
    yield [str(Model), repr(handle), handle.deployment_name, handle.app_name]
    for wrong in (
        lambda: Model(),
        lambda: Model.options(num_replicas=0),
        lambda: Model.options(max_ongoing_requests=0),
        lambda: Model.options(nothing=1),
        lambda: serve.deployment(num_replicas=2, autoscaling_config={"max_replicas": 3}),
        lambda: Model.options(name="a#b"),
    ):
        try:
            wrong()
            yield "fine"
        except (RuntimeError, ValueError, TypeError) as error:
            yield "refused"
