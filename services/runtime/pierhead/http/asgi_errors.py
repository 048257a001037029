"""Makes a Starlette application answer the runtime's errors also without an edge, as in a test of the application.

Behind the edge the errors are passed on to it, which knows the request's id and the service's settings.
"""

from __future__ import annotations

from typing import Any, Final

from pierhead.edge.edge import is_internal
from pierhead.errors import PierheadError
from pierhead.http.answers import error_answer
from pierhead.request import new_request_id
from pierhead.settings import Settings

EDGE_KEY: Final = "pierhead.edge"
"""In the scope of a request: it is behind the edge."""


def answer_errors(app: Any) -> None:
    """Add the middleware to a FastAPI or Starlette application that has not started; leave others alone."""
    middlewares = getattr(app, "user_middleware", None)
    if not isinstance(middlewares, list) or app.middleware_stack is not None:
        return
    if not any(each.cls is ErrorAnswers for each in middlewares):
        app.add_middleware(ErrorAnswers)


class ErrorAnswers:
    """A middleware: a PierheadError that the application does not handle becomes its answer.

    No exception handler of Starlette's, which would fail where a stream raises before its first item.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http" or EDGE_KEY in scope:
            await self._app(scope, receive, send)
            return
        held: list[Any] = []
        begun = False

        async def sent(message: Any) -> None:
            """Pass on, the head of a response with its first piece."""
            nonlocal begun
            held.append(message)
            if message["type"] != "http.response.start":
                begun = True
                for each in held:
                    await send(each)
                held.clear()

        try:
            await self._app(scope, receive, sent)
            for each in held:
                await send(each)
        except PierheadError as error:
            if begun or is_internal(error):
                raise
            answer = error_answer(error, new_request_id(), Settings())
            for message in answer.messages():
                await send(message)
