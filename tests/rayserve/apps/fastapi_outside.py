"""A FastAPI application whose routes stand outside of the class."""

from fastapi import Depends, FastAPI
from ray import serve

web = FastAPI()


def twice(x: int) -> int:
    return 2 * x


@web.get("/double")
async def double(value: int = Depends(twice)):
    return value


@web.get("/sync")
def plain() -> str:
    return "sync"


@serve.deployment
@serve.ingress(web)
class Ingress:
    pass


app = Ingress.bind()
REQUESTS = [{"path": "/double?x=21"}, {"path": "/sync"}, {"path": "/double"}]
