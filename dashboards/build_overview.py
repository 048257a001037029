"""The overview: traffic, services, calls between them, replicas and GPUs of one stack.

    python -m dashboards.build_overview

See `panels`.
"""

from __future__ import annotations

from dashboards.panels import Page, Panel, Query, S, Section, W, quantile, quantiles, rate, write


def mean(histogram: str) -> str:
    """Mean of what a batch histogram observed."""
    return f"{rate(f'{histogram}_sum', 'service, batch')} / {rate(f'{histogram}_count', 'service, batch')}"


def or_zero(expr: str) -> str:
    """A counter that nothing has happened to yet has no series: draw 0 for every service whose replicas are there."""
    return f"{expr} or sum by (service) (pierhead_ongoing_requests{{{S}}}) * 0"


# Answers that are the service's own fault: HTTP status, or the name of a gRPC status.
_ERROR_CODES = ', code=~"5..|UNKNOWN|INTERNAL|DATA_LOSS|DEADLINE_EXCEEDED"'
ERROR_SHARE = f"({or_zero(rate('pierhead_requests_total', where=_ERROR_CODES))}) / {rate('pierhead_requests_total')}"

AT_A_GLANCE = Section(
    "At a glance",
    (
        Panel(
            "Requests/s",
            (Query(f"sum(rate(haproxy_backend_http_requests_total{{{S}}}{W}))", "requests/s"),),
            "What clients send through HAProxy, HTTP and gRPC.",
            unit="reqps",
            width=3,
            kind="stat",
        ),
        Panel(
            "Answers 5xx",
            (
                Query(
                    f'sum(rate(haproxy_backend_http_responses_total{{{S}, code="5xx"}}{W}))'
                    f" / sum(rate(haproxy_backend_http_responses_total{{{S}}}{W}))",
                    "5xx",
                ),
            ),
            "Share of HAProxy's answers that are 5xx. A gRPC error is HTTP 200 here: see the services' own error rate.",
            unit="percentunit",
            width=3,
            kind="stat",
            warn_above=0.01,
        ),
        Panel(
            "p99 of the slowest",
            (Query(f"max({quantile(0.99, 'pierhead_request_duration_seconds')})", "p99"),),
            "99 % of the requests to the slowest service took at most this long, within its replicas.",
            unit="s",
            width=3,
            kind="stat",
        ),
        Panel(
            "In flight",
            (Query(f"sum(pierhead_ongoing_requests{{{S}}})", "in flight"),),
            "Requests that replicas have accepted and not yet answered.",
            width=3,
            kind="stat",
        ),
        Panel(
            "Replicas ready",
            (
                Query(f"sum(pierhead_service_ready_replicas{{{S}}})", "ready"),
                Query(f"sum(pierhead_service_wanted_replicas{{{S}}})", "wanted"),
            ),
            "Replicas that pass their readiness probe, and the number asked for.",
            width=4,
            kind="stat",
        ),
        Panel(
            "GPU slots",
            (
                Query("sum(pierhead_gpu_slots_used)", "used"),
                Query("sum(pierhead_gpu_slots)", "there"),
            ),
            "GPU slots that replicas occupy, and all there are.",
            width=4,
            kind="stat",
        ),
        Panel(
            "Alerts firing",
            (Query('count(ALERTS{alertstate="firing"}) or vector(0)', "firing"),),
            "Alerts of dashboards/prometheus/rules that fire now; Prometheus' /classic/alerts page says which and why.",
            width=4,
            kind="stat",
            warn_above=0.5,
        ),
    ),
)


EDGE = Section(
    "At the edge: HAProxy",
    (
        Panel(
            "Requests/s",
            (Query(rate("haproxy_backend_http_requests_total"), "{{service}}"),),
            "Requests that clients sent, by the service they went to.",
            unit="reqps",
        ),
        Panel(
            "Answers/s by status",
            (Query(rate("haproxy_backend_http_responses_total", "code"), "{{code}}"),),
            "HTTP status classes of the answers. gRPC answers are 2xx, whatever their grpc-status.",
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Answers 5xx",
            (
                Query(
                    rate("haproxy_backend_http_responses_total", where=', code="5xx"')
                    + " / "
                    + rate("haproxy_backend_http_responses_total"),
                    "{{service}}",
                ),
            ),
            "Share of a service's answers that are 5xx, HAProxy's own included: no replica, queue timeout.",
            unit="percentunit",
        ),
        Panel(
            "In flight and waiting",
            (
                Query(f"sum by (service) (haproxy_server_current_sessions{{{S}}})", "{{service}} in flight"),
                Query(
                    f"sum by (service) (haproxy_backend_current_queue{{{S}}})"
                    f" + sum by (service) (haproxy_server_current_queue{{{S}}})",
                    "{{service}} waiting",
                ),
            ),
            "Requests that replicas work on for HAProxy, and those that wait because every replica has"
            " max_ongoing_requests.",
        ),
        Panel(
            "Held for a first replica",
            (
                Query(f"sum by (service) (pierhead_edge_held_requests{{{S}}})", "{{service}} held"),
                Query(rate("pierhead_edge_ended_holds_total", "service, ending"), "{{service}} {{ending}}/s"),
            ),
            "Requests that wait at HAProxy because no replica takes traffic (they wake a service that was scaled to"
            " zero), and how the waiting of others ended: served; expired, none came in time; left, the client went"
            " away; refused, too many waited.",
        ),
        Panel(
            "Servers up",
            (Query(f"sum by (service) (haproxy_backend_active_servers{{{S}}})", "{{service}}"),),
            "Replicas that HAProxy gives new requests to: registered, healthy, not draining.",
        ),
        Panel(
            "Retries and redispatches/s",
            (
                Query(rate("haproxy_backend_retry_warnings_total"), "{{service}} connected again"),
                Query(rate("haproxy_backend_redispatch_warnings_total"), "{{service}} sent to another"),
            ),
            "Requests whose replica took no connection: tried again, or given to another one.",
            unit="reqps",
        ),
    ),
)

SERVICES = Section(
    "Services: what their replicas say",
    (
        Panel(
            "Requests/s",
            (Query(rate("pierhead_requests_total", "service, method"), "{{service}} {{method}}"),),
            "Requests answered, by method, refused ones included.",
            unit="reqps",
        ),
        Panel(
            "Errors",
            (Query(ERROR_SHARE, "{{service}}"),),
            "Share of the answers that are errors of the service: HTTP 5xx; gRPC UNKNOWN, INTERNAL, DATA_LOSS,"
            " DEADLINE_EXCEEDED.",
            unit="percentunit",
        ),
        Panel(
            "p50, p90, p99",
            quantiles("pierhead_request_duration_seconds"),
            "From accepting a request to its end, within the replica.",
            unit="s",
        ),
        Panel(
            "In flight",
            (Query(f"sum by (service) (pierhead_ongoing_requests{{{S}}})", "{{service}}"),),
            "Requests accepted and not yet answered.",
        ),
        Panel(
            "In flight per replica",
            (Query(f"pierhead_ongoing_requests{{{S}}}", "{{replica}}"),),
            "How evenly requests are spread over a service's replicas.",
        ),
        Panel(
            "Refused/s",
            (Query(or_zero(rate("pierhead_refused_requests_total")), "{{service}}"),),
            "Requests refused before any work, because the replica is full or draining; the caller tries another.",
            unit="reqps",
        ),
    ),
)

CALLS = Section(
    "Calls between services: what their callers say",
    (
        Panel(
            "Calls/s",
            (Query(rate("pierhead_handle_requests_total", "service, target"), "{{service}} to {{target}}"),),
            "Calls made through handles.",
            unit="reqps",
            width=6,
        ),
        Panel(
            "p50, p90, p99",
            quantiles("pierhead_handle_duration_seconds", "target"),
            "Calls as their caller saw them, queueing and retries included, by the service called.",
            unit="s",
            width=6,
        ),
        Panel(
            "Waiting for a replica",
            (Query(f"sum by (service, target) (pierhead_queued_requests{{{S}}})", "{{service}} for {{target}}"),),
            "Calls that wait in their caller, because every replica of the called service is full.",
            width=6,
        ),
        Panel(
            "Retries/s",
            (Query(or_zero(rate("pierhead_handle_retries_total")), "{{service}}"),),
            "Calls given to another replica: the first one refused, drained or could not be reached.",
            unit="reqps",
            width=6,
        ),
    ),
)

BATCHES = Section(
    "Batches",
    (
        Panel(
            "Requests per batch",
            (Query(mean("pierhead_batch_size"), "{{service}} {{batch}}"),),
            "Mean number of requests that were computed together.",
        ),
        Panel(
            "Wait for a batch, p90",
            (Query(quantile(0.9, "pierhead_batch_wait_seconds", "service, batch"), "{{service}} {{batch}}"),),
            "How long a batch's oldest request waited for the others.",
            unit="s",
        ),
        Panel(
            "Batch computed in, p90",
            (Query(quantile(0.9, "pierhead_batch_duration_seconds", "service, batch"), "{{service}} {{batch}}"),),
            "How long a batch took to compute.",
            unit="s",
        ),
    ),
)

INSIDE = Section(
    "Inside replicas: event loops, models, broken replicas",
    (
        Panel(
            "Event loop lag",
            (Query(f"max by (service) (pierhead_event_loop_lag_seconds{{{S}}})", "{{service}}"),),
            "How late the slowest replica's loop ran what was due. High: something blocks it, or its core is full.",
            unit="s",
            width=6,
        ),
        Panel(
            "Event loop blocked",
            (Query(f"max by (service) (rate(pierhead_event_loop_blocked_seconds_total{{{S}}}{W}))", "{{service}}"),),
            "Share of the time in which code kept a loop from all else, 0.2 s or more at once; the log names it.",
            unit="percentunit",
            width=6,
        ),
        Panel(
            "Left out as broken",
            (
                Query(
                    f"sum by (service, target) (increase(pierhead_handle_ejections_total{{{S}}}{W}))",
                    "{{service}} of {{target}}",
                ),
            ),
            "Times that a caller left a replica out for a while, because calls to it failed.",
            width=6,
        ),
        Panel(
            "Models loaded/s",
            (Query(or_zero(rate("pierhead_multiplex_loads_total")), "{{service}}"),),
            "Loads of multiplexed models. As many as requests: replicas hold too few, or callers name no model.",
            unit="ops",
            width=6,
        ),
    ),
)

CHANGES = Section(
    "Autoscaling and versions",
    (
        Panel(
            "Load",
            (
                Query(
                    f"sum by (service) (pierhead_service_autoscale_load{{{S}}})"
                    f" or sum by (service) (pierhead_ongoing_requests{{{S}}})",
                    "{{service}}",
                ),
            ),
            "Requests in work and waiting, as the autoscaler sees them; without one, those in work.",
            width=6,
        ),
        Panel(
            "Replicas that the load asks for",
            (
                Query(
                    f"sum by (service) (pierhead_service_autoscale_wanted_replicas{{{S}}})"
                    f" or sum by (service) (pierhead_service_wanted_replicas{{{S}}})",
                    "{{service}} asked for",
                ),
                Query(f"sum by (service) (pierhead_service_ready_replicas{{{S}}})", "{{service}} ready"),
            ),
            "What the autoscaling policy asks for now, before its delays; without one, the number that is set.",
            width=6,
        ),
        Panel(
            "Serving replicas by version",
            (
                Query(
                    f'sum by (service, version) (pierhead_service_replica_state{{{S}, state="RUNNING"}})',
                    "{{service}} {{version}}",
                ),
            ),
            "While a service changes its version, two of them serve.",
            width=6,
            stacked=True,
        ),
        Panel(
            "Changes of version",
            (
                Query(f"sum by (service) (pierhead_service_rollout_age_seconds{{{S}}})", "{{service}} goes on since"),
                Query(f"sum by (service) (pierhead_service_rolled_back{{{S}}})", "{{service}} rolled back"),
            ),
            "How long a change of version has been going on, in seconds; 1 while the files give a version that was"
            " rolled back. `pierhead why SERVICE` gives the reason.",
            width=6,
        ),
    ),
)

CONTROL = Section(
    "Replicas and GPUs",
    (
        Panel(
            "Replicas wanted and ready",
            (
                Query(f"sum by (service) (pierhead_service_wanted_replicas{{{S}}})", "{{service}} wanted"),
                Query(f"sum by (service) (pierhead_service_ready_replicas{{{S}}})", "{{service}} ready"),
            ),
            "What was asked for, and what passes its readiness probe.",
        ),
        Panel(
            "Replicas by state",
            (
                Query(
                    f"sum by (service, state) (pierhead_service_replica_state{{{S}}})",
                    "{{service}} {{state}}",
                ),
            ),
            "STARTING, RUNNING, DRAINING, STOPPING, FAILED. `make status` gives the reason for each.",
            stacked=True,
        ),
        Panel(
            "Cannot start, failed in a row",
            (
                Query(f"sum by (service) (pierhead_service_pending_replicas{{{S}}})", "{{service}} pending"),
                Query(f"sum by (service) (pierhead_service_failures_in_a_row{{{S}}})", "{{service}} failed"),
            ),
            "Replicas that wait for something (a GPU, an image), and how often replicas failed since one last worked.",
        ),
        Panel(
            "GPU slots",
            (
                Query("sum(pierhead_gpu_slots_used)", "used"),
                Query("sum(pierhead_gpu_slots)", "there"),
            ),
            "Slots that replicas occupy, and all there are.",
        ),
        Panel(
            "GPU memory",
            (
                Query("sum by (gpu) (pierhead_gpu_memory_used_bytes) or vector(0)", "{{gpu}} in use"),
                Query("sum by (gpu) (pierhead_gpu_memory_free_bytes) or vector(0)", "{{gpu}} free for a slot"),
            ),
            "Memory in use by all processes, and memory free for a new slot. Empty where nvidia-smi cannot be run.",
            unit="bytes",
        ),
        Panel(
            "Actions",
            (
                Query(
                    f"sum by (action, outcome) (increase(pierhead_controller_actions_total{W}))",
                    "{{action}} {{outcome}}",
                ),
            ),
            "What the controller did, and whether it worked; `make events` gives the causes.",
            stacked=True,
        ),
        Panel(
            "One look at the world, p99",
            (
                Query(
                    f"histogram_quantile(0.99, sum by (le) (rate(pierhead_controller_tick_seconds_bucket{W})))",
                    "tick",
                ),
                Query(
                    "histogram_quantile(0.99, sum by (le) "
                    f"(rate(pierhead_controller_engine_reading_seconds_bucket{W})))",
                    "the engine's answer",
                ),
                Query(
                    "histogram_quantile(0.99, sum by (le) "
                    f"(rate(pierhead_controller_haproxy_reading_seconds_bucket{W})))",
                    "HAProxy's answer",
                ),
            ),
            "Time the controller takes to observe, plan and publish. What it then does runs beside this, and so does "
            "the reading of an engine or a HAProxy that is slow to answer.",
            unit="s",
        ),
    ),
)

SECTIONS = (AT_A_GLANCE, EDGE, SERVICES, CALLS, BATCHES, INSIDE, CHANGES, CONTROL)

PAGE = Page(
    uid="pierhead-overview",
    title="Pierhead overview",
    description="Traffic, services, calls between them, replicas and GPUs of one stack.",
    services="pierhead_service_wanted_replicas",
    sections=SECTIONS,
)

if __name__ == "__main__":
    write(PAGE)
