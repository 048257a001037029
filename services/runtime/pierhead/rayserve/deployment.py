"""`@serve.deployment`, `bind` and `@serve.ingress`: an application described, nothing started."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from pierhead.rayserve.exceptions import RayServeException
from pierhead.rayserve.options import DEFAULT, DeploymentOptions
from pierhead.rayserve.pickles import dumps, loads

ASGI: Final = "__rayserve_asgi__"
"""The attribute of a class that `ingress` was applied to: its ASGI application, a function that makes one, or None."""

END_METHOD: Final = "__rayserve_end__"
"""A method that is called at the replica's end in the place of `__del__`, which Python itself calls as well."""

COMPOSE: Final = "__rayserve_compose__"
"""A function of an application's first class, from its BuiltDeployments by name, what names are to begin with, and the
image that has the user's classes, to the ComposeParts of services that take their place; None = none do. See
`llm/compose.py`.
"""

X_SERVE: Final = "__rayserve_x_serve__"
"""Keys of x-serve that a class has where its options say nothing."""

BUILD_ASGI: Final = "__serve_build_asgi_app__"
"""The method that makes the application of a class, after its constructor."""


def _option(name: str, words: str) -> Any:
    return property(lambda self: getattr(self._options, name), doc=words)


class Deployment:
    """A class or function with its options: made by `@serve.deployment`."""

    func_or_class: Callable[..., Any]
    init_args: tuple[Any, ...]
    init_kwargs: Mapping[str, Any]

    def __init__(
        self,
        func_or_class: Callable[..., Any],
        name: str,
        options: DeploymentOptions,
        init_args: tuple[Any, ...] = (),
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError("name must be a string.")
        if "#" in name:
            raise ValueError(f"Deployment names must not contain the '#' character. Current name: {name}.")
        if not (inspect.isclass(func_or_class) or inspect.isfunction(func_or_class)):
            raise TypeError(f"@serve.deployment must be called on a class or function, got {type(func_or_class)}.")
        self.func_or_class = func_or_class
        self._name = name
        self._options = options
        self.init_args = init_args
        self.init_kwargs = init_kwargs or {}

    @property
    def name(self) -> str:
        """The name within the application."""
        return self._name

    @property
    def version(self) -> str | None:
        """Always None, as in Ray Serve."""
        return None

    num_replicas = _option("num_replicas", "The wanted number of replicas.")
    user_config = _option("user_config", "The argument of `reconfigure`.")
    max_ongoing_requests = _option("max_ongoing_requests", "Requests that one replica works on at a time.")
    max_queued_requests = _option("max_queued_requests", "Requests that may wait at each caller; -1 = any number.")
    backpressure_config = _option("backpressure_config", "The HTTP answer when the line is full.")
    logging_config = _option("logging_config", "As given.")

    @property
    def ray_actor_options(self) -> Mapping[str, Any]:
        """As given, with Ray's default of one CPU."""
        return {"num_cpus": 1, **(self._options.ray_actor_options or {})}

    def set_logging_config(self, logging_config: Any) -> None:
        """Set it."""
        self._options = self._options.changed(logging_config=logging_config)

    def bind(self, *args: Any, **kwargs: Any) -> Application:
        """Describe the deployment with its constructor's arguments, some of which may be other applications."""
        if inspect.isfunction(self.func_or_class) and (args or kwargs):
            raise ValueError("init_args not supported for function deployments.")
        return Application(Deployment(self.func_or_class, self._name, self._options, args, kwargs))

    def options(
        self, func_or_class: Callable[..., Any] | None = None, name: Any = DEFAULT, **options: Any
    ) -> Deployment:
        """A copy with other options; those of `@serve.deployment`."""
        args, kwargs = options.pop("_init_args", self.init_args), options.pop("_init_kwargs", self.init_kwargs)
        return Deployment(
            func_or_class or self.func_or_class,
            self._name if name is DEFAULT else name,
            self._options.changed(**options),
            args,
            kwargs,
        )

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raises RuntimeError: replicas make the objects."""
        raise RuntimeError("Deployments cannot be constructed directly. Use `deployment.bind()` and `serve.run`.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deployment) and all(
            getattr(self, name) == getattr(other, name) for name in ("_name", "_options", "init_args", "init_kwargs")
        )

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Deployment(name={self._name})"


class Application:
    """What `bind` returns: a deployment and those that it uses. A target of `serve.run`, `dev`, `serve` and `build`."""

    _to_services: ClassVar[Callable[[Application], Any]]
    """`pierhead.rayserve.services.bound_of`, which is above this module."""

    def __init__(self, bound_deployment: Deployment) -> None:
        self._bound_deployment = bound_deployment

    def __repr__(self) -> str:
        return f"Application(deployment={self._bound_deployment.name})"

    def __bound__(self) -> Any:
        """The application as a bound graph of services, for the commands that take one."""
        return type(self)._to_services(self)


def deployment(_func_or_class: Callable[..., Any] | None = None, name: Any = DEFAULT, **options: Any) -> Any:
    """Make a deployment of a class or function.

        @serve.deployment(num_replicas=2)
        class Model: ...

    Options are those of Ray Serve; `docs/how-to/from-ray-serve.md` says what each of them is here. Raises TypeError for
    an unknown one, ValueError for an impossible value and for what is not supported.
    """
    made = DeploymentOptions().changed(**options)

    def decorate(func_or_class: Callable[..., Any]) -> Deployment:
        return Deployment(func_or_class, func_or_class.__name__ if name is DEFAULT else name, made)

    return decorate(_func_or_class) if callable(_func_or_class) else decorate


def ingress(app: Any = None) -> Callable[..., Any]:
    """Serve an ASGI application (FastAPI, Starlette, ...) by a deployment's class.

        @serve.deployment
        @serve.ingress(app)
        class Ingress:
            @app.get("/")
            def root(self): ...

    `app` may be a function that makes the application, called in each replica. Without it the class has a method
    `__serve_build_asgi_app__`. Raises ValueError for what is no class, and for a class with `__call__`.
    """

    def decorate(cls: type[Any] | None = None) -> type[Any]:
        if cls is None:
            cls = type("ASGIIngressDeployment", (_Plain,), {"__module__": __name__})
        if not inspect.isclass(cls):
            raise ValueError("@serve.ingress must be used with a class.")
        if "__call__" in {name for base in cls.__mro__[:-1] for name in vars(base)}:
            raise ValueError("Classes passed to @serve.ingress may not have __call__ method.")
        if app is None and not hasattr(cls, BUILD_ASGI):
            raise ValueError(
                f"serve.ingress() called without an app argument requires {cls.__name__} to define `{BUILD_ASGI}`."
            )
        frozen = app
        if app is not None and not inspect.isfunction(app):
            from pierhead.rayserve.views import frozen_app

            frozen = frozen_app(app, cls)
        setattr(cls, ASGI, staticmethod(frozen) if inspect.isfunction(frozen) else frozen)
        return cls

    return decorate


class _Plain:
    """The class of `serve.ingress(app)()`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


def is_ingress(func_or_class: Any) -> bool:
    """Whether `ingress` was applied to a class."""
    return inspect.isclass(func_or_class) and hasattr(func_or_class, ASGI)


# ---- applications as graphs


@dataclass(frozen=True)
class ComposePart:
    """The service of one deployment in a compose file."""

    service: str
    is_first: bool
    """Whether it has the application's route."""
    options: DeploymentOptions
    definition: Mapping[str, Any]
    """What does not depend on the options."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What changes nothing, and what stands in its place."""


class BuiltDeployment:
    """One deployment of a built application."""

    def __init__(self, name: str, deployment: Deployment, children: tuple[str, ...], arguments: bytes) -> None:
        self.name = name
        self.deployment = deployment
        self.children = children
        """The names of the deployments whose handles the constructor gets."""
        self._arguments = arguments

    @property
    def options(self) -> DeploymentOptions:
        """As given."""
        return self.deployment._options

    @property
    def defaults(self) -> Mapping[str, Any]:
        """See X_SERVE."""
        found: Mapping[str, Any] = getattr(self.deployment.func_or_class, X_SERVE, {})
        return found

    def arguments(self, handle_to: Callable[[str], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A copy of the constructor's arguments, with a handle in the place of each application anywhere in them."""
        args, kwargs = loads(self._arguments, handle_to)
        return args, kwargs


class BuiltApplication:
    """The deployments of an application by name; the children come before those that use them.

    Raises TypeError for constructors' arguments that cannot be pickled.
    """

    def __init__(self, app: Application) -> None:
        self.deployments: dict[str, BuiltDeployment] = {}
        self._names: dict[int, str] = {}
        self.ingress = self._add(app, ())
        """The name of the root."""
        several = [each.name for each in self.deployments.values() if is_ingress(each.deployment.func_or_class)]
        if len(several) > 1:
            raise RayServeException(
                f"Found multiple FastAPI deployments in the application: {', '.join(several)}. Please only include one "
                "deployment with @serve.ingress in your application."
            )

    def default_logging(self, config: Any) -> None:
        """The logging of deployments that have none of their own; None = no default."""
        for each in self.deployments.values():
            if each.options.logging_config is None and config is not None:
                each.deployment.set_logging_config(config)

    def _add(self, app: Application, above: tuple[Application, ...]) -> str:
        known = self._names.get(id(app))
        if known is not None:
            return known
        deployment = app._bound_deployment
        if app in above:
            raise RayServeException(f"{deployment.name} is bound to itself")
        children: list[str] = []

        def name_of(value: Any) -> str | None:
            if not isinstance(value, Application):
                return None
            children.append(self._add(value, (*above, app)))
            return children[-1]

        arguments = dumps((deployment.init_args, dict(deployment.init_kwargs)), name_of)
        name, number = deployment.name, 1
        while name in self.deployments:
            name = f"{deployment.name}_{number}"
            number += 1
        self._names[id(app)] = name
        self.deployments[name] = BuiltDeployment(name, deployment, tuple(children), arguments)
        return name
