"""Language models: latencies and use at the gateways, and load of the engines.

    python -m dashboards.build_llm

In the gateways' metrics `service` is the gateway and `target` the LLM service, so `$service`, an LLM service, is their
target. The metrics of engines have names of their own: `vllm:...`, and `mock:...` for the mock engine. See `panels`.
"""

from __future__ import annotations

from collections.abc import Callable

from dashboards.panels import Page, Panel, Query, S, Section, W, quantile, quantiles, rate, write

T = 'target=~"$service"'
"""Selector for the gateways' metrics."""
ANY = 'target=~"$service|"'
"""The same, with requests for models that do not exist."""

FIRST, PER_TOKEN, WHOLE = (
    "pierhead_llm_time_to_first_token_seconds",
    "pierhead_llm_time_per_output_token_seconds",
    "pierhead_llm_request_seconds",
)


def tokens(by: str) -> str:
    """Tokens per second at the gateways, counted at the end of each request."""
    return rate("pierhead_llm_tokens_total", by, of=T)


def engines(expr: Callable[[str], str]) -> str:
    """An expression over the metrics of any engine: `expr` gets the prefix of their names."""
    return f"{expr('vllm')} or {expr('mock')}"


def hit_rate(by: str) -> str:
    """Share of prompt tokens that engines found in their prefix caches."""
    return engines(
        lambda it: f"{rate(f'{it}:prefix_cache_hits_total', by)} / {rate(f'{it}:prefix_cache_queries_total', by)}"
    )


AT_A_GLANCE = Section(
    "At a glance",
    (
        Panel(
            "Requests/s",
            (Query(f"sum(rate(pierhead_llm_requests_total{{{ANY}}}{W}))", "requests/s"),),
            "Requests that the gateways answered, including refusals.",
            unit="reqps",
            width=4,
            kind="stat",
        ),
        Panel(
            "Answers 5xx",
            (
                Query(
                    f'(sum(rate(pierhead_llm_requests_total{{{ANY}, code=~"5.."}}{W})) or vector(0))'
                    f" / sum(rate(pierhead_llm_requests_total{{{ANY}}}{W}))",
                    "5xx",
                ),
            ),
            "Share of the answers that are 5xx; a stream that broke off counts with the status of its error.",
            unit="percentunit",
            width=4,
            kind="stat",
            warn_above=0.01,
        ),
        Panel(
            "First token, p99 of the slowest",
            (Query(f"max({quantile(0.99, FIRST, 'target', T)})", "p99"),),
            "99 % of the streams of the slowest service got their first token within this time.",
            unit="s",
            width=4,
            kind="stat",
        ),
        Panel(
            "Tokens/s",
            (
                Query(f"sum({engines(lambda it: rate(f'{it}:generation_tokens_total'))})", "generated"),
                Query(f"sum({engines(lambda it: rate(f'{it}:prompt_tokens_total'))})", "read"),
            ),
            "Tokens that all engines generate, and prompt tokens that they process.",
            width=4,
            kind="stat",
        ),
        Panel(
            "Running and waiting",
            (
                Query(f"sum(pierhead_llm_engine_running{{{S}}})", "running"),
                Query(f"sum(pierhead_llm_engine_waiting{{{S}}})", "waiting"),
            ),
            "Requests for which engines generate tokens, and requests that wait in engines.",
            width=4,
            kind="stat",
        ),
        Panel(
            "Fullest KV cache",
            (Query(f"max(pierhead_llm_engine_kv_use{{{S}}})", "in use"),),
            "Share of the key-value cache in use, for the replica with the least free.",
            unit="percentunit",
            width=4,
            kind="stat",
            warn_above=0.95,
        ),
    ),
)

CLIENTS = Section(
    "Latency: measured by the gateways",
    (
        Panel(
            "Time to first token",
            quantiles(FIRST, "model, target", T),
            "For streams: from a request's arrival at the gateway to its first token.",
            unit="s",
        ),
        Panel(
            "Time per output token",
            quantiles(PER_TOKEN, "model, target", T),
            "For streams: between the tokens after the first; one value per request.",
            unit="s",
        ),
        Panel(
            "End to end",
            quantiles(WHOLE, "model, target", T),
            "From a request's arrival at the gateway to the end of its answer, streamed or not.",
            unit="s",
        ),
    ),
)

USE = Section(
    "Use: counted by the gateways",
    (
        Panel(
            "Requests/s by code",
            (Query(rate("pierhead_llm_requests_total", "model, code", of=ANY), "{{model}} {{code}}"),),
            "HTTP status of the answers, or of the error that ended a stream; without a model: unknown model name.",
            unit="reqps",
            width=6,
            stacked=True,
        ),
        Panel(
            "Requests/s by finish reason",
            (
                Query(
                    rate("pierhead_llm_requests_total", "model, finish_reason", ', finish_reason!=""', T),
                    "{{model}} {{finish_reason}}",
                ),
            ),
            "Why answers ended: stop, length (max_tokens), tool_calls, abort (the client disconnected), error.",
            unit="reqps",
            width=6,
            stacked=True,
        ),
        Panel(
            "Tokens/s",
            (Query(tokens("model, kind"), "{{model}} {{kind}}"),),
            "Tokens of ended requests: of prompts, of completions, and prompt tokens found in a cache.",
            width=6,
        ),
        Panel(
            "Tokens/s by key",
            (Query(tokens("key, kind"), "{{key}} {{kind}}"),),
            "Tokens of ended requests by the name of the API key; without keys the name is empty.",
            width=6,
            stacked=True,
        ),
    ),
)

ENGINES = Section(
    "Engines",
    (
        Panel(
            "Generated tokens/s by replica",
            (
                Query(
                    engines(lambda it: rate(f"{it}:generation_tokens_total", "service, model_name, replica")),
                    "{{model_name}} {{replica}}",
                ),
            ),
            "Tokens that each engine generates, including answers in progress.",
        ),
        Panel(
            "Prompt tokens/s by replica",
            (
                Query(
                    engines(lambda it: rate(f"{it}:prompt_tokens_total", "service, model_name, replica")),
                    "{{model_name}} {{replica}}",
                ),
            ),
            "Prompt tokens that each engine processes.",
        ),
        Panel(
            "Prefix cache hits",
            (
                Query(hit_rate("service"), "{{service}}"),
                Query(hit_rate("service, replica"), "{{replica}}"),
            ),
            "Share of prompt tokens found in the prefix cache. If it is low although prompts share their beginnings, "
            "look at the service's router policy (`prefix`).",
            unit="percentunit",
        ),
        Panel(
            "KV cache in use",
            (Query(f"pierhead_llm_engine_kv_use{{{S}}}", "{{replica}}"),),
            "Share of each engine's key-value cache that running requests use. Full: requests wait or are preempted.",
            unit="percentunit",
        ),
        Panel(
            "Running",
            (Query(f"pierhead_llm_engine_running{{{S}}}", "{{replica}}"),),
            "Requests for which each engine generates tokens: how evenly they are distributed.",
        ),
        Panel(
            "Waiting",
            (Query(f"pierhead_llm_engine_waiting{{{S}}}", "{{replica}}"),),
            "Requests that wait in each engine for a slot or for free cache.",
        ),
    ),
)

VLLM = Section(
    "Measured by vLLM",
    (
        Panel(
            "Wait in the engine",
            quantiles("vllm:request_queue_time_seconds", "service, model_name"),
            "From a request's arrival in the engine to its start.",
            unit="s",
            width=6,
        ),
        Panel(
            "Prefill",
            quantiles("vllm:request_prefill_time_seconds", "service, model_name"),
            "Processing of the prompt: from the start of a request to its first token.",
            unit="s",
            width=6,
        ),
        Panel(
            "Between tokens",
            quantiles("vllm:inter_token_latency_seconds", "service, model_name"),
            "In the engine. The gateways' time per output token adds the way to the gateway.",
            unit="s",
            width=6,
        ),
        Panel(
            "Preemptions/s",
            (Query(rate("vllm:num_preemptions_total", "service, replica"), "{{replica}}"),),
            "Requests preempted because the cache was full: their work is repeated.",
            unit="ops",
            width=6,
        ),
    ),
)

SECTIONS = (AT_A_GLANCE, CLIENTS, USE, ENGINES)
"""Sections that have data with every engine."""

PAGE = Page(
    uid="pierhead-llm",
    title="Pierhead LLM",
    description="Language models: latencies, tokens and keys at the gateways; load and caches of the engines.",
    services="pierhead_llm_engine_running",
    sections=(*SECTIONS, VLLM),
)

if __name__ == "__main__":
    write(PAGE)
