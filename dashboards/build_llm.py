"""Language models: what clients wait for and use, at the gateways, and what the engines do.

    python -m dashboards.build_llm

On the gateways' metrics `service` is the gateway and `target` the LLM service, so `$service`, an LLM service, is their
target. Engines tell their metrics under names of their own: `vllm:...`, and the mock engine's `mock:...` for those that
it has. See `panels`.
"""

from __future__ import annotations

from collections.abc import Callable

from dashboards.panels import Page, Panel, Query, S, Section, W, quantile, quantiles, rate, write

T = 'target=~"$service"'
"""The gateways' part of what the page is to show."""
ANY = 'target=~"$service|"'
"""The same, with requests for models that there are not."""

FIRST, PER_TOKEN, WHOLE = (
    "pierhead_llm_time_to_first_token_seconds",
    "pierhead_llm_time_per_output_token_seconds",
    "pierhead_llm_request_seconds",
)


def tokens(by: str, kind: str = "") -> str:
    """Tokens per second at the gateways, counted at the end of each request."""
    where = f', kind="{kind}"' if kind else ""
    return rate("pierhead_llm_tokens_total", by, where, T)


def engines(expr: Callable[[str], str]) -> str:
    """An expression over an engine's own metrics, whichever engine it is: `expr` is given the prefix of their names."""
    return f"{expr('vllm')} or {expr('mock')}"


def hit_rate(by: str) -> str:
    """Share of the prompts' tokens that engines found in their prefix caches."""
    return engines(
        lambda it: f"{rate(f'{it}:prefix_cache_hits_total', by)} / {rate(f'{it}:prefix_cache_queries_total', by)}"
    )


AT_A_GLANCE = Section(
    "At a glance",
    (
        Panel(
            "Requests/s",
            (Query(f"sum(rate(pierhead_llm_requests_total{{{ANY}}}{W}))", "requests/s"),),
            "Requests that the gateways answered, refused ones included.",
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
            "Share of the answers that are 5xx; streams that broke off count as what broke them.",
            unit="percentunit",
            width=4,
            kind="stat",
            warn_above=0.01,
        ),
        Panel(
            "First token, p99 of the slowest",
            (Query(f"max({quantile(0.99, FIRST, 'target', T)})", "p99"),),
            "99 % of the streams of the slowest service had their first token after at most this long.",
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
            "Tokens that all engines generate, and tokens of prompts that they read.",
            width=4,
            kind="stat",
        ),
        Panel(
            "Running and waiting",
            (
                Query(f"sum(pierhead_llm_engine_running{{{S}}})", "running"),
                Query(f"sum(pierhead_llm_engine_waiting{{{S}}})", "waiting"),
            ),
            "Requests that engines generate for, and those that wait within them.",
            width=4,
            kind="stat",
        ),
        Panel(
            "Fullest KV cache",
            (Query(f"max(pierhead_llm_engine_kv_use{{{S}}})", "in use"),),
            "Share of the key-value cache in use, of the replica that has the least left.",
            unit="percentunit",
            width=4,
            kind="stat",
            warn_above=0.95,
        ),
    ),
)

CLIENTS = Section(
    "What clients wait for: the gateways' clocks",
    (
        Panel(
            "Time to first token",
            quantiles(FIRST, "model, target", T),
            "From a request's arrival at the gateway to its first token, of streams.",
            unit="s",
        ),
        Panel(
            "Time per output token",
            quantiles(PER_TOKEN, "model, target", T),
            "Between the tokens after the first, of streams; one value per request.",
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
    "What clients use: the gateways' books",
    (
        Panel(
            "Requests/s by code",
            (Query(rate("pierhead_llm_requests_total", "model, code", of=ANY), "{{model}} {{code}}"),),
            "HTTP status of the answers, or of what ended a stream; no model: none of that name.",
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
            "Why answers ended: stop, length (max_tokens), tool_calls, abort (the client left), error.",
            unit="reqps",
            width=6,
            stacked=True,
        ),
        Panel(
            "Tokens/s",
            (Query(tokens("model, kind"), "{{model}} {{kind}}"),),
            "Tokens of ended requests: of prompts, of completions, and those of prompts that a cache had.",
            width=6,
        ),
        Panel(
            "Tokens/s by key",
            (Query(tokens("key, kind"), "{{key}} {{kind}}"),),
            "Tokens of ended requests by the API key's name; without keys the name is empty.",
            width=6,
            stacked=True,
        ),
    ),
)

ENGINES = Section(
    "Engines: what they do",
    (
        Panel(
            "Generated tokens/s by replica",
            (
                Query(
                    engines(lambda it: rate(f"{it}:generation_tokens_total", "service, model_name, replica")),
                    "{{model_name}} {{replica}}",
                ),
            ),
            "Tokens as each engine makes them, of answers that go on included.",
        ),
        Panel(
            "Prompt tokens/s by replica",
            (
                Query(
                    engines(lambda it: rate(f"{it}:prompt_tokens_total", "service, model_name, replica")),
                    "{{model_name}} {{replica}}",
                ),
            ),
            "Tokens of prompts that each engine took in.",
        ),
        Panel(
            "Prefix cache hits",
            (
                Query(hit_rate("service"), "{{service}}"),
                Query(hit_rate("service, replica"), "{{replica}}"),
            ),
            "Share of the prompts' tokens that the engine had read before. Low where prompts begin alike: look at the "
            "service's router policy (`prefix`).",
            unit="percentunit",
        ),
        Panel(
            "KV cache in use",
            (Query(f"pierhead_llm_engine_kv_use{{{S}}}", "{{replica}}"),),
            "Share of each engine's key-value cache that running requests have. Full: requests wait or are preempted.",
            unit="percentunit",
        ),
        Panel(
            "Running",
            (Query(f"pierhead_llm_engine_running{{{S}}}", "{{replica}}"),),
            "Requests that each engine generates for: how evenly they are spread.",
        ),
        Panel(
            "Waiting",
            (Query(f"pierhead_llm_engine_waiting{{{S}}}", "{{replica}}"),),
            "Requests that wait within each engine, for a slot or for room in its cache.",
        ),
    ),
)

VLLM = Section(
    "vLLM's own clocks",
    (
        Panel(
            "Wait in the engine",
            quantiles("vllm:request_queue_time_seconds", "service, model_name"),
            "From a request's arrival in the engine to its first work on it.",
            unit="s",
            width=6,
        ),
        Panel(
            "Prefill",
            quantiles("vllm:request_prefill_time_seconds", "service, model_name"),
            "How long prompts took to read, from the first work on a request to its first token.",
            unit="s",
            width=6,
        ),
        Panel(
            "Between tokens",
            quantiles("vllm:inter_token_latency_seconds", "service, model_name"),
            "Within the engine; what the gateways' time per output token has beyond it is the way.",
            unit="s",
            width=6,
        ),
        Panel(
            "Preemptions/s",
            (Query(rate("vllm:num_preemptions_total", "service, replica"), "{{replica}}"),),
            "Requests that were put back for others, because the cache was full: their work is done again.",
            unit="ops",
            width=6,
        ),
    ),
)

SECTIONS = (AT_A_GLANCE, CLIENTS, USE, ENGINES)
"""Those that every engine fills."""

PAGE = Page(
    uid="pierhead-llm",
    title="Pierhead LLM",
    description="Language models: times, tokens and keys at the gateways; load and caches of the engines.",
    services="pierhead_llm_engine_running",
    sections=(*SECTIONS, VLLM),
)

if __name__ == "__main__":
    write(PAGE)
