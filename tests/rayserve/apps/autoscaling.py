"""num_replicas="auto" and autoscaling_config."""

from ray import serve
from ray.serve.config import AutoscalingConfig
from ray.serve.handle import DeploymentHandle


@serve.deployment(num_replicas="auto", autoscaling_config={"min_replicas": 2, "max_replicas": 3})
class Auto:
    def __call__(self):
        return serve.get_replica_context().replica_tag


@serve.deployment(autoscaling_config=AutoscalingConfig(min_replicas=1, max_replicas=2, target_ongoing_requests=4))
class Ingress:
    def __init__(self, auto: DeploymentHandle):
        self.auto = auto

    async def __call__(self):
        tags = {await self.auto.remote() for _ in range(40)}
        return len(tags)


app = Ingress.bind(Auto.bind())
REQUESTS = [{"path": "/"}]
