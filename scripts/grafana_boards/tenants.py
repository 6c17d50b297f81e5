"""What each tenant gets, and what it waits for."""

from __future__ import annotations

from coppice.request_log.stages import WAITING, StageKind
from scripts.grafana_boards.panels import Board, Panel, Query, Variable, note, quantiles, stat, traces_link

RATE = "[$__rate_interval]"
OF = '{tenant=~"$tenant"}'
# Domains are named tenant/ID; of some tenants by the name that they share.
IN = '{domain=~"(.+/)?($tenant)"}'
_TRACES = traces_link("coppice.tenant=${tenant}")
_CACHED = f"sum(rate(vllm:prompt_tokens_cached_total{OF}{RATE})) / sum(rate(vllm:request_prompt_tokens_sum{OF}{RATE}))"
_REFUSED = f"sum(rate(coppice_calls_failed_total{OF}{RATE}))"
_ANSWERED = f"sum(rate(vllm:request_success_total{OF}{RATE}))"
_WAITS = f'tenant=~"$tenant", cause=~"{"|".join(kind.value for kind in StageKind if kind in WAITING)}"'
_WAITED = (
    f"sum(rate(coppice_request_time_seconds_total{{{_WAITS}}}{RATE}))"
    f" / sum(rate(coppice_request_time_seconds_total{OF}{RATE}))"
)


def _requests(state: str) -> str:
    return f'sum(coppice_scheduler_tenant_requests{{tenant=~"$tenant", state="{state}"}})'


_STATS = (
    stat("Running", "Requests that hold memory.", _requests("running")),
    stat("Waiting", "Requests in the queue.", _requests("waiting"), steps=(8, 64)),
    stat(
        "First token, p95",
        "From arrival to first token.",
        quantiles("vllm:time_to_first_token_seconds", OF)[1].expr,
        unit="s",
        steps=(1, 2.5),
    ),
    stat(
        "Time spent waiting",
        "Share of the life of answers in which they waited and nothing of them was computed. What a preemption, a"
        " restart or a slow step cost is not in it: that is computed again, or slowly.",
        _WAITED,
        unit="percentunit",
        steps=(0.2, 0.5),
    ),
    stat("Cached share of prompts", "Of answers that ended well.", _CACHED, unit="percentunit"),
    stat(
        "Calls that fail",
        "Refused, failed or cancelled, beside answers that ended well.",
        f"{_REFUSED} / ({_REFUSED} + {_ANSWERED})",
        unit="percentunit",
        steps=(0.05, 0.25),
    ),
)

TENANTS = Board(
    "coppice-tenants",
    "Coppice: tenants",
    (
        *_STATS,
        Panel(
            "Requests",
            "Running hold memory; waiting hold none.",
            (Query(f"sum by (tenant, state) (coppice_scheduler_tenant_requests{OF})", "{{tenant}} {{state}}"),),
        ),
        Panel(
            "Answers per second",
            "That ended well, by reason.",
            (
                Query(
                    f"sum by (tenant, finished_reason) (rate(vllm:request_success_total{OF}{RATE}))",
                    "{{tenant}} {{finished_reason}}",
                ),
            ),
            unit="reqps",
        ),
        Panel(
            "Time to first token, p95",
            "From arrival to first token.",
            quantiles("vllm:time_to_first_token_seconds", OF, "tenant"),
            unit="s",
            links=(_TRACES,),
        ),
        Panel(
            "Where time goes",
            "Seconds of answers a second, by what they waited for, lost it to or did.",
            (Query(f"sum by (cause) (rate(coppice_request_time_seconds_total{OF}{RATE}))", "{{cause}}"),),
            unit="s",
            stacks=True,
        ),
        Panel(
            "Time between tokens, p95",
            "Of an answer.",
            quantiles("vllm:inter_token_latency_seconds", OF, "tenant"),
            unit="s",
        ),
        Panel(
            "Whole answers, p95",
            "From arrival to the last token.",
            quantiles("vllm:e2e_request_latency_seconds", OF, "tenant"),
            unit="s",
            links=(_TRACES,),
        ),
        Panel(
            "Queue, p95",
            "From arrival until something was computed.",
            quantiles("vllm:request_queue_time_seconds", OF, "tenant"),
            unit="s",
        ),
        Panel(
            "Prefill and decode, p95",
            "Of the tenants together.",
            (
                Query(quantiles("vllm:request_prefill_time_seconds", OF)[1].expr, "prefill"),
                Query(quantiles("vllm:request_decode_time_seconds", OF)[1].expr, "decode"),
            ),
            unit="s",
        ),
        Panel(
            "Tokens per second",
            "Of prompts, of them found cached, and generated.",
            (
                Query(f"sum by (tenant) (rate(vllm:prompt_tokens_total{OF}{RATE}))", "{{tenant}} prompt"),
                Query(f"sum by (tenant) (rate(vllm:prompt_tokens_cached_total{OF}{RATE}))", "{{tenant}} cached"),
                Query(f"sum by (tenant) (rate(vllm:generation_tokens_total{OF}{RATE}))", "{{tenant}} generated"),
            ),
        ),
        Panel(
            "Size of prompts and answers",
            "Tokens, in the mean.",
            (
                Query(
                    f"sum by (tenant) (rate(vllm:request_prompt_tokens_sum{OF}{RATE}))"
                    f" / sum by (tenant) (rate(vllm:request_prompt_tokens_count{OF}{RATE}))",
                    "{{tenant}} prompt",
                ),
                Query(
                    f"sum by (tenant) (rate(vllm:request_generation_tokens_sum{OF}{RATE}))"
                    f" / sum by (tenant) (rate(vllm:request_generation_tokens_count{OF}{RATE}))",
                    "{{tenant}} answer",
                ),
            ),
        ),
        Panel(
            "KV blocks",
            "That the domain has on the device.",
            (Query(f"sum by (domain, state) (coppice_cache_domain_blocks{IN})", "{{domain}} {{state}}"),),
            stacks=True,
        ),
        Panel(
            "Evicted blocks per second",
            "Cached blocks of the domain that were given up for others.",
            (Query(f"sum by (domain) (rate(coppice_cache_evicted_blocks_total{IN}{RATE}))", "{{domain}}"),),
        ),
        Panel(
            "What went wrong",
            "Calls per second that were refused, failed or cancelled, by code.",
            (
                Query(
                    f"sum by (tenant, code) (rate(coppice_calls_failed_total{OF}{RATE})) > 0",
                    "{{tenant}} {{code}}",
                ),
            ),
            unit="reqps",
        ),
        Panel(
            "Second tries",
            "Times that a request went on at another planner, and calls that got the outcome of an earlier one.",
            (
                Query(f"sum by (tenant) (rate(coppice_requests_moved_total{OF}{RATE}))", "{{tenant}} moved"),
                Query(f"sum by (tenant) (rate(coppice_requests_replayed_total{OF}{RATE}))", "{{tenant}} replayed"),
            ),
        ),
        note(
            "No metric is drawn here. Guarantees, limits and weights are no metrics: they stand in the tenants file "
            "(`coppice tenants show`). What a tenant used is summed from the request log (`coppice usage`)."
        ),
    ),
    (Variable("tenant", "vllm:generation_tokens_total"),),
)
