"""The operator's certificates for clients and public keys of their tokens, as secrets of Swarm for every HAProxy.

Other files are other secrets, with which Swarm replaces the HAProxys node by node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...files.certificates import CERTIFICATES
from ...files.pem import read_files
from ...files.public_keys import public_keys
from ...model.spec import Spec
from .secrets import Kept, kept
from .settings import StackSettings


def operator_files(settings: StackSettings, spec: Spec, now: float) -> Mapping[str, Kept]:
    """By their paths in the directory of secrets, what clients of these services need. Raises WrongFiles."""
    root, files = Path(settings.clone), dict[str, str]()
    if settings.tls_dir:
        certificates = read_files(CERTIFICATES, root, settings.tls_dir, now).files
        files |= {f"tls/{name}": text for name, text in certificates.items()}
    if spec.takes_tokens:
        keys = read_files(public_keys(settings.jwt_algorithm), root, settings.jwt_dir, now).files
        files |= {f"jwt/{name}": text for name, text in named(keys.values()).items()}
    return {path: kept(settings.project, path, text.encode()) for path, text in files.items()}


def named(public_keys: Iterable[str]) -> dict[str, str]:
    """Files by names that follow from the keys: an HAProxy that has other keys as well has the same name for each."""
    return {f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.pem": text for text in public_keys}
