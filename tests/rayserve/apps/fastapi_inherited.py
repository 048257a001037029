"""Routes of a base class, and methods that only the subclass has."""

from fastapi import FastAPI
from ray import serve

web = FastAPI()


class Base:
    @web.get("/base")
    def base(self):
        return f"base of {self.name()}"

    def name(self):
        return "Base"


@serve.deployment
@serve.ingress(web)
class Derived(Base):
    def name(self):
        return "Derived"

    @web.get("/own")
    async def own(self):
        return self.name()


app = Derived.bind()
REQUESTS = [{"path": "/base"}, {"path": "/own"}]
