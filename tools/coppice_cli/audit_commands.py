"""`coppice audit ...`: audits of a running server, from outside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from coppice.errors import UsageError
from coppice_cli.tls_options import TlsCa, TlsCert, TlsKey, files_of
from coppice_cli.variables import refuse_unknown_variables_of


def add_to(audit: typer.Typer) -> None:
    """Hang the commands up under `coppice audit`."""
    audit.callback()(about)
    audit.command()(isolation)


def about() -> None:
    """Audits of a running server, from outside."""


def isolation(
    context: typer.Context,
    base_url: Annotated[str, typer.Option(help="Server of the OpenAI API, http://HOST:PORT, with or without /v1.")],
    victim_key_file: Annotated[
        Path | None, typer.Option(help="File with one tenant's key; or set COPPICE_AUDIT_ISOLATION_VICTIM_KEY.")
    ] = None,
    attacker_key_file: Annotated[
        Path | None, typer.Option(help="File with another tenant's key; or set COPPICE_AUDIT_ISOLATION_ATTACKER_KEY.")
    ] = None,
    model: Annotated[str, typer.Option(help="Default: the first one that both tenants see.")] = "",
    samples: Annotated[int, typer.Option(help="Of the victim's prompts, and of new ones; fewer say less.")] = 2000,
    prompt_tokens: Annotated[
        int, typer.Option(help="Length of a prompt. Default: 1024, or half of a smaller context.", show_default=False)
    ] = 0,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for one answer.")] = 60,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of prompts and order. A seed is good for once: its prompts are cached then."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the verdict and all samples to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the distributions into this SVG file.")] = None,
    watch: Annotated[
        float, typer.Option(min=0, help="Audit again and again, with so many seconds in between; for metrics.")
    ] = 0,
    metrics_host: Annotated[
        str, typer.Option(help="Address of the metrics of --watch; beyond loopback they need TLS.")
    ] = "127.0.0.1",
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the metrics of --watch; 0: a free one.")
    ] = 8076,
    cert: TlsCert = None,
    key: TlsKey = None,
    ca: TlsCa = None,
    insecure_network: Annotated[
        bool,
        typer.Option(
            "--insecure-network",
            envvar="COPPICE_INSECURE_NETWORK",
            help="Serve metrics beyond loopback without TLS, where only Prometheus reaches that network.",
        ),
    ] = False,
) -> None:
    """Can one tenant tell what another one has sent? Exit code 0: isolated, 3: leak, 4: inconclusive."""
    from coppice_audit.options import KEY_VARIABLES, AuditOptions, WatchOptions, read_key
    from coppice_audit.run import run_isolation
    from coppice_audit.watch import run_watch

    refuse_unknown_variables_of(context, beside=KEY_VARIABLES.values())
    options = AuditOptions(
        base_url=base_url,
        victim_key=read_key("victim", victim_key_file, os.environ),
        attacker_key=read_key("attacker", attacker_key_file, os.environ),
        model=model,
        samples=samples,
        prompt_tokens=prompt_tokens,
        timeout_s=timeout_s,
    )
    if not watch:
        raise typer.Exit(run_isolation(options, seed=seed, json=json, plot=plot))
    for flag, value in (("--seed", seed), ("--json", json), ("--plot", plot)):
        if value is not None:
            raise UsageError(f"{flag} is of one audit", hint="leave it out with --watch")
    watching = WatchOptions(
        every_s=watch,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        tls=files_of(cert, key, ca),
        insecure_network=insecure_network,
    )
    raise typer.Exit(run_watch(options, watching))
