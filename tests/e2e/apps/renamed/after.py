"""A web page that asks a scorer, which was the model."""

from pierhead import Service, endpoint, serve


class Scorer(Service):
    async def score(self, number: int) -> int:
        return 2 * number


class Web(Service, route="/renamed"):
    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    @endpoint("GET", "/renamed")
    async def page(self, number: int) -> int:
        return await self.scorer.score(number)


serve(Web.bind(Scorer.bind()))
