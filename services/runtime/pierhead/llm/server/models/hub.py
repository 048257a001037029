"""Models from the Hugging Face hub, in the hub's own cache layout."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from pierhead.llm.server.engine import Report
from pierhead.llm.server.errors import LLMStartError
from pierhead.llm.server.models.cache import one_at_a_time

_WEIGHTS_BESIDE_SAFETENSORS = (
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "original/**",
    "onnx/**",
)
"""Other forms of the same weights, which are not needed where there are safetensors."""


def from_hub(source: str, cache: Path, report: Report) -> Path:
    """A snapshot in the hub's own cache layout, which its library resumes and shares by itself."""
    import huggingface_hub
    from huggingface_hub import errors

    name, _, revision = source.partition("@")
    try:
        with one_at_a_time(cache, source, report):
            folder = huggingface_hub.snapshot_download(
                name,
                revision=revision or None,
                cache_dir=cache / "hub",
                ignore_patterns=_not_needed(name, revision),
                tqdm_class=_hub_progress(name, report),
            )
    except errors.GatedRepoError as error:
        raise LLMStartError(
            f"{name} is gated on the Hugging Face hub: accept its licence there, and set HF_TOKEN in the "
            "service's environment"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise LLMStartError(f"{name} has no revision {revision} on the Hugging Face hub") from error
    except errors.RepositoryNotFoundError as error:
        raise LLMStartError(
            f"{name} does not exist on the Hugging Face hub, or is private (then set HF_TOKEN); a "
            'directory begins with "/"'
        ) from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError) as error:
        raise LLMStartError(
            f"the Hugging Face hub cannot be reached for {name}, and {cache} does not have it: {error}; "
            "check the network of the container, or mount the model's directory and name that"
        ) from error
    return Path(folder)


def _not_needed(name: str, revision: str) -> list[str] | None:
    """Patterns of files that need not be fetched; None where the hub does not answer."""
    import huggingface_hub

    try:
        info = huggingface_hub.HfApi().model_info(name, revision=revision or None)
    except huggingface_hub.errors.HfHubHTTPError:
        raise
    except Exception:  # the hub's HTTP library's own errors: offline. The snapshot may be in the cache all the same
        return None
    names = [file.rfilename for file in info.siblings or ()]
    return list(_WEIGHTS_BESIDE_SAFETENSORS) if any(name.endswith(".safetensors") for name in names) else None


def _hub_progress(name: str, report: Report) -> type[Any]:
    """A tqdm class that calls `report` instead of writing to a terminal. One bar of the hub counts bytes."""
    from tqdm.auto import tqdm

    class HubProgress(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            kwargs["disable"] = False
            kwargs["file"] = _NOWHERE
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                report(f"downloading {name}", self.n, self.total)
            return shown

    return HubProgress


class _Nowhere(io.StringIO):
    """A file that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


_NOWHERE = _Nowhere()
