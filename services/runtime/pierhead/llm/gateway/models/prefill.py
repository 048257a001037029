"""Separate prefill and decode services: the gateway's request for each of the two. Pure.

    client --> prefill: one token, do_remote_decode --> kv_transfer_params --> decode: the same request and these

It is the protocol of vLLM's NixlConnector (its documentation: features/nixl_connector_usage).
The prefill service's answer is passed on unchanged: its members belong to the connector.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from pierhead.llm.openai_error import kind_of

PARAMS = "kv_transfer_params"

_ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_overrides(members: Collection[str]) -> str:
    """LLMRequest.overrides for the prefill service. `members`: those of the body; some of them exclude one token
    that is not streamed.
    """
    overrides: dict[str, object] = {"max_tokens": 1, "stream": False, PARAMS: _ASK}
    alike = {"max_completion_tokens": 1, "min_tokens": 0, "stream_options": None}
    return json.dumps(overrides | {name: value for name, value in alike.items() if name in members})


def decode_overrides(answer: bytes) -> str:
    """LLMRequest.overrides for the decode service, from prefill's answer; "" if there is no state to transfer, as for a
    prompt that fills no block. Raises ValueError for an invalid answer.
    """
    found = json.loads(answer)
    if not isinstance(found, dict):
        raise ValueError("expected an object")  # noqa: TRY004 - one error for what is no answer
    params = found.get(PARAMS)
    if params is not None and not isinstance(params, dict):
        raise ValueError(f"{PARAMS}: expected an object, found {kind_of(params)}")
    return json.dumps({PARAMS: params}) if params else ""
