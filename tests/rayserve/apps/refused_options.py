"""Values that `@serve.deployment` refuses, and numbers that are written as text."""

from ray import serve
from ray.serve.config import AutoscalingConfig


@serve.deployment(ray_actor_options={"num_gpus": 0})
class Model:
    def __call__(self):
        return "answer"


app = Model.bind()
REQUESTS = []

WRONG = [
    {"num_replicas": -1},
    {"max_ongoing_requests": 0},
    {"max_queued_requests": 0},
    {"max_constructor_retry_count": 0},
    {"max_replicas_per_node": 0},
    {"health_check_period_s": 0},
    {"health_check_timeout_s": 0},
    {"graceful_shutdown_timeout_s": -1},
    {"ray_actor_options": {"num_disks": 1}},
    {"ray_actor_options": 3},
    {"logging_config": {"log_level": "LOUD"}},
    {"logging_config": {"encoding": "XML"}},
    {"autoscaling_config": 3},
    {"autoscaling_config": {"target_ongoing_requests": 0}},
    {"autoscaling_config": {"upscale_delay_s": -1}},
    {"autoscaling_config": {"upscaling_factor": 0}},
]


async def two_ids(model, first, second):
    pass


def kind(make):
    try:
        return type(make()).__name__
    except (ValueError, TypeError) as error:
        return "ValueError" if isinstance(error, ValueError) else "TypeError"


def calls(handle):
    for options in WRONG:
        yield [
            options,
            kind(lambda: serve.deployment(**options)(Model.func_or_class)),
            kind(lambda: Model.options(**options)),
        ]
    yield kind(lambda: serve.multiplexed(two_ids))
    yield kind(lambda: serve.deployment(3))
    yield [Model.ray_actor_options, AutoscalingConfig().target_ongoing_requests]
    yield [Model.options(num_replicas="3").num_replicas, Model.options(max_ongoing_requests=7.0).max_ongoing_requests]
    yield [AutoscalingConfig(max_replicas="4").max_replicas, AutoscalingConfig(upscale_delay_s="0.5").upscale_delay_s]
