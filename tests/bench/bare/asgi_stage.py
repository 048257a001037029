"""The echo as one FastAPI application in the runtime, which answers by itself: what ASGI services cost.

Run as `python -m tests.bench.bare.asgi_stage`.
"""

from __future__ import annotations

from fastapi import FastAPI
from pierhead import serve


async def echo(message: str) -> dict[str, str]:
    """`GET /echo?message=hi` -> `{"response": "Echo: hi"}`."""
    return {"response": f"Echo: {message}"}


async def readyz() -> None:
    """For HAProxy's checks."""


def main() -> None:
    """Serve on PIERHEAD_HOST:PIERHEAD_PORT."""
    app = FastAPI()
    app.add_api_route("/echo", echo)
    app.add_api_route("/readyz", readyz)
    serve(app)


if __name__ == "__main__":
    main()
