"""What the workers compute, who holds their blocks, and how the cache service does."""

from __future__ import annotations

from scripts.grafana_boards.panels import Board, Panel, Query, Variable, note, stat

RATE = "[$__rate_interval]"
OF = '{worker=~"$worker"}'
# A worker's own metrics do not say its name; this one does.
NAMED = f"* on (instance) group_left (worker) coppice_worker_info{OF}"
_PER_WORKER = "{{worker}}"


def _named(expr: str, by: str = "worker") -> str:
    return f"sum by ({by}) ({expr} {NAMED})"


def _step(q: float) -> Query:
    rates = _named(f"rate(coppice_worker_step_seconds_bucket{RATE})", "le, worker")
    return Query(f"histogram_quantile({q}, {rates})", f"{_PER_WORKER} p{round(100 * q)}")


_STATS = (
    stat("Open workers", "That take new requests.", f"sum(coppice_cache_worker_open{OF})", steps=(1, 1), falls=True),
    stat("Draining", "That take no new requests.", f"sum(coppice_cache_worker_draining{OF})", steps=(1, 1)),
    stat(
        "Fences pending", "That a worker has not acknowledged.", f"sum(coppice_cache_fences_pending{OF})", steps=(1, 8)
    ),
    stat(
        "Free or cached",
        "Blocks that are free, or in a tree; those of a tree that a request reads are held.",
        f'sum(coppice_cache_blocks{{worker=~"$worker", state=~"free|cached"}}) / sum(coppice_cache_blocks{OF})',
        unit="percentunit",
        steps=(0.05, 0.2),
        falls=True,
    ),
    stat(
        "Cache service",
        "Whether its /readyz lists reasons.",
        "max(coppice_cache_degraded)",
        steps=(1, 1),
        words=((0, "ready"), (1, "degraded")),
    ),
    stat(
        "Recovery log behind",
        "Events that are not in Redis yet; nothing without Redis.",
        "max(coppice_cache_recovery_log_lag_events)",
        steps=(1_000, 100_000),
    ),
)

WORKERS = Board(
    "coppice-workers",
    "Coppice: workers and cache",
    (
        *_STATS,
        Panel(
            "KV blocks by state",
            "Of the device.",
            (Query(f"sum by (state) (coppice_cache_blocks{OF})", "{{state}}"),),
            stacks=True,
        ),
        Panel(
            "KV blocks by domain",
            "What each domain has on the device.",
            (Query(f"sum by (domain, state) (coppice_cache_domain_blocks{OF})", "{{domain}} {{state}}"),),
            stacks=True,
        ),
        Panel("Duration of a step", "Of a plan that a worker computes.", (_step(0.5), _step(0.99)), unit="s"),
        Panel(
            "Tokens per second",
            "A cached token is never computed.",
            (
                Query(_named(f"rate(coppice_worker_tokens_computed_total{RATE})"), f"{_PER_WORKER} computed"),
                Query(_named(f"rate(coppice_worker_tokens_sampled_total{RATE})"), f"{_PER_WORKER} sampled"),
            ),
        ),
        Panel("Sequences", "That are attached.", (Query(_named("coppice_worker_sequences"), _PER_WORKER),)),
        Panel(
            "Steps per second",
            "Plans computed by workers, and plans without a result yet.",
            (
                Query(_named(f"rate(coppice_worker_steps_total{RATE})"), _PER_WORKER),
                Query("sum(coppice_scheduler_steps_in_flight)", "in flight"),
            ),
        ),
        Panel(
            "Cached share of prompts",
            "Tokens found in the cache of those looked up, by domain.",
            (
                Query(
                    f"sum by (domain) (rate(coppice_cache_prefix_hit_tokens_total{RATE}))"
                    f" / sum by (domain) (rate(coppice_cache_prefix_query_tokens_total{RATE}))",
                    "{{domain}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Pressure",
            "Per second: blocks given up for others, preemptions, borrowed blocks asked back, waits for a prefill.",
            (
                Query(f"sum(rate(coppice_cache_evicted_blocks_total{RATE}))", "evicted blocks"),
                Query(f"sum(rate(vllm:num_preemptions_total{RATE}))", "preemptions"),
                Query(f"sum(rate(coppice_scheduler_reclaims_total{RATE}))", "reclaims"),
                Query(f"sum(rate(coppice_scheduler_flight_waits_total{RATE}))", "waits for a prefill"),
            ),
        ),
        Panel(
            "Host tier",
            "Blocks in the machine's memory.",
            (Query(f"sum by (state) (coppice_cache_host_blocks{OF})", "{{state}}"),),
            stacks=True,
        ),
        Panel(
            "Disk tier",
            "Blocks in files on local disks.",
            (Query(f"sum by (state) (coppice_cache_disk_blocks{OF})", "{{state}}"),),
            stacks=True,
        ),
        Panel(
            "Copies between tiers",
            "Bytes per second; demote is from device to host, store from there to the disk.",
            (
                Query(
                    _named(f"rate(coppice_worker_copied_bytes_total{RATE})", "worker, direction"),
                    "{{worker}} {{direction}}",
                ),
            ),
            unit="Bps",
        ),
        Panel(
            "Refused by workers",
            "Sequences per second, by reason. But for grammars that are still compiled, they should be zero.",
            (Query(_named(f"rate(coppice_worker_refusals_total{RATE})", "worker, code"), "{{worker}} {{code}}"),),
        ),
        Panel(
            "Leases and sessions",
            "Leases should fall to zero when nothing runs.",
            (
                Query(f"sum(coppice_cache_leases{OF})", "leases"),
                Query("sum(coppice_scheduler_leases)", "as schedulers know them"),
                Query("sum(coppice_cache_sessions)", "sessions"),
            ),
        ),
        Panel(
            "Trees",
            "Nodes of the radix trees.",
            (Query(f"sum by (worker) (coppice_cache_tree_nodes{OF})", _PER_WORKER),),
        ),
        Panel(
            "Audits per hour",
            "Of the cache service's invariants, by how they ended.",
            (Query("sum by (result) (increase(coppice_cache_audits_total[1h]))", "{{result}}"),),
        ),
        note(
            "No metric is drawn here. Which tokens lie where is none: the page of the cache service shows trees, and "
            "`coppice cache explain` why a prompt was found or not."
        ),
    ),
    (Variable("worker", "coppice_cache_worker_open"),),
)
