"""The arguments of `vllm serve`, made of LLMConfig and read by vLLM's own parser."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, cast

from pierhead.llm.server.engines.vllm.start import arguments
from pierhead.llm.server.errors import LLMStartError
from pierhead.llm_config import LLMConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

_OURS = {
    "model": "model_loading.model_source",
    "model_tag": "model_loading.model_source",
    "served_model_name": "model_loading.model_id",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "enable_lora": "lora",
    "max_loras": "lora.max_num_adapters_per_replica",
}


def check_path(model_path: str) -> None:
    """Raises LLMStartError for a directory that does not exist."""
    if model_path.startswith(("/", ".")) and not Path(model_path).is_dir():
        raise LLMStartError(
            f"{model_path}: there is no such directory in the container. Correct model_loading.model_source, or mount "
            "the directory there"
        )


def read_settings(config: LLMConfig, model_path: str) -> Namespace:
    """The arguments of `vllm serve`, read and checked by its own parser. Raises LLMStartError."""
    for name, ours in _OURS.items():
        if name in config.engine_kwargs:
            raise LLMStartError(f"engine_kwargs {name}: say it in {ours} of the service's llm block")
    own: dict[str, object] = {
        "model": model_path,
        "served_model_name": config.model_loading.model_id,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
    }
    if config.lora is not None:
        own |= {"enable_lora": True, "max_loras": config.lora.max_num_adapters_per_replica}
    parser = make_arg_parser(_ArgumentsParser(prog="engine_kwargs"))
    settings = cast(Namespace, parser.parse_args(arguments((own | config.engine_kwargs).items())))
    validate_parsed_serve_args(settings)
    return settings


class _ArgumentsParser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Raises an exception for invalid arguments instead of ending the process."""

    def error(self, message: str) -> Any:
        raise LLMStartError(f"engine_kwargs: {message}. Names are those of `vllm serve`, with underscores")
