"""Reads from vLLM's log the stages of its start, and what to do when it fails. vLLM's engine runs in a process of its
own and reports failures only in that log. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

LAST_LINES = 8
"""How many lines of the log an error shows if the cause is unknown."""


_STAGES = (
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "weights are loaded"),
    ("Dynamo bytecode transform time", "compiling"),
    ("Profiling CUDA graph", "measuring memory"),
    ("KV cache size", "memory is measured"),
    ("Capturing", "capturing graphs"),
    ("Warming up model", "warming up"),
    ("init engine", "engine is up"),
)
"""Parts of vLLM's own lines, and what they mean."""


def stage_of(line: str) -> str | None:
    """The stage that a line of vLLM's log begins; None for most of them."""
    return next((what for part, what in _STAGES if part in line), None)


_KNOWN = {
    r"(?:Model architectures? (\[[^\]]*\])[^\n]*not supported)": (
        "vLLM does not support its architecture {0}. Take another model, or an image with a newer vLLM"
    ),
    r"model type [`'\"]?([\w-]+)[`'\"]? but Transformers does not recognize": (
        "vLLM does not know its model type {0}. Take another model, or an image with a newer vLLM"
    ),
    r"World size \((\d+)\) is larger than the number of available GPUs \((\d+)\)": (
        "it needs {0} GPUs and sees {1}. Give the service as many GPUs as tensor_parallel_size times "
        "pipeline_parallel_size"
    ),
    r"Failed to infer device type|No CUDA GPUs are available|Found no NVIDIA driver": (
        "this image's vLLM is built for GPUs, and sees no GPU. Give the service one "
        "(deploy.resources.reservations.devices), or take the image for CPUs, pierhead/llm-cpu"
    ),
    r"NIXL is not available": (
        "NixlConnector needs the package nixl. The image for GPUs, pierhead/llm-cuda, has it; install it in others"
    ),
    r"Sleep mode is not supported on current platform": (
        "it has a sleep mode on GPUs only. Leave engine_kwargs enable_sleep_mode out"
    ),
    r"Insufficient space in /dev/shm[^\n]*": (
        "its processes exchange tensors in /dev/shm, which is too small. Write shm_size: 2gb into the service "
        "(16gb for several GPUs)"
    ),
    r"out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate|Cannot allocate memory|std::bad_alloc": (
        "it ran out of memory. Use more GPUs (tensor_parallel_size), a smaller or quantized model, or lower "
        "engine_kwargs max_model_len, max_num_seqs or gpu_memory_utilization"
    ),
    r"Free memory on device[^\n]*is less than desired|less than (?:the )?desired (?:GPU|CPU) memory": (
        "another process uses part of the memory that it may use. Free it, or lower engine_kwargs "
        "gpu_memory_utilization"
    ),
    (
        r"No available memory for the cache blocks|KV cache is needed, which is larger than the available"
        r"|max seq len[^\n]*larger than the maximum number of tokens that can be stored in KV cache"
    ): (
        "no memory is left for the key-value cache of even one request of full length. Lower engine_kwargs "
        "max_model_len, raise gpu_memory_utilization (on CPUs: VLLM_CPU_KVCACHE_SPACE, in GiB), or use more GPUs"
    ),
    r"max_model_len \((\d+)\) is greater than the derived max_model_len \(([^)]*)\)": (
        "engine_kwargs max_model_len is {0}, and the model reads no more ({1}). Lower it"
    ),
    r"GatedRepoError|Access to model ([\w./-]+) is restricted|401 Client Error": (
        "access to the model is restricted. Accept its licence at Hugging Face, and give the service a token "
        "in HF_TOKEN"
    ),
    r"RepositoryNotFoundError|Repository Not Found|is not a valid model identifier|is not a local folder": (
        "there is no such model at Hugging Face. Correct model_loading.model_source, or give HF_TOKEN if it is private"
    ),
    (
        r"LocalEntryNotFoundError|outgoing traffic has been disabled|HF_HUB_OFFLINE|couldn't connect to|"
        r"MaxRetryError|Name or service not known|Temporary failure in name resolution"
    ): (
        "the model is not in the cache (HF_HOME), and Hugging Face cannot be reached from here. Give a directory in "
        "model_loading.model_source, or see to the network"
    ),
    (
        r"Cannot find any model weights|does not appear to have (?:a file named|files named)|"
        r"Can't load the configuration of|config\.json[^\n]*(?:not found|No such file)|"
        r"Invalid repository ID or local directory"
    ): (
        "the directory does not hold a whole model: config.json, the tokenizer and *.safetensors. Copy it again, or "
        "correct model_loading.model_source"
    ),
    r"(?:incomplete metadata|HeaderTooLarge|InvalidHeaderDeserialization|MetadataIncompleteBuffer|SafetensorError)": (
        "its weights are damaged or only partly there. Copy or load the model again"
    ),
}
"""A pattern in vLLM's log, and what to do, with the pattern's groups."""


def explanation(model: str, error: str, log: Sequence[str]) -> str:
    """The message for a start of `model` that failed with `error` and wrote `log`: one sentence where the cause is
    known, else vLLM's own error and the log's last lines."""
    text = "\n".join((error, *log))
    for pattern, advice in _KNOWN.items():
        if found := re.search(pattern, text, re.IGNORECASE):
            return f"{model} could not be loaded: {advice.format(*found.groups())}. vLLM: {_said(found, text)}"
    end = "\n".join(log[-LAST_LINES:])
    return f"{model} could not be loaded. vLLM: {_cause(log) or error}" + (f"\n{end}" if end else "")


_EXCEPTION = re.compile(r"(?:\([^)]*\) \w+ [^\]]*\] )?([\w.]*(?:Error|Exception): .+)")
"""The last line of a traceback in vLLM's log: "(EngineCore pid=7) ERROR 11-22 [core.py:1510] ValueError: ..."."""


def _cause(log: Sequence[str]) -> str:
    """The last exception that the log names. The one that vLLM raises says only that a process has ended."""
    found = (_EXCEPTION.fullmatch(line.strip()) for line in reversed(log))
    return next((match[1] for match in found if match), "")


def _said(found: re.Match[str], text: str) -> str:
    start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    return text[start : end if end >= 0 else len(text)].strip()[:500]


def arguments(settings: Iterable[tuple[str, object]]) -> list[str]:
    """Settings as words of a command line, as vLLM's own parser reads them: `max_model_len: 2048` becomes
    `--max-model-len=2048`, true and false become `--name` and `--no-name`, mappings JSON; None leaves a setting out."""
    import json

    words: list[str] = []
    for name, value in settings:
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if value is True:
            words.append(flag)
        elif value is False:
            words.append("--no-" + name.replace("_", "-"))
        elif isinstance(value, list | tuple):
            words += [flag, *(json.dumps(each) if isinstance(each, dict) else str(each) for each in value)]
        else:
            words.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return words
