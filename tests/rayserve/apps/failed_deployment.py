"""Deployments that cannot start: what the status says, the application's other deployments, another try."""

import threading

from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment(max_constructor_retry_count=1)
class Model:
    def __init__(self, is_well):
        if not is_well:
            raise ValueError("no weights")

    def __call__(self):
        return "answer"


@serve.deployment
class Front:
    def __init__(self, model: DeploymentHandle):
        self.model = model

    async def own(self):
        return "front"


app = Front.bind(Model.bind(True))
REQUESTS = []


def shown(name):
    application = serve.status().applications[name]
    model = application.deployments["Model"]
    reported = [application.status, application.message != "", sorted(application.deployments)]
    return [*reported, model.status, model.status_trigger, "no weights" in model.message]


def calls(handle):
    try:
        serve.run(Front.bind(Model.bind(False)), name="ill", route_prefix="/ill")
    except RuntimeError as error:
        yield str(error).startswith("Deploying application ill failed: Failed to update the deployments ['Model']")
    yield shown("ill")
    yield serve.get_app_handle("ill").own.remote().result()
    yield serve.run(Model.bind(True), name="ill", route_prefix="/ill").remote().result()
    yield shown("ill")
    try:
        serve.run(Front.bind(threading.Lock()), name="ill", route_prefix="/ill")
    except TypeError as error:
        yield ["pickle" in str(error), serve.get_app_handle("ill").remote().result()]
    serve.delete("ill")
    yield sorted(serve.status().applications)
