"""Decides on card payments: `gate` answers HTTP, `history` counts payments in Redis, `scorer` has the model."""

import os
from typing import Literal

import numpy as np
from fastapi import FastAPI
from pierhead import DeadlineExceeded, Service, Unavailable, batch, options
from pydantic import BaseModel, Field
from redis.asyncio import Redis
from redis.exceptions import RedisError

HOUR_S = 3600


class Payment(BaseModel):
    card: str = Field(min_length=1, max_length=64)
    amount: float = Field(gt=0, le=1_000_000)
    abroad: bool = False


class Seen(BaseModel):
    """A card's payments since the first one of its hour, the present one included."""

    payments: int
    total: float


class Verdict(BaseModel):
    decision: Literal["accept", "review", "refuse"]
    risk: float | None  # None: not known, since the history did not answer


class History(Service):
    def __init__(self) -> None:
        url = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
        self.redis = Redis.from_url(url, socket_timeout=0.2, socket_connect_timeout=0.2)

    async def add(self, card: str, amount: float) -> Seen:
        key = f"card:{card}"
        try:
            async with self.redis.pipeline() as together:
                together.hincrby(key, "payments", 1)
                together.hincrbyfloat(key, "total", amount)
                together.expire(key, HOUR_S, nx=True)
                payments, total, _ = await together.execute()
        except RedisError as error:
            raise Unavailable(f"Redis does not answer: {error}") from error
        return Seen(payments=payments, total=total)

    async def aclose(self) -> None:
        await self.redis.aclose()


class Scorer(Service, max_ongoing_requests=200):
    """A logistic regression, in place of a model of yours."""

    def __init__(self) -> None:
        self.weights = np.array([0.4, 0.001, 1.5])  # of payments, total and abroad
        self.bias = -4.0

    @batch(max_batch_size=64)
    async def risk(self, rows: list[list[float]]) -> list[float]:  # callers: await scorer.risk(row)
        scores = np.array(rows) @ self.weights + self.bias
        return [float(risk) for risk in 1 / (1 + np.exp(-scores))]


web = FastAPI(title="Fraud")


class Gate(Service, route="/", asgi=web):
    def __init__(self, history: History, scorer: Scorer) -> None:  # in a replica: handles
        self.history = history
        self.scorer = scorer

    @web.post("/payments")
    async def decide(self, payment: Payment) -> Verdict:
        try:
            seen = await options(self.history, timeout_s=0.5).add(payment.card, payment.amount)
        except (Unavailable, DeadlineExceeded):
            return Verdict(decision="review", risk=None)  # a person decides while the history is away
        risk = await self.scorer.risk([seen.payments, seen.total, float(payment.abroad)])
        return Verdict(decision="accept" if risk < 0.5 else "review" if risk < 0.9 else "refuse", risk=round(risk, 3))


app = Gate.bind(History.bind(), Scorer.bind())
