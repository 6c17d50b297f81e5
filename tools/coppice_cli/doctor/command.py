"""`coppice doctor`: its flags, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coppice.errors import EXIT_FAILURE, EXIT_OK
from coppice_cli.variables import Command

if TYPE_CHECKING:
    from coppice.errors import UsageError
    from coppice_cli.doctor.findings import Finding


def add_to(app: typer.Typer) -> None:
    app.command(cls=Command)(doctor)


def doctor(
    redis_url: Annotated[str, typer.Option(help="The Redis of `coppice up`, if it has one of its own.")] = "",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the REST API, as `coppice up` would be given it.")
    ] = 8000,
    workers: Annotated[int, typer.Option(min=1, max=16, help="As `coppice up` would be given it.")] = 1,
    log_dir: Annotated[Path | None, typer.Option(help="As `coppice up` would be given it.")] = None,
    disk_folder: Annotated[Path | None, typer.Option(help="As `coppice up` would be given it.")] = None,
    disk_mib: Annotated[int, typer.Option(min=0, help="As `coppice up` would be given it.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line and nothing else.")] = False,
) -> None:
    """Whether a stack would run here: ports, GPU, compiler, packages, Redis, clock, files. Exit code 1 where not."""
    from coppice_cli.doctor.findings import State, worst
    from coppice_cli.doctor.machine import check_disk

    if disk_mib and disk_folder is None:
        raise UsageError("--disk-mib without --disk-folder", hint="say where the blocks are to be")
    findings = _findings(redis_url, port, workers, log_dir)
    if disk_folder is not None:
        findings += check_disk(disk_folder, workers * (disk_mib << 20))
    state = worst(findings)
    if as_json:
        told = [
            {"state": each.state.value, "subject": each.subject, "what": each.what, "to_do": each.to_do}
            for each in findings
        ]
        typer.echo(json.dumps({"state": state.value, "findings": told}, separators=(",", ":")))
    else:
        _print(findings)
    raise typer.Exit(EXIT_FAILURE if state is State.FAIL else EXIT_OK)


def _findings(redis_url: str, port: int, workers: int, log_dir: Path | None) -> list[Finding]:
    from coppice_cli.doctor import machine, software
    from coppice_cli.doctor.services import check_ports, check_redis_url, check_valkey
    from coppice_up.options import UpOptions

    usual = UpOptions(port=port, workers=workers).at_usual_ports()
    gpu, num_gpus = software.check_gpu()
    return [
        software.check_python(),
        *software.check_packages(),
        software.check_compiler(has_gpu=num_gpus > 0),
        *software.check_cores(),
        gpu,
        *check_ports(usual),
        *(check_redis_url(redis_url) if redis_url else [check_valkey()]),
        machine.check_clock(),
        machine.check_files(),
        machine.check_shared_memory(),
        *machine.check_folders(machine.folders_of(log_dir)),
    ]


def _print(findings: list[Finding]) -> None:
    width = max(len(each.subject) for each in findings)
    for each in findings:
        typer.echo(f"{each.state.value:4}  {each.subject:{width}}  {each.what}")
        if each.to_do:
            typer.echo(f"{'':4}  {'':{width}}  -> {each.to_do}")
