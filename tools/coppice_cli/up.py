"""`coppice up`: start, say where it listens, watch, stop."""

from __future__ import annotations

import json
import shlex

from rich.console import Console

from coppice.errors import EXIT_OK
from coppice_cli.cache.client import DEFAULT_URL as CACHE_URL
from coppice_cli.requests.commands import DEFAULT_URL as OPERATOR_URL
from coppice_up.display import display_for
from coppice_up.options import UpOptions
from coppice_up.plan import Services, StackPlan
from coppice_up.stack import StopRequested, running_stack
from coppice_up.supervisor import RESTARTS_MAX


def run_up(options: UpOptions, services: Services | None = None) -> int:
    """Run until a signal. Returns the exit code; raises CoppiceError when the stack cannot go on."""
    console = Console()
    display = display_for(console)
    try:
        with running_stack(options, display, services) as (plan, supervisor):
            for line in welcome(plan, options):
                display.note(line)
            supervisor.watch()
            display.note("stopping (Ctrl-C again stops at once)")
    except StopRequested:
        display.note("stopped before it was ready")
    else:
        display.note("stopped")
    return EXIT_OK


def welcome(plan: StackPlan, options: UpOptions) -> list[str]:
    """What a newcomer needs: addresses, one request to try, and what this set-up is not."""
    body = {
        "model": plan.model_name,
        "messages": [{"role": "user", "content": "What does sorted do?"}],
        "max_tokens": 60,
        "stream": True,
    }
    key = " -H 'Authorization: Bearer YOUR_KEY'" if options.tenants is not None else ""
    scheme = "http" if options.certs is None else "https"
    listening = (plan.scheduler_metrics, plan.cache_http, *plan.worker_http)
    metrics = " ".join(f"{scheme}://{address}/metrics" for address in listening)
    return [
        "",
        f"Coppice serves {plan.model_name}",
        f"  OpenAI API     {plan.rest_url}/v1",
        f"  gRPC           {plan.grpc}",
        f"  console        {scheme}://{plan.cache_http}/ (in a browser: who holds what, why it took its time)",
        f"  cache admin    {scheme}://{plan.cache_http} (gRPC {plan.cache_admin_grpc})",
        f"  requests       {scheme}://{plan.scheduler_metrics} (coppice requests, coppice why ID)",
        f"  workers        {' '.join(map(str, plan.worker_grpc))} (gRPC; coppice worker show HOST:PORT)",
        f"  sessions       {plan.cache_sessions} (--cache of a further worker)",
        f"  metrics        {metrics} (scheduler, cache, workers)",
        f"  logs           {plan.log_dir}"
        + (" of each node" if options.on else "")
        + ("" if options.log_dir else " (removed after an orderly stop)"),
        *_taken(plan),
        "",
        "Try:",
        f"  curl -N {plan.rest_url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\",
        f"    -d {shlex.quote(json.dumps(body))}",
        "",
        "Look inside:",
        *_look_inside(f"{scheme}://{plan.cache_http}", f"{scheme}://{plan.scheduler_metrics}"),
        "",
        f"This is a development setup: {'a Ray cluster' if options.on else 'one machine'}, "
        + ("no credentials, " if options.tenants is None else "")
        + _said_of_tls(plan, options)
        + ", nothing is kept when it stops.",
        f"A process that crashes is started again, at most {RESTARTS_MAX} times a minute. Ctrl-C stops everything.",
    ]


def _taken(plan: StackPlan) -> list[str]:
    """One line where usual ports belong to somebody else."""
    if not plan.moved_ports:
        return []
    moved = ", ".join(f"{port.usual} ({port.flag}), so {port.given}" for port in plan.moved_ports)
    return [f"  taken by others  {moved}"]


def _look_inside(cache_url: str, operator_url: str) -> list[str]:
    """Commands that find the stack: by themselves where it has the usual ports."""
    exports = [
        f"  export {variable}={url}"
        for variable, url, usual in (
            ("COPPICE_ADMIN_URL", cache_url, CACHE_URL),
            ("COPPICE_REQUESTS_URL", operator_url, OPERATOR_URL),
        )
        if url != usual
    ]
    return [*exports, "  coppice top; coppice cache stats; coppice requests"]


def _said_of_tls(plan: StackPlan, options: UpOptions) -> str:
    if options.certs is not None:
        return "TLS" if plan.is_tls else "TLS between services alone"
    return "TLS for clients alone" if plan.is_tls else "no TLS"
