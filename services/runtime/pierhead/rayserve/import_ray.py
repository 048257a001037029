"""`python -m pierhead import-ray serve_config.yaml`: a compose file from the YAML of `serve build`.

What has no counterpart is named: on standard error, and at the top of the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pierhead.classes.service import Bound
from pierhead.classes.target import NoService, arguments_of, built_by, imported
from pierhead.compose_names import own_image
from pierhead.files import replace_file
from pierhead.rayserve.config import made
from pierhead.rayserve.context import DEFAULT_APPLICATION
from pierhead.rayserve.deployment import COMPOSE, Application, ComposePart
from pierhead.rayserve.exceptions import RayServeException
from pierhead.rayserve.options import DEFAULT, OWN_LLM, DeploymentOptions, own_path, runtime_env_notes
from pierhead.rayserve.pickles import SECRET, write_secret
from pierhead.rayserve.schema import TracingConfig
from pierhead.rayserve.services import APPLICATION, PREFIXED, RayDeployment, bound_of, service_name

_TOP: Final[Mapping[str, str]] = {
    "proxy_location": "HAProxy stands before all replicas",
    "logging_config": "",
    "applications": "",
    "http_options": "",
    "grpc_options": "",
    "target_capacity": "there is no counterpart; scale the services",
    "tracing_config": "",
}
_APPLICATION: Final = {
    "name", "route_prefix", "import_path", "args", "runtime_env", "deployments", "logging_config", "host", "port",
    "autoscaling_policy", "external_scaler_enabled",
}  # fmt: skip
_HTTP: Final[Mapping[str, str]] = {
    "root_path": "write x-serve.route",
    "keep_alive_timeout_s": "HAProxy's own",
    "ssl_keyfile": "put a proxy that ends TLS before HAProxy",
    "ssl_certfile": "put a proxy that ends TLS before HAProxy",
}


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    words = "make a compose file of a Ray Serve configuration"
    command: argparse.ArgumentParser = commands.add_parser("import-ray", help=words, description=words)
    command.add_argument("file", type=Path, help="the YAML of `serve build`")
    command.add_argument("-o", "--output", type=Path, help="where to write the compose file (default: standard output)")
    command.add_argument("--force", action="store_true", help="overwrite a file that exists")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Write the compose file. Exits with 2 for a file that is no configuration, and for an output that exists."""
    if arguments.output is not None and arguments.output.exists() and not arguments.force:
        sys.stderr.write(f"{arguments.output} exists; nothing was written (--force overwrites)\n")
        raise SystemExit(2)
    try:
        text, notes = compose_of(arguments.file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RayServeException) as error:
        why = error.strerror if isinstance(error, OSError) else error
        sys.stderr.write(f"{arguments.file}: {why}\n")
        raise SystemExit(2) from None
    for note in notes:
        sys.stderr.write(f"{note}\n")
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        replace_file(arguments.output, text.encode())
        if SECRET in text and write_secret(arguments.output.with_name(".env")):
            sys.stderr.write(f"wrote {SECRET} into .env\n")


def compose_of(text: str, importing: Callable[[str], Any] | None = None) -> tuple[str, list[str]]:
    """The compose file, and what it leaves out, in words. Raises RayServeException for what is no configuration.

    `importing`: what an import path names; default: it is imported.
    """
    import yaml

    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RayServeException(f"this is not YAML: {error}") from None
    translation = _Translation(importing or imported)
    services = translation.services(config)
    document: dict[str, Any] = {"services": services}
    volumes: dict[str, Any] = {
        each.partition(":")[0]: {} for service in services.values() for each in service.get("volumes", ())
    }
    document |= {"volumes": volumes} if volumes else {}
    head = ["# Made of a Ray Serve configuration by `pierhead import ray`."]
    head += [f"# NOT TRANSLATED: {note}" for note in translation.notes]
    body = yaml.safe_dump(document, sort_keys=False, width=120)
    return "\n".join(head) + f"\n\n{body}", translation.notes


class _Translation:
    """Translates one configuration, and notes what it leaves out."""

    def __init__(self, importing: Callable[[str], Any]) -> None:
        self.notes: list[str] = []
        self._importing = importing
        self._request_timeout_s: float | None = None
        self._logging: Mapping[str, Any] | None = None
        self._tracing = TracingConfig()

    def services(self, config: Any) -> dict[str, Any]:
        if not isinstance(config, Mapping) or not isinstance(config.get("applications"), list):
            raise RayServeException("expected a mapping with a list `applications`, as `serve build` writes it")
        for key in config:
            if key not in _TOP:
                self._note(str(key), "unknown")
            elif _TOP[key] and not (key == "proxy_location" and config[key] == "EveryNode"):
                self._note(key, _TOP[key])
        self._logging = config.get("logging_config") or None
        self._tracing = made(TracingConfig, config.get("tracing_config"), "tracing_config") or TracingConfig()
        self._http(config.get("http_options") or {})
        self._grpc(config.get("grpc_options") or {})
        found: dict[str, Any] = {}
        for application in config["applications"]:
            for name, service in self._application(application, found).items():
                if name in found:
                    raise RayServeException(
                        f"two deployments would both be the service {name}: give one application another name"
                    )
                found[name] = service
        return found

    def _note(self, where: str, why: str) -> None:
        self.notes.append(f"{where}: {why}")

    def _http(self, options: Mapping[str, Any]) -> None:
        for key, value in options.items():
            if key == "request_timeout_s":
                self._request_timeout_s = float(value) if value else None
            elif key == "port":
                if value != 8000:
                    self._note("http_options.port", f"write PIERHEAD_HTTP_PORT={value} into .env")
            elif key == "host":
                if value not in (None, "", "127.0.0.1", "localhost"):
                    self._note("http_options.host", f"write PIERHEAD_BIND={value} into .env to open the ports")
            elif value not in (None, "", 90):
                self._note(f"http_options.{key}", _HTTP.get(key, "there is no counterpart"))

    def _grpc(self, options: Mapping[str, Any]) -> None:
        if options.get("grpc_servicer_functions"):
            self._note(
                "grpc_options.grpc_servicer_functions",
                "write a service as a class for gRPC from outside, and its name into x-serve.grpc_services",
            )
        if options.get("port") not in (None, 9000):
            self._note("grpc_options.port", f"write PIERHEAD_GRPC_PORT={options['port']} into .env")

    def _application(self, config: Any, others: Collection[str]) -> dict[str, Any]:
        """Its services. Where one of them has a name that `others` have, all begin with the application's name."""
        if not isinstance(config, Mapping) or not isinstance(config.get("import_path"), str):
            raise RayServeException("expected applications with an import_path each")
        path, name = config["import_path"], str(config.get("name", "default"))
        where = f"applications.{name}"
        target = path if ":" in path else ":".join(path.rsplit(".", 1))
        target = own_path(target)
        self._leave_out(where, config)
        environment = self._environment(where, config.get("runtime_env") or {})
        options = {each["name"]: each for each in config.get("deployments") or () if isinstance(each, Mapping)}
        parts = self._parts(where, target, name, config.get("args") or {}, others)
        prefix = config.get("route_prefix", "/")
        found = {}
        for deployment, part in parts.items():
            block, compose = self._block(where, deployment, part, options.get(deployment, {}), config)
            if part.is_first and prefix is not None:
                block |= {"route": prefix} if prefix == "/" else {"route": prefix, "strip_prefix": True}
            found[part.service] = _merged(part.definition, {"environment": environment, **compose, "x-serve": block})
        for deployment in options:
            if deployment not in parts:
                self._note(f"{where}.deployments.{deployment}", f"{target} has no such deployment")
        return found

    def _leave_out(self, where: str, config: Mapping[str, Any]) -> None:
        for key in config:
            if key not in _APPLICATION:
                self._note(f"{where}.{key}", "unknown")
        for key in ("autoscaling_policy", "host", "port"):
            if config.get(key):
                self._note(f"{where}.{key}", "there is no counterpart")

    def _environment(self, where: str, runtime_env: Mapping[str, Any]) -> dict[str, str]:
        for key, words in runtime_env_notes(runtime_env).items():
            self._note(f"{where}.{key}", words)
        variables = {**self._tracing.variables(), **(runtime_env.get("env_vars") or {})}
        return {str(key): str(value).replace("$", "$$") for key, value in variables.items()}

    def _parts(
        self, where: str, target: str, name: str, args: Mapping[str, Any], others: Collection[str]
    ) -> Mapping[str, ComposePart]:
        """The services by the names of their deployments. Where one has a name that `others` have, all begin with the
        application's name.

        Raises RayServeException for arguments that no target can have, and for a target that cannot be imported.
        """
        for each, value in args.items():
            _check_argument(where, each, value)
        called = f"{target}({', '.join(f'{each}={value!r}' for each, value in args.items())})"
        try:
            found = self._importing(target)
            if callable(found) and not isinstance(found, Application):
                found = built_by(found, args)
                target = called
            bound: Bound = bound_of(found)
        except Exception as error:
            raise RayServeException(f"{where}: {target} could not be imported: {_why(target, error)}") from error
        cls: Any = bound.cls
        of_stack = getattr(cls.__built__.deployment.func_or_class, COMPOSE, lambda *_: None)
        # A program of the user's own runs itself. Of Ray Serve's builders the YAML says everything.
        image = own_image(name) if target.startswith(OWN_LLM) else None
        built = {each: child.cls.__built__ for each, child in cls.__application__.services.items()}
        for prefix in ("", name):
            parts: Mapping[str, ComposePart] = of_stack(built, prefix, image) or _own_parts(bound, target, name, prefix)
            if not any(part.service in others for part in parts.values()):
                break
        for part in parts.values():
            for field, words in part.notes.items():
                self._note(f"{where}.{field}", words)
        return parts

    def _block(
        self, where: str, name: str, part: ComposePart, written: Mapping[str, Any], config: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The x-serve block of a deployment, and the other keys of its service."""
        here = f"{where}.deployments.{name}"
        given = {key: value for key, value in written.items() if key != "name"}
        for key in ("placement_group_bundles", "ray_actor_options"):
            if given.get(key) is None:
                given.pop(key, None)
        try:
            options = part.options.changed(**{key: DEFAULT if value is None else value for key, value in given.items()})
            logging = config.get("logging_config") or self._logging
            if logging and options.logging_config is None:
                given = {key: value for key, value in logging.items() if value is not None}
                options = options.changed(logging_config=given)
            longest_s = self._request_timeout_s or part.definition["x-serve"].get("request_timeout_s")
            block = options.x_serve(longest_s)
        except (ValueError, TypeError, RayServeException) as error:
            self._note(here, str(error))
            return {}, {}
        for key, words in options.without_effect(longest_s).items():
            self._note(f"{here}.{key}", words)
        if options.user_config is not None and not isinstance(options.user_config, Mapping):
            self._note(f"{here}.user_config", "x-serve.user_config is a mapping; the value in the code stays in force")
        if self._request_timeout_s is not None:
            block["request_timeout_s"] = self._request_timeout_s
        return block, _resources(options)


def _own_parts(bound: Bound, target: str, name: str, prefix: str) -> dict[str, ComposePart]:
    """A service for each deployment, of the image that has the application. `prefix`: their names begin with it."""
    environment = {**RayDeployment.__environment__}
    if name != DEFAULT_APPLICATION or prefix:
        environment[APPLICATION] = name
    if prefix:
        environment[PREFIXED] = "true"
    parts = {}
    cls: Any = bound.cls
    for each, child in cls.__application__.services.items():
        definition = {
            "image": own_image(name),
            **({"build": "."} if child is bound else {}),
            "command": ["python", "-m", "pierhead", "serve", target.replace("$", "$$")],
            "scale": 0,
            "environment": environment,
            "x-serve": child.cls.__built__.defaults,
        }
        service = service_name(each, prefix) if prefix else child.name
        parts[each] = ComposePart(service, child is bound, child.cls.__built__.options, definition)
    return parts


def _merged(definition: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A service's definition with more keys: mappings within it are merged."""
    found = dict(definition)
    for key, value in more.items():
        former = found.get(key)
        found[key] = _merged(former, value) if isinstance(former, Mapping) and isinstance(value, Mapping) else value
    return found


def _why(target: str, error: Exception) -> str:
    """Why a target cannot be imported, and what to do."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if target.startswith("ray."):
        return "it is Ray's own; docs/how-to/from-ray-serve.md says what stands in its place"
    of_fields = getattr(error, "errors", None)  # pydantic's
    if of_fields is not None:
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in of_fields())
    if missing is None:
        return str(error) if isinstance(error, NoService) else f"{type(error).__name__}: {error}"
    return (
        f"there is no module {missing} in {sys.executable}: run the command in the project's environment, which has it "
        "(`uv run pierhead import ray ...`), or by that environment's Python (`python -m pierhead import-ray ...`)"
    )


def _check_argument(where: str, name: object, value: object) -> None:
    with suppress(NoService):
        if arguments_of(f"module:build({name}={value!r})") == {name: value}:
            return
    raise RayServeException(
        f"{where}.args.{name}: expected the name of a parameter in Python, with text, a number, a list or a mapping, "
        f"found {value!r:.60}"
    )


def _resources(options: DeploymentOptions) -> dict[str, Any]:
    """Limits of CPU and memory, as Compose writes them."""
    wanted = options.ray_actor_options or {}
    limits: dict[str, Any] = {}
    if wanted.get("num_cpus"):
        limits["cpus"] = str(wanted["num_cpus"])
    if wanted.get("memory"):
        limits["memory"] = f"{int(wanted['memory'])}b"
    return {"deploy": {"resources": {"limits": limits}}} if limits else {}
