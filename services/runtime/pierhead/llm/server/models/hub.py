"""Models of the Hugging Face hub, by its own library: `organisation/model`, `organisation/model@revision`."""

from __future__ import annotations

from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import PurePosixPath
from typing import Any

from pierhead.llm.server.errors import LLMStartError, SourceNotFoundError
from pierhead.llm.server.models.source import PartFile, SourceFile, in_a_line

_OTHER_WEIGHTS = (
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "original/*",
    "onnx/*",
)
"""Other forms of the same weights, which are not needed where there are safetensors."""
_MODULE = "[0-9]_*/pytorch_model.bin"
"""The weights of one of sentence-transformers' modules."""
_HEADS = ("sparse_linear.pt", "colbert_linear.pt")
"""Of BGE-M3 and its kind, which vLLM reads in this form."""
_LISTED_WITHIN_S = 30.0


class Hub:
    """One model, at the commit that its revision names when it is first asked for."""

    directory = "hub"

    def __init__(self, name: str) -> None:
        self.name = name
        self._model, _, self._revision = name.partition("@")

    def files(self) -> list[SourceFile]:
        """The files of the commit. Raises SourceNotFoundError, LLMStartError."""
        try:
            import huggingface_hub  # noqa: F401 - what is below needs it
        except ImportError as error:
            raise LLMStartError(f"{self.name}: this image cannot read the Hugging Face hub: {error}") from error
        try:
            found = [
                SourceFile(each.rfilename, PurePosixPath(each.rfilename), each.size or 0, _tag(each))
                for each in self._info.siblings or ()
            ]
        except Exception as error:  # the library's own, and those of its HTTP library
            raise self._explained(error) from error
        return needed(found)

    def copy(self, file: SourceFile, at: int, part: PartFile) -> None:
        """Append a file's content from byte `at` on. The library continues by itself where a connection is cut.

        Raises LLMStartError, and what the library raises.
        """
        import huggingface_hub
        from huggingface_hub import errors
        from huggingface_hub.file_download import http_get, is_xet_available, xet_get
        from huggingface_hub.utils import build_hf_headers
        from tqdm.auto import tqdm

        url = huggingface_hub.hf_hub_url(self._model, file.path, revision=self._info.sha)
        how = {"headers": build_hf_headers(), "expected_size": file.size}
        try:
            xet = huggingface_hub.get_hf_file_metadata(url).xet_file_data if self._is_large(file) else None
            if xet is None or at or not is_xet_available():
                http_get(url, part, resume_size=at, tqdm_class=partial(tqdm, disable=True), **how)
                return
            # By many connections, which do not write in order: one that was interrupted begins again.
            whole = part.path.with_name(f"xet-{part.path.name}")
            xet_get(incomplete_path=whole, xet_file_data=xet, tqdm_class=_progress_of(part), **how)
            whole.replace(part.path)
        except errors.RepositoryNotFoundError as error:  # gated models are listed for everybody
            raise self._explained(error) from error

    def _is_large(self, file: SourceFile) -> bool:
        """Whether the hub has it in Git LFS or Xet."""
        return any(each.lfs for each in self._info.siblings if each.rfilename == file.path)

    @cached_property
    def _info(self) -> Any:
        """The model's commit and its files. Raises what the library raises."""
        import huggingface_hub

        return huggingface_hub.HfApi().model_info(
            self._model, revision=self._revision or None, files_metadata=True, timeout=_LISTED_WITHIN_S
        )

    def _explained(self, error: Exception) -> LLMStartError:
        """The error that says what to do."""
        from huggingface_hub import errors, get_token

        model, has_token = self._model, get_token() is not None
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
        match error:
            case errors.GatedRepoError() if has_token:
                return LLMStartError(
                    f"{model} is gated on the Hugging Face hub, and the account of HF_TOKEN has no access to it: "
                    "accept its licence there with that account, or set another account's token"
                )
            case errors.GatedRepoError():
                return LLMStartError(
                    f"{model} is gated on the Hugging Face hub: accept its licence there, and set HF_TOKEN in the "
                    "service's environment"
                )
            case errors.RevisionNotFoundError():
                return SourceNotFoundError(
                    f"{model} has no revision {self._revision} on the Hugging Face hub; correct what stands behind the "
                    "@, a branch, a tag or a commit"
                )
            case errors.RepositoryNotFoundError():
                private = "and the account of HF_TOKEN has no access to it" if has_token else "(then set HF_TOKEN)"
                return SourceNotFoundError(
                    f"{model} does not exist on the Hugging Face hub, or is private {private}; a "
                    'directory begins with "/"'
                )
            case errors.HfHubHTTPError() if status in (401, 403):
                return LLMStartError(
                    f"the Hugging Face hub does not accept HF_TOKEN for {model}: {error.server_message or status}; set "
                    "a valid one, or none for a public model"
                )
            case ValueError() if not status:
                return LLMStartError(f'{model} is no model of the hub: {in_a_line(error)}; a directory begins with "/"')
        return LLMStartError(
            f"the Hugging Face hub cannot be reached for {model}: {in_a_line(error)}; "
            "check the network of the container, or mount the model's directory and name that"
        )


def _tag(sibling: Any) -> str:
    """Git's name of the content."""
    return f"{sibling.size} {sibling.lfs.sha256 if sibling.lfs else sibling.blob_id}"


def _progress_of(part: PartFile) -> type[Any]:
    """What the library takes for a class of progress bars: the bytes that it counts are those of the part."""
    from tqdm.auto import tqdm

    class HubProgress(tqdm):  # type: ignore[misc]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            part.advance(int(self.n))

        def update_transfer(self, n: float | None = 1) -> None:
            """Bytes on the network, which may be fewer than the file's."""

        def set_transfer_postfix_str(self, postfix: str, refresh: bool = True) -> None:
            """Their rate."""

    return HubProgress


def needed(files: list[SourceFile]) -> list[SourceFile]:
    """A model's files without other forms of weights that are there as safetensors."""
    has = {PurePosixPath(file.path).parent for file in files if file.path.endswith(".safetensors")}

    def is_needed(path: str) -> bool:
        is_part = path in _HEADS or (fnmatch(path, _MODULE) and PurePosixPath(path).parent not in has)
        return is_part or not any(fnmatch(path, each) for each in _OTHER_WEIGHTS)

    return [file for file in files if is_needed(file.path)] if has else files
