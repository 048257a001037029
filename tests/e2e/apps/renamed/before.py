"""A web page that asks a model."""

from pierhead import Service, endpoint, serve


class Model(Service):
    async def score(self, number: int) -> int:
        return 2 * number


class Web(Service, route="/renamed"):
    def __init__(self, model: Model) -> None:
        self.model = model

    @endpoint("GET", "/renamed")
    async def page(self, number: int) -> int:
        return await self.model.score(number)


serve(Web.bind(Model.bind()))
