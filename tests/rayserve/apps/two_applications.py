"""Several applications at a time: handles, prefixes, status, deletion."""

from ray import serve
from starlette.requests import Request


@serve.deployment
def root(request: Request):
    return "root"


@serve.deployment
class Second:
    async def __call__(self, request: Request = None):
        return [serve.get_replica_context().app_name, request.url.path if request is not None else None]

    async def ask(self, name):
        return await serve.get_app_handle(name).remote(None)


app = root.bind()
REQUESTS = [{"path": "/"}]


def calls(handle):
    second = serve.run(Second.bind(), name="second", route_prefix="/second")
    yield second.remote().result()
    yield sorted(serve.status().applications)
    status = serve.status().applications["second"]
    yield [status.status == "RUNNING", sorted(status.deployments), status.deployments["Second"].status == "HEALTHY"]
    yield serve.get_app_handle("second").remote().result()
    yield serve.get_deployment_handle("Second", app_name="second").remote().result()
    for wrong in (
        lambda: serve.get_app_handle("nothing"),
        lambda: serve.get_deployment_handle("Second"),
        lambda: serve.run(Second.bind(), name="", route_prefix="/x"),
        lambda: serve.run(Second.bind(), name="third", route_prefix="x"),
        lambda: serve.run(Second.bind(), name="third", route_prefix="/second"),
        lambda: serve.run(Second, name="third", route_prefix="/third"),
    ):
        try:
            wrong()
            yield "fine"
        except Exception as error:
            yield type(error).__name__
    renamed = serve.run(Second.options(name="Renamed").bind(), name="second", route_prefix="/other")
    yield [renamed.remote().result(), sorted(serve.status().applications["second"].deployments)]
    serve.delete("second")
    yield sorted(serve.status().applications)
    try:
        renamed.remote().result(timeout_s=30)
    except Exception as error:
        yield type(error).__name__
