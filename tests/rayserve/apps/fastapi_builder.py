"""A function that builds the application, in which a sub-deployment is used."""

from ray import serve


@serve.deployment
class Sub:
    def __call__(self, x: int):
        return x + 1


def build():
    from fastapi import Depends, FastAPI

    web = FastAPI()

    def handle():
        return serve.get_deployment_handle("Sub")

    @web.get("/add")
    async def add(x: int, sub=Depends(handle)):
        return await sub.remote(x)

    return web


Ingress = serve.deployment(serve.ingress(build)())
app = Ingress.bind(Sub.bind())
REQUESTS = [{"path": "/add?x=4"}, {"path": "/add"}]
