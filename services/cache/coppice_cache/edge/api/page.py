"""The page at `/`: what each worker holds for whom. Plain HTML without scripts; nothing can be changed from it."""

from __future__ import annotations

from html import escape
from urllib.parse import quote

from coppice_cache.core.base.results import DomainStats, IndexStats, WorkerStats
from coppice_cache.edge.service.auditor import AuditReport

_STYLE = """
:root { --leased: #2f6f4f; --cached: #8fc3a3; --draining: #d9a441; --free: #e8ebe6; --ink: #1d2a22; --dim: #66736b }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 70em; margin: 2em auto; padding: 0 1.5em }
h1 { font-size: 1.5em; margin: 0 } h2 { font-size: 1.1em; margin: 2.2em 0 .4em } a { color: #2f6f4f }
p { margin: .3em 0 } .dim { color: var(--dim) } .bad { color: #a4341b; font-weight: 600 }
table { border-collapse: collapse; width: 100% } th { font-weight: 500; color: var(--dim); font-size: .87em }
th, td { text-align: right; padding: .35em .7em; border-bottom: 1px solid #e3e7e1; font-variant-numeric: tabular-nums }
th:first-child, td:first-child { text-align: left; padding-left: 0 } td.wide { width: 34% }
.bar { position: relative; display: flex; height: 1em; background: var(--free); border-radius: 3px; overflow: hidden }
.bar i { display: block; height: 100% }
.bar b { position: absolute; top: 0; bottom: 0; width: 2px; background: #1d2a22 }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .35em 0 1em }
"""
_STATES = ("leased", "cached", "draining")


def render(stats: IndexStats, degraded: list[str], audit: AuditReport | None) -> str:
    workers = "".join(_worker(worker) for worker in stats.workers) or "<p>No worker is registered.</p>"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Coppice cache</title><style>{_STYLE}</style>"
        f"<h1>Coppice cache</h1>{_state(stats, degraded)}{_audit(audit)}{_legend()}{workers}"
        "<h2>More</h2><p><a href=/v1/stats>stats</a> · <a href=/v1/pins>pins</a> · <a href=/v1/audit>audit</a> · "
        "<a href=/metrics>metrics</a> · <a href=/readyz>readiness</a> · <a href=/openapi.json>API</a></p></html>"
    )


def _state(stats: IndexStats, degraded: list[str]) -> str:
    state = f"<span class=bad>degraded: {escape('; '.join(degraded))}</span>" if degraded else "ready"
    return (
        f"<p>{state} · epoch {stats.cache_epoch} · sessions: {stats.sessions} · leases: {stats.leases} · "
        f"nodes: {stats.nodes} · {_share(stats.hit_tokens, stats.query_tokens)}</p>"
    )


def _audit(audit: AuditReport | None) -> str:
    if audit is None:
        return "<p class=dim>No audit has ended yet.</p>"
    looked = f"{audit.nodes} nodes, {audit.blocks} blocks and {audit.leases} leases in {audit.duration_ms} ms"
    if audit.holds:
        return f"<p class=dim>The last audit looked at {looked}: all invariants hold.</p>"
    return f"<p class=bad>The last audit broke off: {escape(audit.evidence)}</p>"


def _legend() -> str:
    keys = "".join(f"<i style='background:var(--{state})'></i>{state}" for state in (*_STATES, "free"))
    return (
        f"<p class='key dim'>Blocks:{keys} · in a domain's bar: its share of the pool, with a mark at its guarantee</p>"
    )


def _worker(worker: WorkerStats) -> str:
    host = f" · {worker.host_cached_blocks} of {worker.num_host_blocks} on the host" if worker.num_host_blocks else ""
    ledger = "" if worker.open else " · <span class=bad>recovering: it grants nothing yet</span>"
    planner = f", planner {worker.owner}" if worker.owner else ""
    drains = " · drains: it takes no new requests" if worker.draining else ""
    head = (
        f"<h2>{escape(worker.worker_id)} <span class=dim>epoch {worker.worker_epoch}{planner}</span>"
        f"{ledger}{drains}</h2>"
        f"{_bar(worker, worker.num_blocks, None)}"
        f"<p class=dim>{worker.num_blocks} blocks · {worker.free_blocks} free · {worker.leased_blocks} leased · "
        f"{worker.cached_blocks} cached · {worker.draining_blocks} draining · {worker.leases} leases · "
        f"{worker.fences} fences pending · {worker.trees} trees · {worker.nodes} nodes{host}</p>"
    )
    if not worker.domains:
        return head
    rows = "".join(_domain(domain, worker.num_blocks) for domain in _sorted(worker))
    return (
        f"{head}<table><tr><th>domain<th>of the pool<th>leased<th>cached<th>pinned<th>draining<th>guarantee"
        f"<th>maximum<th>leases<th>cached share<th></tr>{rows}</table>"
    )


def _sorted(worker: WorkerStats) -> list[DomainStats]:
    return sorted(worker.domains, key=lambda domain: (-domain.leased_blocks - domain.cached_blocks, domain.domain))


def _domain(domain: DomainStats, num_blocks: int) -> str:
    link = f"/v1/domains/{quote(domain.domain, safe='/')}/tree?worker_id={quote(domain.worker_id)}"
    return (
        f"<tr><td>{escape(domain.domain)}<td class=wide>{_bar(domain, num_blocks, domain.guarantee_blocks)}"
        f"<td>{domain.leased_blocks}<td>{domain.cached_blocks}<td>{domain.pinned_blocks}<td>{domain.draining_blocks}"
        f"<td>{domain.guarantee_blocks}<td>{domain.maximum_blocks}<td>{domain.leases}"
        f"<td>{_share(domain.hit_tokens, domain.query_tokens, words='')}<td><a href='{escape(link)}'>tree</a></tr>"
    )


def _bar(counts: WorkerStats | DomainStats, num_blocks: int, guarantee: int | None) -> str:
    parts = "".join(
        f"<i style='width:{100 * getattr(counts, f'{state}_blocks') / max(1, num_blocks):.2f}%;"
        f"background:var(--{state})'></i>"
        for state in _STATES
    )
    mark = f"<b style='left:{100 * guarantee / max(1, num_blocks):.2f}%'></b>" if guarantee else ""
    return f"<div class=bar>{parts}{mark}</div>"


def _share(hit: int, asked: int, words: str = " of the tokens asked for were cached") -> str:
    return f"{hit / asked:.1%}{words}" if asked else ("no queries yet" if words else "–")
