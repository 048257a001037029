"""vLLM's start as people see it: read from lines that vLLM 0.32 wrote."""

from __future__ import annotations

import pytest
from pierhead.llm.server.engines.vllm.start import arguments, explanation, stage_of


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("(Worker pid=1) INFO 11-22 01:41:10 [cpu_model_runner.py:73] Starting to load model /m...", "loading weights"),
        ("(Worker pid=1) INFO 11-22 [default_loader.py:430] Loading weights took 0.47 seconds", "weights are loaded"),
        ("(EngineCore pid=1) INFO [kv_cache_utils.py:1632] GPU KV cache size: 46,592 tokens", "memory is measured"),
        ("(Worker pid=1) INFO [cpu_model_runner.py:84] Warming up model for the compilation...", "warming up"),
        ("(EngineCore pid=1) INFO [core.py:310] init engine (profile, ...) took 3 s", "engine is up"),
        ("(EngineCore pid=1) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0)", None),
        ("", None),
    ],
)
def test_lines_of_the_log_are_stages(line: str, stage: str | None) -> None:
    assert stage_of(line) == stage


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("ValueError: Model architectures ['NopeForCausalLM'] are not supported for now.", "['NopeForCausalLM']"),
        ("The checkpoint has model type `nope` but Transformers does not recognize this architecture", "type nope"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "tensor_parallel_size"),
        ("RuntimeError: Insufficient space in /dev/shm for shared-memory: 160 MiB required, 64 MiB free.", "shm_size"),
        ("ValueError: Sleep mode is not supported on current platform.", "enable_sleep_mode out"),
        ("RuntimeError: NIXL is not available", "the package nixl"),
        ("ValueError: Free memory on device (1/80 GiB) on startup is less than desired GPU memory", "another process"),
        ("ValueError: No available memory for the cache blocks.", "max_model_len"),
        ("World size (4) is larger than the number of available GPUs (1) in this node", "4 GPUs and sees 1"),
        ("RuntimeError: Failed to infer device type, please set the environment variable `X`", "and sees no GPU"),
        ("RuntimeError: No CUDA GPUs are available", "and sees no GPU"),
        ("RuntimeError: Found no NVIDIA driver on your system. Please check that you have one.", "and sees no GPU"),
        ("RepositoryNotFoundError: 404 Client Error", "no such model at Hugging Face"),
        ("OSError: We couldn't connect to the Hub", "cannot be reached"),
        ("RuntimeError: Cannot find any model weights with `/m`", "does not hold a whole model"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "damaged"),
    ],
)
def test_a_known_failure_says_what_to_do_and_what_vllm_said(said: str, advice: str) -> None:
    told = explanation("/m", "RuntimeError: Engine core initialization failed.", ["before", said, "after"])
    assert told.startswith("/m could not be loaded: ")
    assert advice in told
    assert told.endswith(f"vLLM: {said}")


def test_an_unknown_failure_shows_the_last_exception_and_the_end_of_the_log() -> None:
    told = explanation("/m", "RuntimeError: it is broken", [f"line {number}" for number in range(20)])
    assert told.splitlines() == [
        "/m could not be loaded. vLLM: RuntimeError: it is broken",
        *[f"line {number}" for number in range(12, 20)],
    ]
    log = [
        "(EngineCore pid=21) ERROR 11-22 02:11:22 [core.py:1510] Traceback (most recent call last):",
        '(EngineCore pid=21) ERROR 11-22 02:11:22 [core.py:1510]   File "core.py", line 1482, in run_engine_core',
        "(EngineCore pid=21) ERROR 11-22 02:11:22 [core.py:1510] RuntimeError: the moon is in the way",
        "(EngineCore pid=21) Process EngineCore:",
    ]
    told = explanation("/m", "RuntimeError: Engine core initialization failed. See root cause above.", log)
    assert told.splitlines() == ["/m could not be loaded. vLLM: RuntimeError: the moon is in the way", *log]


def test_settings_become_words_of_vllms_command_line() -> None:
    settings = {
        "max_model_len": 2048,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_transfer_config": {"kv_connector": "NixlConnector"},
        "middleware": ["a", "b"],
        "seed": None,
    }
    assert arguments(settings.items()) == [
        "--max-model-len=2048",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        '--kv-transfer-config={"kv_connector": "NixlConnector"}',
        "--middleware",
        "a",
        "b",
    ]
