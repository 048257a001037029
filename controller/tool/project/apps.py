"""The apps of the clone (compose/apps/), and what gives them GPUs: `make up APPS="echo recsys" GPU=1`."""

from __future__ import annotations

from pathlib import Path

from ...errors import InvalidRequest

APPS = "compose/apps"


def chosen_files(root: Path, apps: str, gpu: str, named: str) -> str:
    """A COMPOSE_FILE of the apps, else what is `named`; with `gpu` = "1" also each app's own file for GPUs.

    Raises InvalidRequest.
    """
    files = named.split(":")
    if apps.split():
        files = ["compose/compose.yaml", *(_file(root, app) for app in apps.split())]
    if gpu not in ("", "0", "1"):
        raise InvalidRequest(f'GPU: expected 1 or nothing, found "{gpu}".')
    if gpu == "1":
        with_gpus = [file for each in files if (file := _gpu_file(each)) and (root / file).is_file()]
        if not with_gpus:
            raise InvalidRequest(
                "GPU: none of the chosen apps has a file for GPUs (compose/gpu-<app>.yaml).\n"
                "Leave GPU=1 out; an app of yours says itself which GPUs it needs "
                "(deploy.resources.reservations.devices)."
            )
        files += [file for file in with_gpus if file not in files]
    return ":".join(files)


def _file(root: Path, app: str) -> str:
    file = f"{APPS}/{app}.yaml"
    if not (root / file).is_file():
        known = " ".join(sorted(path.stem for path in (root / APPS).glob("*.yaml"))) or "none"
        raise InvalidRequest(
            f'APPS: there is no app named "{app}" (no {file}). There are: {known}.\nExample: make up APPS="echo recsys"'
        )
    return file


def _gpu_file(file: str) -> str:
    """An override of a service that is not among the files would be an error of Compose's."""
    path = Path(file)
    return f"compose/gpu-{path.stem}.yaml" if path.parent == Path(APPS) and path.suffix == ".yaml" else ""
