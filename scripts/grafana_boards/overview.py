"""Is all well, and if not, where to look."""

from __future__ import annotations

from scripts.grafana_boards.panels import Board, Link, Panel, Query, note, quantiles, stat, traces_link

RATE = "[$__rate_interval]"
_TENANT = Link("This tenant", "/d/coppice-tenants?var-tenant=${__field.labels.tenant}&${__url_time_range}")
_WORKERS = Link("Workers and cache", "/d/coppice-workers?${__url_time_range}")
_FAILED = f'(sum(rate(coppice_calls_total{{status=~"5.."}}{RATE})) or vector(0)) / sum(rate(coppice_calls_total{RATE}))'

_STATS = (
    stat("Services down", "Targets that do not answer a scrape.", "sum(up == bool 0)", steps=(1, 1)),
    stat("Calls that fail", "Share of calls that end with 5xx.", _FAILED, unit="percentunit", steps=(0.01, 0.05)),
    stat(
        "First token, p95",
        "From arrival to first token.",
        quantiles("vllm:time_to_first_token_seconds")[1].expr,
        unit="s",
        steps=(1, 2.5),
    ),
    stat("Waiting", "Requests in the queue.", "sum(vllm:num_requests_waiting)", steps=(16, 128)),
    stat(
        "Longest wait",
        "Of the request that has waited longest.",
        "max(coppice_scheduler_oldest_wait_seconds)",
        unit="s",
        steps=(1, 10),
    ),
    stat(
        "KV blocks held",
        "By requests at work; what is only cached is free.",
        "max(vllm:kv_cache_usage_perc)",
        unit="percentunit",
        steps=(0.8, 0.95),
    ),
    stat(
        "Cached share of prompts",
        "Tokens found in the cache of those looked up.",
        f"sum(rate(vllm:prefix_cache_hits_total{RATE})) / sum(rate(vllm:prefix_cache_queries_total{RATE}))",
        unit="percentunit",
    ),
    stat("Open workers", "That take new requests.", "sum(coppice_cache_worker_open)", steps=(1, 1), falls=True),
    stat(
        "Blocks refused",
        "Sequences that workers refused in an hour because of the blocks that they were named.",
        'sum(increase(coppice_worker_refusals_total{code!~"grammar.*"}[1h]))',
        steps=(1, 1),
    ),
    stat(
        "Invariants",
        "What the last audit of the cache service found.",
        "max(coppice_cache_audit_broken)",
        steps=(1, 1),
        words=((0, "hold"), (1, "broken")),
    ),
    stat(
        "Isolation",
        "Whether one canary tenant can tell what the other has sent; empty without `coppice audit isolation --watch`.",
        "max(coppice_isolation_audit_leak)",
        steps=(1, 1),
        words=((0, "no leak"), (1, "leaks")),
    ),
    stat(
        "Versions",
        "Services by version.",
        "count by (version) (coppice_build_info)",
        legend="{{version}}",
    ),
)

OVERVIEW = Board(
    "coppice",
    "Coppice: overview",
    (
        *_STATS,
        Panel(
            "Requests",
            "Running hold memory; waiting hold none.",
            (Query("sum(vllm:num_requests_running)", "running"), Query("sum(vllm:num_requests_waiting)", "waiting")),
        ),
        Panel(
            "Requests by tenant",
            "The first 32 tenants by name, the rest as other.",
            (Query("sum by (tenant, state) (coppice_scheduler_tenant_requests)", "{{tenant}} {{state}}"),),
            links=(_TENANT,),
        ),
        Panel(
            "Time to first token",
            "From arrival to the first token.",
            quantiles("vllm:time_to_first_token_seconds"),
            unit="s",
            links=(traces_link(""),),
        ),
        Panel(
            "Where time goes",
            "Seconds of answers a second, by what they waited for, lost it to or did; `coppice why` has one request's.",
            (Query(f"sum by (cause) (rate(coppice_request_time_seconds_total{RATE}))", "{{cause}}"),),
            unit="s",
            stacks=True,
        ),
        Panel("Time between tokens", "Of an answer.", quantiles("vllm:inter_token_latency_seconds"), unit="s"),
        Panel(
            "Whole answers", "From arrival to the last token.", quantiles("vllm:e2e_request_latency_seconds"), unit="s"
        ),
        Panel(
            "Tokens per second",
            "Of prompts, of them found cached, and generated.",
            (
                Query(f"sum(rate(vllm:prompt_tokens_total{RATE}))", "prompt"),
                Query(f"sum(rate(vllm:prompt_tokens_cached_total{RATE}))", "cached"),
                Query(f"sum(rate(vllm:generation_tokens_total{RATE}))", "generated"),
            ),
        ),
        Panel(
            "KV blocks by state",
            "Over all workers.",
            (Query("sum by (state) (coppice_cache_blocks)", "{{state}}"),),
            stacks=True,
            links=(_WORKERS,),
        ),
        Panel(
            "Calls per second",
            "Over REST and gRPC, by status; those of gRPC by the status that stands for theirs.",
            (Query(f"sum by (status) (rate(coppice_calls_total{RATE}))", "{{status}}"),),
            unit="reqps",
            stacks=True,
        ),
        Panel(
            "What went wrong",
            "Calls per second that were refused, failed or cancelled, by code. Refusals by workers should be zero.",
            (
                Query(f"sum by (code) (rate(coppice_calls_failed_total{RATE})) > 0", "{{code}}"),
                Query(f'sum(rate(coppice_worker_refusals_total{{code!~"grammar.*"}}{RATE}))', "refused by workers"),
            ),
            unit="reqps",
            links=(_TENANT,),
        ),
        note(
            "No metric is drawn here. Alarms are marked in red on all panels; what to do about each stands in "
            "docs/ALERTS.md. "
            f"[Traces]({traces_link('').url}) are in Jaeger; "
            "`coppice why REQUEST_ID` tells why one request was slow."
        ),
    ),
)
