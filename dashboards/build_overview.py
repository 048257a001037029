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
    """A counter without an increment has no series: this gives 0 for each service with replicas."""
    return f"{expr} or sum by (service) (pierhead_ongoing_requests{{{S}}}) * 0"


# Codes of answers that are errors of the service: HTTP status, or the name of a gRPC status.
_ERROR_CODES = ', code=~"5..|UNKNOWN|INTERNAL|DATA_LOSS|DEADLINE_EXCEEDED"'
ERROR_SHARE = f"({or_zero(rate('pierhead_requests_total', where=_ERROR_CODES))}) / {rate('pierhead_requests_total')}"

AT_A_GLANCE = Section(
    "At a glance",
    (
        Panel(
            "Requests/s",
            (Query(f"sum(rate(haproxy_backend_http_requests_total{{{S}}}{W}))", "requests/s"),),
            "Requests of clients through HAProxy, HTTP and gRPC.",
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
            "Share of HAProxy's answers that are 5xx. A gRPC error is HTTP 200 here: see the services' errors.",
            unit="percentunit",
            width=3,
            kind="stat",
            warn_above=0.01,
        ),
        Panel(
            "p99 of the slowest",
            (Query(f"max({quantile(0.99, 'pierhead_request_duration_seconds')})", "p99"),),
            "99 % of the requests to the slowest service took at most this long in its replicas.",
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
            "Replicas that pass their readiness probe, and replicas wanted.",
            width=4,
            kind="stat",
        ),
        Panel(
            "GPU slots",
            (
                Query("sum(pierhead_gpu_slots_used)", "used"),
                Query("sum(pierhead_gpu_slots)", "total"),
            ),
            "GPU slots that replicas occupy, and GPU slots in total.",
            width=4,
            kind="stat",
        ),
        Panel(
            "Alerts firing",
            (Query('count(ALERTS{alertstate="firing"}) or vector(0)', "firing"),),
            "Alerts of dashboards/prometheus/rules that fire now; Prometheus' page /classic/alerts lists them.",
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
            "Requests that clients sent, by service.",
            unit="reqps",
        ),
        Panel(
            "Answers/s by status",
            (Query(rate("haproxy_backend_http_responses_total", "code"), "{{code}}"),),
            "HTTP status classes of the answers. gRPC answers are 2xx with any grpc-status.",
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
            "Share of a service's answers that are 5xx, including HAProxy's own (no replica, timeout in the queue).",
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
            "Requests from HAProxy in replicas, and requests that wait because every replica has max_ongoing_requests.",
        ),
        Panel(
            "Held for a first replica",
            (
                Query(f"sum by (service) (pierhead_edge_held_requests{{{S}}})", "{{service}} held"),
                Query(rate("pierhead_edge_ended_holds_total", "service, ending"), "{{service}} {{ending}}/s"),
            ),
            "Requests that wait at HAProxy because no replica takes traffic (they wake a service that scales to zero),"
            " and how the wait of others ended: served; expired: no replica in time; left: the client disconnected;"
            " refused: too many waited.",
        ),
        Panel(
            "Servers up",
            (Query(f"max by (service) (haproxy_backend_active_servers{{{S}}})", "{{service}}"),),
            "Replicas that get new requests from HAProxy: registered, healthy, not draining. With an HAProxy on each "
            "node, as the one sees it that has the most.",
        ),
        Panel(
            "Retries and redispatches/s",
            (
                Query(rate("haproxy_backend_retry_warnings_total"), "{{service}} retried"),
                Query(rate("haproxy_backend_redispatch_warnings_total"), "{{service}} sent to another"),
            ),
            "Requests whose replica accepted no connection: retried, or sent to another replica.",
            unit="reqps",
        ),
    ),
)

SERVICES = Section(
    "Services: measured by their replicas",
    (
        Panel(
            "Requests/s",
            (Query(rate("pierhead_requests_total", "service, method"), "{{service}} {{method}}"),),
            "Requests answered, by method, including refusals.",
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
            "From the acceptance of a request to its end, in the replica.",
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
            "How evenly requests are distributed over a service's replicas.",
        ),
        Panel(
            "Refused/s",
            (Query(or_zero(rate("pierhead_refused_requests_total")), "{{service}}"),),
            "Requests refused before any work because the replica is full or draining; the caller tries another.",
            unit="reqps",
        ),
    ),
)

CALLS = Section(
    "Calls between services: measured by the callers",
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
            "Duration of calls for their caller, including queueing and retries, by the service called.",
            unit="s",
            width=6,
        ),
        Panel(
            "Waiting for a replica",
            (Query(f"sum by (service, target) (pierhead_queued_requests{{{S}}})", "{{service}} for {{target}}"),),
            "Calls that wait in the caller because every replica of the called service is full.",
            width=6,
        ),
        Panel(
            "Retries/s",
            (Query(or_zero(rate("pierhead_handle_retries_total")), "{{service}}"),),
            "Calls sent to another replica because the first one refused, was draining or could not be reached.",
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
            "Mean number of requests in a batch.",
        ),
        Panel(
            "Wait for a batch, p90",
            (Query(quantile(0.9, "pierhead_batch_wait_seconds", "service, batch"), "{{service}} {{batch}}"),),
            "How long the oldest request of a batch waited for it to start.",
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


def as_bytes(way: str) -> str:
    """Share of the large tensors that travelled as bytes for this reason."""
    metric = "pierhead_shared_memory_tensors_total"
    of_this_way = rate(metric, where=f', way="{way}"')
    return or_zero(f"{of_this_way} / {rate(metric)}")


LARGE_TENSORS = Section(
    "Large tensors: shared memory between replicas",
    (
        Panel(
            "Memory in use",
            (
                Query(or_zero(f"sum by (service) (pierhead_shared_memory_bytes{{{S}}})"), "{{service}}"),
                Query(or_zero(f"sum by (service) (pierhead_shared_memory_limit_bytes{{{S}}})"), "{{service}} at most"),
            ),
            "Memory that the service's replicas made to send tensors, as the kernel counts it, and the sum of their "
            "x-serve.shared_memory.size.",
            unit="bytes",
        ),
        Panel(
            "Sent",
            (Query(or_zero(rate("pierhead_shared_memory_sent_bytes_total")), "{{service}}"),),
            "Content of tensors that went by shared memory.",
            unit="Bps",
        ),
        Panel(
            "Travelled as bytes",
            (Query(as_bytes("full"), "{{service}} memory full"), Query(as_bytes("elsewhere"), "{{service}} elsewhere")),
            "Share of the tensors above the threshold that travelled as bytes, because the sender's memory was full "
            "(raise its size), or because the other side shares none.",
            unit="percentunit",
        ),
    ),
    collapsed=True,
)


def of_models(counter: str) -> str:
    """Rate of one of Triton's counters, by model."""
    return rate(counter, "service, model")


def seconds(counter: str) -> str:
    """Mean that a request adds to one of Triton's counters of microseconds, in seconds."""
    return f"{of_models(counter)} / {of_models('nv_inference_request_success')} / 1e6"


TRITON = Section(
    "Triton Inference Servers: measured by themselves",
    (
        Panel(
            "Requests/s",
            (Query(of_models("nv_inference_request_success"), "{{service}} {{model}}"),),
            "Inference requests that succeeded, by model.",
            unit="reqps",
            width=6,
        ),
        Panel(
            "Failures/s",
            (
                Query(
                    rate("nv_inference_request_failure", "service, model, reason"), "{{service}} {{model}} {{reason}}"
                ),
            ),
            "Inference requests that failed: REJECTED by the server (its queue is full, say), CANCELED by the client, "
            "BACKEND: by the model.",
            unit="reqps",
            width=6,
        ),
        Panel(
            "Waiting",
            (
                Query(
                    f"{of_models('nv_inference_queue_duration_us')} / 1e6",
                    "{{service}} {{model}}",
                ),
            ),
            "Mean number of requests that wait in the servers for a batch; compose/apps/triton.yaml scales by it.",
            width=6,
        ),
        Panel(
            "Rows per batch",
            (
                Query(
                    f"{of_models('nv_inference_count')} / {of_models('nv_inference_exec_count')}",
                    "{{service}} {{model}}",
                ),
            ),
            "Mean number of inferences (rows of the batch dimension) in one execution of the model.",
            width=6,
        ),
        Panel(
            "Time in the queue",
            (Query(seconds("nv_inference_queue_duration_us"), "{{service}} {{model}}"),),
            "Mean time that a request waits in the server for its batch.",
            unit="s",
        ),
        Panel(
            "Time of computing",
            (Query(seconds("nv_inference_compute_infer_duration_us"), "{{service}} {{model}}"),),
            "Mean time that a request's batch takes in the model.",
            unit="s",
        ),
        Panel(
            "GPU utilisation",
            (
                Query(
                    f"avg by (service) (nv_gpu_utilization{{{S}}}) or sum by (service) (nv_inference_count{{{S}}}) * 0",
                    "{{service}}",
                ),
            ),
            "Mean over the GPUs of the service's replicas, as the servers see them. 0 without GPUs.",
            unit="percentunit",
        ),
    ),
    collapsed=True,
)

INSIDE = Section(
    "Inside replicas: event loops, models, broken replicas",
    (
        Panel(
            "Event loop lag",
            (Query(f"max by (service) (pierhead_event_loop_lag_seconds{{{S}}})", "{{service}}"),),
            "How late the slowest replica's event loop runs. High: code blocks it, or its core is busy.",
            unit="s",
            width=6,
        ),
        Panel(
            "Event loop blocked",
            (Query(f"max by (service) (rate(pierhead_event_loop_blocked_seconds_total{{{S}}}{W}))", "{{service}}"),),
            "Share of the time in which code blocked an event loop for 0.2 s or more at once; the log names the code.",
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
            "How often a caller left a replica out for a while because calls to it failed.",
            width=6,
        ),
        Panel(
            "Models loaded/s",
            (Query(or_zero(rate("pierhead_multiplex_loads_total")), "{{service}}"),),
            "Loads of multiplexed models. If there are as many as requests, replicas hold too few models, or callers "
            "name none.",
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
            "Requests in flight and waiting, as the autoscaler counts them; without an autoscaler, requests in flight.",
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
            "Replicas that the autoscaling policy wants now, before its delays; without one, the number that is set.",
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
            "During a rollout replicas of two versions serve.",
            width=6,
            stacked=True,
        ),
        Panel(
            "Rollouts",
            (
                Query(f"sum by (service) (pierhead_service_rollout_age_seconds{{{S}}})", "{{service}} in progress"),
                Query(f"sum by (service) (pierhead_service_rolled_back{{{S}}})", "{{service}} rolled back"),
            ),
            "How long a rollout has been in progress, in seconds; 1 while the version in the files is one that was"
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
            "Replicas wanted, and replicas that pass their readiness probe.",
        ),
        Panel(
            "Replicas by state",
            (
                Query(
                    f"sum by (service, state) (pierhead_service_replica_state{{{S}}})",
                    "{{service}} {{state}}",
                ),
            ),
            "STARTING, RUNNING, DRAINING, ASLEEP, STOPPING, FAILED. `make status` gives the reason for each.",
            stacked=True,
        ),
        Panel(
            "Cannot start, failed in a row",
            (
                Query(f"sum by (service) (pierhead_service_pending_replicas{{{S}}})", "{{service}} pending"),
                Query(f"sum by (service) (pierhead_service_failures_in_a_row{{{S}}})", "{{service}} failed"),
            ),
            "Replicas that cannot start yet (no GPU, no image), and failures since a replica last worked.",
        ),
        Panel(
            "GPU slots",
            (
                Query("sum(pierhead_gpu_slots_used)", "used"),
                Query("sum(pierhead_gpu_slots)", "total"),
            ),
            "GPU slots that replicas occupy, and GPU slots in total.",
        ),
        Panel(
            "GPU memory",
            (
                Query("sum by (gpu) (pierhead_gpu_memory_used_bytes) or vector(0)", "{{gpu}} in use"),
                Query("sum by (gpu) (pierhead_gpu_memory_free_bytes) or vector(0)", "{{gpu}} free for a slot"),
            ),
            "Memory in use by all processes, and memory free for a new slot. Empty if nvidia-smi cannot be run.",
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
            "Actions of the controller and their outcomes; `make events` gives the causes.",
            stacked=True,
        ),
        Panel(
            "One tick of the controller, p99",
            (
                Query(
                    f"histogram_quantile(0.99, sum by (le) (rate(pierhead_controller_tick_seconds_bucket{W})))",
                    "tick",
                ),
                Query(
                    "histogram_quantile(0.99, sum by (le) "
                    f"(rate(pierhead_controller_engine_reading_seconds_bucket{W})))",
                    "reading the engine",
                ),
                Query(
                    "histogram_quantile(0.99, sum by (le) "
                    f"(rate(pierhead_controller_haproxy_reading_seconds_bucket{W})))",
                    "reading HAProxy",
                ),
            ),
            "Time the controller takes to observe, plan and publish. Actions run outside ticks, and so do readings of "
            "a slow engine or HAProxy.",
            unit="s",
        ),
    ),
)

NODES = Section(
    "Nodes: each with an HAProxy (a Swarm)",
    (
        Panel(
            "Nodes",
            (
                Query("sum(pierhead_node_ready) or vector(1)", "ready"),
                Query("count(pierhead_node_ready) or vector(1)", "nodes"),
                Query("sum(pierhead_edge_differs) or vector(0)", "HAProxys that differ"),
            ),
            "Nodes that are ready, all nodes, and HAProxys that do not answer or are not as the others. One machine is "
            "one node.",
            width=6,
        ),
        Panel(
            "Replicas",
            (Query(f'sum by (node) (up{{job="replicas", {S}}})', "{{node}}"),),
            "Replicas that answer Prometheus, by node.",
            width=6,
            stacked=True,
        ),
        Panel(
            "Requests/s at HAProxy",
            (Query(rate("haproxy_backend_http_requests_total", "node"), "{{node}}"),),
            "Requests that clients sent, by the node whose HAProxy took them.",
            unit="reqps",
            width=6,
            stacked=True,
        ),
        Panel(
            "In flight at HAProxy",
            (Query(f"sum by (node) (haproxy_server_current_sessions{{{S}}})", "{{node}}"),),
            "Requests from HAProxy in replicas, by the node whose HAProxy sent them.",
            width=6,
            stacked=True,
        ),
    ),
    collapsed=True,
)

SECTIONS = (AT_A_GLANCE, EDGE, SERVICES, CALLS, BATCHES, LARGE_TENSORS, TRITON, INSIDE, CHANGES, CONTROL, NODES)

PAGE = Page(
    uid="pierhead-overview",
    title="Pierhead overview",
    description="Traffic, services, calls between them, replicas and GPUs of one stack.",
    services="pierhead_service_wanted_replicas",
    sections=SECTIONS,
)

if __name__ == "__main__":
    write(PAGE)
