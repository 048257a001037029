"""The operator's certificates for clients and public keys of their tokens, as secrets of Swarm for every HAProxy.

Changed files become new secrets, and Swarm then replaces the HAProxys node by node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from ...files.certificates import CERTIFICATES
from ...files.pem import read_files
from ...files.public_keys import public_keys
from ...model.spec import Spec
from .secrets import Set, kept
from .settings import StackSettings

OF_CERTIFICATES, OF_KEYS = "tls/", "jwt/"
"""What the paths of files in the directory of secrets begin with."""


def certificates(settings: StackSettings, now: float) -> Set:
    """By path, those of the project; none where clients come without TLS. Raises WrongFiles."""
    if not settings.tls_dir:
        return {}
    files = read_files(CERTIFICATES, Path(settings.clone), settings.tls_dir, now).files
    return _kept(settings, {f"{OF_CERTIFICATES}{name}": text for name, text in files.items()})


def keys(settings: StackSettings, spec: Spec, now: float) -> Set:
    """By path, those of the project; none where no service takes tokens. Raises WrongFiles."""
    if not spec.takes_tokens:
        return {}
    files = read_files(public_keys(settings.jwt_algorithm), Path(settings.clone), settings.jwt_dir, now).files
    return _kept(settings, {f"{OF_KEYS}{name}": text for name, text in named(files.values()).items()})


def named(texts: Iterable[str]) -> dict[str, str]:
    """Files by names that follow from their content: HAProxys with other keys next to one have the same name for it."""
    return {f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.pem": text for text in texts}


def _kept(settings: StackSettings, files: dict[str, str]) -> Set:
    return {path: kept(settings.project, path, text.encode()) for path, text in files.items()}
