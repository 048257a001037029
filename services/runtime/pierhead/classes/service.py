"""`Service`, the base of services written as classes; `bind` describes an application without starting it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, ParamSpec, TypeVar, cast

from pierhead.classes.contract import Contract
from pierhead.classes.endpoints import HttpEndpoint, endpoints_of
from pierhead.classes.methods import served_methods
from pierhead.classes.routes import adopt_routes
from pierhead.http.asgi_errors import answer_errors
from pierhead.serve_block import XServe

if TYPE_CHECKING:
    from typing import Unpack

    from google.protobuf.descriptor_pool import DescriptorPool

    from pierhead.edge.edge import Reports
    from pierhead.edge.methods import ServedMethod
    from pierhead.http.asgi_edge import AsgiApp

P = ParamSpec("P")
T = TypeVar("T")

_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_")


class Service:
    """A service: a class whose public methods other services call, with a contract made of their type hints.

        class Scorer(Service, replicas=2):
            def __init__(self, model: str = "small") -> None: ...   # runs in the replica; arguments from bind()

            async def score(self, user: int) -> float: ...

            async def explain(self, user: int) -> AsyncIterator[str]: ...

        class Shop(Service, route="/shop", asgi=app):
            def __init__(self, scorer: Scorer) -> None:              # in the replica: a handle with the same methods
                self.scorer = scorer

        shop = Shop.bind(Scorer.bind(model="large"))

    - keywords of the class: those of an `x-serve` block; the compose file's override them.
    - asgi: an ASGI application that the service serves; methods that are routes of a FastAPI application are called
      with the service as `self`, and are no part of the contract. Without a framework: `endpoint`.
    A `def` method runs in a thread of the replica; callers write `await call(self.scorer.rank, x)`. A method whose name
    begins with an underscore is private. `check_health`, `reconfigure`, `aclose` and `close` are as for servicers, and
    `sleep` and `wake` of a class that has both.
    Raises TypeError at the class's definition: for a type that cannot travel, with the path to it, and for an unknown
    keyword.
    """

    __contract__: ClassVar[Contract]
    __x_serve__: ClassVar[Mapping[str, Any]] = {}
    __environment__: ClassVar[Mapping[str, str]] = {}
    """Variables that the compose file sets for the service; `${NAME:?...}` is a secret of the stack's own."""
    __reports__: Reports | None = None
    """What this replica tells callers' policies, where it shares its process with others; None = what the process
    tells.
    """
    __asgi__: ClassVar[AsgiApp | None] = None
    __routes__: ClassVar[frozenset[Any]] = frozenset()
    """The methods that are routes of the ASGI application."""
    __endpoints__: ClassVar[Mapping[str, Sequence[HttpEndpoint]]] = {}
    """By the method's name, the HTTP requests that it answers."""

    def __init_subclass__(cls, *, asgi: AsgiApp | None = None, **x_serve: Unpack[XServe]) -> None:
        super().__init_subclass__()
        for key in [each for each in x_serve if each not in XServe.__annotations__]:
            import difflib  # memory that a replica, whose class has none, does without

            close = difflib.get_close_matches(key, XServe.__annotations__, 1)
            hint = f'; did you mean "{close[0]}"?' if close else ""
            raise TypeError(f"class {cls.__name__}: {key} is no key of x-serve{hint}")
        cls.__x_serve__ = x_serve
        if asgi is not None:
            cls.__asgi__ = staticmethod(asgi)
            cls.__routes__ = adopt_routes(asgi, cls)
            answer_errors(asgi)
        cls.__endpoints__ = endpoints_of(cls)
        if cls.__endpoints__ and cls.__asgi__ is not None:
            raise TypeError(
                f"class {cls.__name__}: expected asgi= or methods with @endpoint, found both; make the methods routes "
                "of the application"
            )
        answering = {getattr(cls, name) for name in cls.__endpoints__}
        cls.__contract__ = Contract(cls, Service, cls.__routes__ | answering)

    @classmethod
    def bind(cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Describe this service with its constructor's arguments, some of which may be other bound services.

        Nothing is started: what is returned stands for the service where another one is bound, and in `serve`.
        Raises TypeError for arguments that the constructor does not take.
        """
        return cast("T", Bound(cast("type[Service]", cls), args, kwargs))

    def __served__(self) -> list[ServedMethod]:
        """See `pierhead.edge.methods.OwnContract`."""
        return served_methods(self, self.__contract__)

    def __pool__(self) -> DescriptorPool:
        """See `pierhead.edge.methods.OwnContract`."""
        return self.__contract__.pool


class Bound:
    """A service with its constructor's arguments."""

    def __init__(self, cls: type[Service], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            inspect.signature(cls).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}.bind(): {error}") from None
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.name = name_of(cls)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self.cls.__name__}.bind() describes a service and has no {name!r}: the service itself is in a replica"
        )

    def make(self, handle: Callable[[Bound], Any]) -> Service:
        """Call the constructor, with `handle(...)` in the place of each bound service."""
        args = [handle(each) if isinstance(each, Bound) else each for each in self.args]
        kwargs = {name: handle(each) if isinstance(each, Bound) else each for name, each in self.kwargs.items()}
        return self.cls(*args, **kwargs)

    def uses(self) -> list[Bound]:
        """The services that its constructor gets handles to."""
        return [each for each in (*self.args, *self.kwargs.values()) if isinstance(each, Bound)]

    def graph(self) -> dict[str, Bound]:
        """This service and those that it uses, by name, callers before callees.

        Raises ValueError for two of one name, and for services that use each other in a circle.
        """
        found: dict[str, Bound] = {}
        self._add_to(found, [])
        return dict(reversed(found.items()))

    def _add_to(self, found: dict[str, Bound], path: list[Bound]) -> None:
        """Add it behind all that it uses; `path`: the services that lead here."""
        if self in path:
            circle = [*path[path.index(self) :], self]
            raise ValueError(f"services use each other in a circle: {' -> '.join(each.name for each in circle)}")
        for each in self.uses():
            if found.get(each.name) is not each:
                each._add_to(found, [*path, self])
        if found.setdefault(self.name, self) is not self:
            raise ValueError(
                f"two services are called {self.name}: bind {self.cls.__name__} once and pass that on, or give a "
                f"subclass of another name its own arguments"
            )


def serves_http(cls: type[Service]) -> bool:
    """Whether it has an ASGI application, or methods with `@endpoint`."""
    return cls.__asgi__ is not None or bool(cls.__endpoints__)


def name_of(cls: type) -> str:
    """The service's name in the compose file: `ImageScorer` -> `image-scorer`."""
    return "-".join(word for word in _WORDS.split(cls.__name__) if word).lower()
