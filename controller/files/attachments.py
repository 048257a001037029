"""Volumes, tmpfs, secrets, configs and networks of a Compose service -> the engine's mounts and endpoints.

Secrets and configs are files of the host, bound read-only as Compose does it; their uid, gid and mode have no effect
there either. A changed file makes a new version: contents.py.

An engine of several nodes has files of its own: `Dialect.files`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .problems import Problems, ServiceSource, at

FILE_DIRECTORIES: Mapping[str, str] = {"secrets": "/run/secrets/", "configs": "/"}
"""Sections of files -> where a file of it is in the container."""
_Mount = dict[str, Any]
_Readers = Mapping[str, tuple[str, Callable[[Problems, str, Any], Any]]]
"""Compose's option -> (the engine's name, reader)."""

_VOLUME_OPTIONS: _Readers = {"nocopy": ("NoCopy", Problems.flag), "subpath": ("Subpath", Problems.text)}
_TMPFS_OPTIONS: _Readers = {"size": ("SizeBytes", Problems.size), "mode": ("Mode", Problems.whole)}


def add_mounts(source: ServiceSource, body: dict[str, Any], problems: Problems) -> None:
    """Add all mounts to `body["HostConfig"]`."""
    path, definition = source.path, source.definition
    host_config = body.setdefault("HostConfig", {})
    mounts: list[_Mount] = []
    binds: list[str] = []
    for item_path, item in problems.items(at(path, "volumes"), definition.get("volumes")):
        volume = problems.mapping(item_path, item)
        if not _has_target(item_path, volume, problems):
            continue
        bind_options = volume.get("bind")
        if volume.get("type") == "bind" and isinstance(bind_options, Mapping) and bind_options.get("selinux"):
            binds.append(_selinux_bind(item_path, volume, bind_options, problems))
        elif mount := _mount(item_path, source, volume, problems):
            mounts.append(mount)
    if source.dialect:
        body.update(source.dialect.files(source, problems))
    else:
        mounts += [
            file
            for kind in FILE_DIRECTORIES
            for item_path, item in problems.items(at(path, kind), definition.get(kind))
            if (file := _file_mount(item_path, kind, item, source.sections.get(kind, {}), problems))
        ]
    tmpfs = {}
    for entry in problems.texts(at(path, "tmpfs"), definition.get("tmpfs") or []) or ():
        target, _, options = entry.partition(":")
        tmpfs[target] = options
    host_config.update({"Mounts": mounts or None, "Binds": binds or None, "Tmpfs": tmpfs or None})


def with_volume(
    source: ServiceSource, volume: str, mounts: Sequence[Mapping[str, Any]], **options: object
) -> ServiceSource:
    """The service with more mounts of one of the stack's own volumes. `options`: of the volume where the stack has
    none, because each node makes its own.
    """
    if not mounts:
        return source
    written = source.definition.get("volumes")
    added = [{"type": "volume", "source": volume, **mount} for mount in mounts]
    definition = {**source.definition, "volumes": [*(written if isinstance(written, list) else ()), *added]}
    own = {} if source.control_networks is None else options  # without the stack, nothing is made
    volumes = {volume: own, **source.sections.get("volumes", {})}
    return replace(source, definition=definition, sections={**source.sections, "volumes": volumes})


def _has_target(path: str, volume: Mapping[str, Any], problems: Problems) -> bool:
    target = volume.get("target")
    if isinstance(target, str) and target.startswith("/"):
        return True
    problems.expected(at(path, "target"), "an absolute path inside the container", target)
    return False


def _mount(path: str, source: ServiceSource, volume: Mapping[str, Any], problems: Problems) -> _Mount | None:
    kind = volume.get("type")
    mount: _Mount = {"Type": kind, "Target": volume["target"]}
    if volume.get("read_only") is not None:
        mount["ReadOnly"] = problems.flag(at(path, "read_only"), volume["read_only"])
    if volume.get("consistency") is not None:
        mount["Consistency"] = problems.text(at(path, "consistency"), volume["consistency"])
    options = problems.mapping(at(path, str(kind)), volume.get(str(kind)))
    if kind == "bind":
        return mount | _bind(path, volume, options, problems)
    if kind == "volume":
        return mount | _named_volume(path, source, volume, options, problems)
    if kind == "tmpfs":
        return mount | {"TmpfsOptions": _options(at(path, "tmpfs"), options, _TMPFS_OPTIONS, problems) or None}
    problems.expected(at(path, "type"), '"bind", "volume" or "tmpfs"', kind)
    return None


def _bind_source(path: str, volume: Mapping[str, Any], problems: Problems) -> str:
    source = volume.get("source")
    if isinstance(source, str) and source.startswith("/"):
        return source
    problems.expected(at(path, "source"), "an absolute path of the host", source)
    return ""


def _bind(path: str, volume: Mapping[str, Any], options: Mapping[str, Any], problems: Problems) -> _Mount:
    _refuse_others(at(path, "bind"), options, ("create_host_path", "propagation", "recursive"), problems)
    bind_options: dict[str, Any] = {}
    # Compose prints true only for the short form "./data:/data": a missing directory is created, as by `docker run`.
    if options.get("create_host_path") is True:
        bind_options["CreateMountpoint"] = True
    if options.get("propagation"):
        bind_options["Propagation"] = problems.text(at(path, "bind.propagation"), options["propagation"])
    if (recursive := options.get("recursive")) not in (None, "enabled"):
        if recursive == "disabled":
            bind_options["NonRecursive"] = True
        else:
            problems.expected(at(path, "bind.recursive"), '"enabled" or "disabled"', recursive)
    return {"Source": _bind_source(path, volume, problems), "BindOptions": bind_options or None}


def _selinux_bind(path: str, volume: Mapping[str, Any], options: Mapping[str, Any], problems: Problems) -> str:
    """Only the short form of the engine's API can ask for an SELinux label."""
    _refuse_others(at(path, "bind"), options, ("create_host_path", "propagation", "selinux"), problems)
    flags = ["ro" if volume.get("read_only") is True else "rw"]
    wanted = [key for key in ("selinux", "propagation") if options.get(key)]
    flags += [problems.text(at(path, f"bind.{key}"), options[key]) or "" for key in wanted]
    return f"{_bind_source(path, volume, problems)}:{volume['target']}:{','.join(flags)}"


def _named_volume(
    path: str, source: ServiceSource, volume: Mapping[str, Any], options: Mapping[str, Any], problems: Problems
) -> _Mount:
    project, volumes = source.project, source.sections.get("volumes", {})
    volume_options = _options(at(path, "volume"), options, _VOLUME_OPTIONS, problems)
    name = volume.get("source")
    if name is None:
        return {"VolumeOptions": volume_options or None}  # anonymous: one for each replica, removed with it
    if not isinstance(name, str) or name not in volumes:
        problems.expected(at(path, "source"), "a name of the top-level volumes section", name)
        return {}
    here = at("volumes", name)
    definition = problems.mapping(here, volumes[name])
    engine_name = problems.text(at(here, "name"), definition.get("name", f"{project}_{name}"))
    if not definition.get("external"):
        # If the engine creates the volume, Compose must recognise it, and `down --volumes` must remove it.
        volume_options["Labels"] = {
            **(problems.text_map(at(here, "labels"), definition.get("labels") or {}) or {}),
            "com.docker.compose.project": project,
            "com.docker.compose.volume": name,
        }
        if definition.get("driver") or definition.get("driver_opts"):
            volume_options["DriverConfig"] = {
                "Name": problems.text(at(here, "driver"), definition.get("driver", "local")),
                "Options": problems.text_map(at(here, "driver_opts"), definition.get("driver_opts") or {}),
            }
    return {"Source": engine_name, "VolumeOptions": volume_options or None}


def _options(path: str, options: Mapping[str, Any], readers: _Readers, problems: Problems) -> dict[str, Any]:
    _refuse_others(path, options, readers, problems)
    written = {key: value for key, value in options.items() if key in readers and value not in (None, "")}
    return {readers[key][0]: readers[key][1](problems, at(path, key), value) for key, value in written.items()}


def _refuse_others(path: str, options: Mapping[str, Any], known: Collection[str], problems: Problems) -> None:
    for key in options:
        if key not in known:
            problems.unknown_key(path, key, known)


def _file_mount(path: str, kind: str, value: Any, section: Mapping[str, Any], problems: Problems) -> _Mount | None:
    _, name, target = attached(path, kind, value, section, problems)
    if name is None:
        return None
    file = problems.mapping(at(kind, name), section[name]).get("file")
    if not isinstance(file, str) or not file.startswith("/"):
        what = kind.removesuffix("s")
        problems.add(path, f"replicas can only be given a {what} from a file; write {kind}.{name}.file")
        return None
    return {"Type": "bind", "Source": file, "Target": target, "ReadOnly": True}


def attached(
    path: str, kind: str, value: Any, section: Mapping[str, Any], problems: Problems
) -> tuple[Mapping[str, Any], str | None, str]:
    """What a service writes of a secret or config, its name in the section (None with a problem added), its path."""
    entry = {"source": value} if isinstance(value, str) else problems.mapping(path, value)
    name, target = entry.get("source"), entry.get("target")
    if not isinstance(name, str) or name not in section:
        problems.expected(at(path, "source"), f"a name of the top-level {kind} section", name)
        return entry, None, ""
    target = target if isinstance(target, str) and target else name
    return entry, name, target if target.startswith("/") else FILE_DIRECTORIES[kind] + target


# ------------------------------------------------------------------------------------------------------- networks

_NETWORK_KEYS = frozenset({"aliases", "driver_opts", "priority"})


def add_networks(source: ServiceSource, body: dict[str, Any], problems: Problems) -> None:
    """Connect a replica to every network of the service, under the service's name; calls use the primary network."""
    path = at(source.path, "networks")
    joined = source.definition.get("networks")
    attachments: Mapping[str, Any] = problems.mapping(path, joined) or {"default": None}
    if any(not isinstance(name, str) for name in attachments):
        problems.expected(path, "names of networks", joined)
        return
    endpoints: dict[str, Any] = {}
    for name in attachments:
        engine_name = _engine_network(source, path, name, problems)
        endpoints[engine_name] = _endpoint(source, at(path, name), attachments[name], problems)
    first = _primary_network(source, path, attachments, problems)
    body["NetworkingConfig"] = {"EndpointsConfig": endpoints}
    body.setdefault("HostConfig", {})["NetworkMode"] = _engine_network(source, path, first, Problems())


def _engine_network(source: ServiceSource, path: str, name: str, problems: Problems) -> str:
    networks = source.sections.get("networks", {})
    if name not in networks and name != "default":
        problems.add(at(path, name), "no such network in the top-level networks section")
    definition = networks.get(name)
    engine_name = definition.get("name") if isinstance(definition, Mapping) else None
    return engine_name if isinstance(engine_name, str) and engine_name else f"{source.project}_{name}"


def _endpoint(source: ServiceSource, path: str, value: Any, problems: Problems) -> dict[str, Any]:
    options = problems.mapping(path, value)
    for key in options:
        if key not in _NETWORK_KEYS:
            problems.add(at(path, str(key)), "not possible with x-serve: it fits one container only; remove it")
    aliases = problems.texts(at(path, "aliases"), options.get("aliases") or []) or []
    endpoint: dict[str, Any] = {"Aliases": list(dict.fromkeys([source.name, *aliases]))}
    if options.get("driver_opts"):
        endpoint["DriverOpts"] = problems.text_map(at(path, "driver_opts"), options["driver_opts"])
    return endpoint


def _primary_network(source: ServiceSource, path: str, attachments: Mapping[str, Any], problems: Problems) -> str:
    """The network that calls use: one where the stack reaches it; by Compose's priority, then by name."""

    def rank(name: str) -> tuple[int, str]:
        options = attachments[name]
        priority = options.get("priority") if isinstance(options, Mapping) else None
        return -(priority if isinstance(priority, int) else 0), name

    ranked = sorted(attachments, key=rank)
    if source.control_networks is None:
        return ranked[0]
    shared = [name for name in ranked if name in source.control_networks]
    if not shared:
        theirs = ", ".join(sorted(source.control_networks)) or "they share none"
        problems.add(
            path,
            "the controller, and HAProxy if the service has a route, would not reach it on one of these; add one of "
            f"theirs here ({theirs}), or one of these to the services controller and haproxy",
        )
        return ranked[0]
    return shared[0]
