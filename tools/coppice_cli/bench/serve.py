"""`coppice bench serve`: the flags. All but a few are fields of `ServeOptions` of the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="Server of the OpenAI API, http://HOST:PORT.")],
    model: Annotated[str, typer.Option(help="Default: the first one that the server lists.")] = "",
    api_key: Annotated[str, typer.Option(help="Bearer token.")] = "",
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME:KEY, several times; with a further :flood it floods (--load tenants). They take turns."
        ),
    ] = None,
    api: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    prompts: Annotated[str, typer.Option(help="tokens (ids), text, or auto: ids where the API takes them.")] = "auto",
    load: Annotated[str, typer.Option(help="random, prefix, multiturn, trace or tenants.")] = "random",
    requests: Annotated[int, typer.Option(help="How many; of each tenant with --load tenants; or conversations.")] = 64,
    concurrency: Annotated[int, typer.Option(help="Closed loop: requests at once; of each tenant likewise.")] = 16,
    rate: Annotated[float, typer.Option(help="Open loop: arrivals per second (Poisson) instead of --concurrency.")] = 0,
    input_tokens: Annotated[int, typer.Option(help="Tokens of a prompt, or of a turn.")] = 256,
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    shared_tokens: Annotated[int, typer.Option(help="Common beginning, of --load prefix and multiturn.")] = 192,
    prefixes: Annotated[int, typer.Option(help="How many common beginnings, --load prefix.")] = 1,
    turns: Annotated[int, typer.Option(help="Turns of a conversation, --load multiturn.")] = 4,
    trace: Annotated[Path | None, typer.Option(help="Mooncake's .jsonl or Azure's .csv, plain or gzip.")] = None,
    speed: Annotated[float, typer.Option(help="How many times faster than the trace.")] = 1.0,
    limit: Annotated[int, typer.Option(help="The first so many requests of the trace; 0: all.")] = 0,
    shrink: Annotated[int, typer.Option(help="Divide lengths and blocks of the trace, for a small context.")] = 1,
    flood: Annotated[int, typer.Option(help="Requests that a flooder keeps in flight.")] = 120,
    ttft_ms: Annotated[float, typer.Option(help="Goodput: longest time to the first token.")] = 0,
    tpot_ms: Annotated[float, typer.Option(help="Goodput: longest mean time between tokens.")] = 0,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of all requests.")] = 0,
    processes: Annotated[int, typer.Option(help="Client processes, for a server that one cannot keep busy.")] = 1,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for one answer.")] = 600,
    seed: Annotated[int, typer.Option(help="Of arrivals.")] = 0,
    same_prompts: Annotated[
        bool, typer.Option("--same-prompts", help="Equal seeds send equal prompts: measures a warm cache.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the run into this SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line and nothing else.")] = False,
) -> None:
    """Measure a server of the OpenAI API under load: throughput, times, goodput, cache, tenants."""
    from coppice_bench.serve.options import ServeOptions, TenantKey
    from coppice_bench.serve.run import run_serve

    others = {name: value for name, value in context.params.items() if name not in ("tenant", "plot", "as_json")}
    options = ServeOptions(**others, tenants=tuple(TenantKey.parse(text) for text in tenant or ()))
    raise typer.Exit(run_serve(options, as_json=as_json, plot=plot))
