"""A connector for vLLM on CPUs: what prefill has read goes to decode through a directory, if kv_transfer_params say so.

vLLM's own ExampleConnector does the work, with real caches of real engines; but it looks into the directory for every
prompt, and hands no parameters on. This one speaks as NixlConnector does, which gateways are made for.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class HandingConnector(ExampleConnector):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Of both sides."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Only for requests that are to take blocks of another engine."""
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The parameters for the decode engine."""
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        return False, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._kv_transfer_config.engine_id,
            "remote_block_ids": block_ids,
            "remote_host": "localhost",
            "remote_port": 0,
        }
