"""The application in this process, without Docker and without Redis."""

from app import History, Seen, app
from pierhead import Unavailable, override_handle
from pierhead.testing import local


class Remembered(History):
    """The history of one card, in memory."""

    def __init__(self) -> None:
        self.amounts: list[float] = []

    async def add(self, card: str, amount: float) -> Seen:
        self.amounts.append(amount)
        return Seen(payments=len(self.amounts), total=sum(self.amounts))

    async def aclose(self) -> None:
        self.amounts.clear()


class Away(Remembered):
    async def add(self, card: str, amount: float) -> Seen:
        raise Unavailable("Redis does not answer")


async def decisions(history: History, *amounts: float) -> list[str]:
    found = []
    async with local(app) as running:
        with override_handle("history", history):
            for amount in amounts:
                payment = {"card": "4929", "amount": amount, "abroad": True}
                async with running.http.post("/payments", json=payment) as answer:
                    found.append((await answer.json())["decision"])
    return found


async def test_many_large_payments_are_refused() -> None:
    assert await decisions(Remembered(), 20, 2000, 3000) == ["accept", "review", "refuse"]


async def test_a_person_decides_while_the_history_is_away() -> None:
    assert await decisions(Away(), 20) == ["review"]


async def test_a_payment_without_an_amount_is_a_422() -> None:
    async with local(app) as running, running.http.post("/payments", json={"card": "4929"}) as answer:
        assert answer.status == 422
