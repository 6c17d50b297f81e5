"""`coppice index ...`: an index of other engines' caches."""

from __future__ import annotations

from typing import Annotated

import typer

from coppice_cli.variables import Command


def add_to(index: typer.Typer) -> None:
    """Hang the commands up under `coppice index`."""
    index.callback()(about)
    index.command(cls=Command)(ingest)


def about() -> None:
    """An index of what other engines have cached."""


def ingest(
    zmq: Annotated[
        list[str] | None,
        typer.Option(help="KV events of an engine: tcp://HOST:5557; tcp://*:PORT where engines connect. Repeatable."),
    ] = None,
    replay: Annotated[
        list[str] | None, typer.Option(help="Replay endpoint of the same engine, in step with --zmq; - for none.")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="What to call the engine, in step with --zmq; - for its endpoint.")
    ] = None,
    topic: Annotated[str, typer.Option(help="Follow only topics that begin so; kv@POD@MODEL names a source.")] = "",
    host: Annotated[str, typer.Option(help="Address of the REST API.")] = "127.0.0.1",
    insecure_network: Annotated[
        bool,
        typer.Option(
            "--insecure-network",
            envvar="COPPICE_INSECURE_NETWORK",
            help="Listen beyond loopback, without TLS: whoever reaches it can ask what the engines have cached.",
        ),
    ] = False,
    port: Annotated[int, typer.Option(help="Port of the REST API; 0 takes a free one.")] = 8073,
    blocks: Annotated[int, typer.Option(help="Blocks remembered per source; what is beyond is withheld.")] = 1_000_000,
    log_level: Annotated[str, typer.Option(help="Least level that is logged: debug, info, warning, error.")] = "info",
) -> None:
    """Follow vLLM's or SGLang's KV events and answer who has how much of a prompt (POST /v1/match). Ctrl-C stops it."""
    from coppice_cache.engine_index.process import IngestOptions, run_ingest

    options = IngestOptions(
        zmq=zmq or (),
        replay=replay or (),
        name=name or (),
        topic=topic,
        host=host,
        port=port,
        insecure_network=insecure_network,
        blocks_per_source_max=blocks,
        log_level=log_level,
    )
    raise typer.Exit(run_ingest(options))
