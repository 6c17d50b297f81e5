"""The commands and their flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from coppice import __version__
from coppice.errors import EXIT_FAILURE, EXIT_OK, CoppiceError
from coppice_cli import audit_commands, certs_commands, index_commands, render_commands, worker_commands
from coppice_cli.bench import commands as bench_commands
from coppice_cli.cache import commands as cache_commands
from coppice_cli.doctor import command as doctor_command
from coppice_cli.requests import commands as request_commands
from coppice_cli.size import command as size_command
from coppice_cli.tenants import commands as tenants_commands
from coppice_cli.tls_options import TlsCa, TlsCert, TlsKey, files_of
from coppice_cli.top import command as top_command
from coppice_cli.variables import Command
from coppice_up.options import DEVICES, DTYPES, KV_DTYPES, UpOptions
from coppice_up.ports import (
    USUAL_CACHE_ADMIN,
    USUAL_CACHE_ADMIN_GRPC,
    USUAL_CACHE_GRPC,
    USUAL_GRPC,
    USUAL_OPERATOR,
    USUAL_WORKER_GRPC,
    USUAL_WORKER_HTTP,
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "COPPICE", "help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measurements.", no_args_is_help=True)
app.add_typer(bench, name="bench")
bench_commands.add_to(bench)
cache = typer.Typer(help="Look into a running cache service.", no_args_is_help=True)
app.add_typer(cache, name="cache")
cache_commands.add_to(cache)
audit = typer.Typer(help="Audits of a running server.", no_args_is_help=True)
app.add_typer(audit, name="audit")
audit_commands.add_to(audit)
index = typer.Typer(help="An index of what other engines have cached.", no_args_is_help=True)
app.add_typer(index, name="index")
index_commands.add_to(index)
tenants_app = typer.Typer(help="Look at a tenants file, and change it.", no_args_is_help=True)
app.add_typer(tenants_app, name="tenants")
tenants_commands.add_to(tenants_app)
worker_app = typer.Typer(help="How a worker stands; drain it.", no_args_is_help=True)
app.add_typer(worker_app, name="worker")
worker_commands.add_to(worker_app)
render = typer.Typer(help="Manifests of a stack for an orchestrator.", no_args_is_help=True)
app.add_typer(render, name="render")
render_commands.add_to(render)
certs = typer.Typer(help="Certificates for TLS between services.", no_args_is_help=True)
app.add_typer(certs, name="certs")
certs_commands.add_to(certs)
request_commands.add_to(app)
top_command.add_to(app)
size_command.add_to(app)
doctor_command.add_to(app)

_DEFAULTS = UpOptions()
_COMPLETION = ("install_completion", "show_completion")


def command() -> typer.core.TyperGroup:
    """`app` as it is run. What installs completion for a shell is asked for with a flag, and with no variable."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup), "there are several commands"
    for parameter in group.params:
        if parameter.name in _COMPLETION:
            parameter.allow_from_autoenv = False  # type: ignore[attr-defined]
    return group


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"coppice {__version__}")
        raise typer.Exit(EXIT_OK)


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            allow_from_autoenv=False,
            show_default=False,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Multi-tenant LLM serving on paged, shared KV."""


Model = Annotated[str, typer.Option(help="Checkpoint folder or hub id (owner/name). Default: the demo model.")]
Dtype = Annotated[str, typer.Option(help=f"Type of weights and computation: {', '.join(DTYPES)}.")]
Device = Annotated[str, typer.Option(help=f"Where workers compute: {', '.join(DEVICES)}.")]
NumBlocks = Annotated[int, typer.Option(help="KV blocks per worker; 0 leaves it to the worker.")]
BlockSize = Annotated[int, typer.Option(help="Tokens per KV block.")]
QueuedTokens = Annotated[
    int, typer.Option(help="Prompt tokens of all requests that wait, shared out by weight; 0: the default.")
]
ToolParser = Annotated[
    str,
    typer.Option(
        help="How the model writes calls of tools: hermes, llama3_json, mistral, mistral_args, "
        "pythonic, qwen3_coder, glm45 or none. "
        "Default: as its chat template says."
    ),
]
ReasoningParser = Annotated[
    str,
    typer.Option(
        help="How the model writes its reasoning: think, mistral or none. Default: as its chat template says."
    ),
]
RequestLog = Annotated[
    Path | None, typer.Option(help="Folder that keeps a line for each request. Default: the newest, in memory.")
]
DiskFolder = Annotated[
    Path | None, typer.Option(help="Folder on a local disk, with one for each worker, for --disk-mib.")
]
DiskMib = Annotated[
    int, typer.Option(help="Room per worker for blocks that --host-memory-mib has no room for; 0 = none.")
]
Workers = Annotated[int, typer.Option(help="Number of gpu-workers.")]
TensorParallel = Annotated[int, typer.Option(help="Processes that share a worker's model out.")]
Threads = Annotated[
    int, typer.Option(help="CPU threads per worker; 0 shares the machine out. On a cluster: reserved, 1 unless given.")
]
GpusPerWorker = Annotated[
    int, typer.Option(help="With --on: GPUs reserved for each worker, which has a process for each.")
]
NodesPerWorker = Annotated[
    int,
    typer.Option(
        help="With --on: nodes that share out a worker's processes and GPUs; --threads and --host-memory-mib are "
        "those of each."
    ),
]


def _usual_port(of: str, number: int) -> Any:
    return typer.Option(
        show_default=False, help=f"Port of the {of}. Default: {number}, or a free one where somebody has that."
    )


@app.command(cls=Command)
def up(
    model: Model = _DEFAULTS.model,
    port: Annotated[int, typer.Option(help="Port of the REST API; 0 takes a free one.")] = _DEFAULTS.port,
    host: Annotated[str, typer.Option(help="Address of REST and gRPC; other than loopback needs --tenants.")] = (
        _DEFAULTS.host
    ),
    grpc_port: Annotated[int | None, _usual_port("gRPC API", USUAL_GRPC)] = None,
    cache_grpc_port: Annotated[int | None, _usual_port("cache's gRPC", USUAL_CACHE_GRPC)] = None,
    cache_admin_port: Annotated[int | None, _usual_port("cache's admin REST", USUAL_CACHE_ADMIN)] = None,
    cache_admin_grpc_port: Annotated[int | None, _usual_port("cache's admin gRPC", USUAL_CACHE_ADMIN_GRPC)] = None,
    operator_port: Annotated[int | None, _usual_port("scheduler's metrics and records", USUAL_OPERATOR)] = None,
    worker_grpc_port: Annotated[int | None, _usual_port("first worker's gRPC", USUAL_WORKER_GRPC)] = None,
    worker_http_port: Annotated[int | None, _usual_port("first worker's metrics", USUAL_WORKER_HTTP)] = None,
    dtype: Dtype = _DEFAULTS.dtype,
    kv_dtype: Annotated[
        str, typer.Option(help=f"Type of KV in blocks: {', '.join(KV_DTYPES)}. fp8 is less exact.")
    ] = _DEFAULTS.kv_dtype,
    device: Device = _DEFAULTS.device,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU's memory that a worker takes in all, when --num-blocks is not given.")
    ] = _DEFAULTS.gpu_memory_utilization,
    num_blocks: NumBlocks = _DEFAULTS.num_blocks,
    block_size: BlockSize = _DEFAULTS.block_size,
    host_memory_mib: Annotated[
        int, typer.Option(help="Memory per worker for blocks that the device has no room for; 0 = none.")
    ] = _DEFAULTS.host_memory_mib,
    disk_folder: DiskFolder = None,
    disk_mib: DiskMib = _DEFAULTS.disk_mib,
    workers: Workers = _DEFAULTS.workers,
    tensor_parallel: TensorParallel = _DEFAULTS.tensor_parallel,
    threads: Threads = _DEFAULTS.threads,
    tenants: Annotated[Path | None, typer.Option(help="Tenants file; without one everybody is one tenant.")] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="PEM file of the certificate that clients of REST and gRPC see.")
    ] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    max_queued_tokens: QueuedTokens = _DEFAULTS.max_queued_tokens,
    tool_parser: ToolParser = "",
    reasoning_parser: ReasoningParser = "",
    redis_url: Annotated[str, typer.Option(help="Redis or Valkey to use. Default: an embedded Valkey.")] = "",
    otlp_endpoint: Annotated[str, typer.Option(help="OTLP gRPC endpoint for traces, http://HOST:4317.")] = "",
    log_dir: Annotated[Path | None, typer.Option(help="Folder for logs. Default: a temporary one.")] = None,
    request_log: RequestLog = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the logs of all processes.")] = False,
    on: Annotated[
        str,
        typer.Option(
            help="Ray cluster to run on: ray://HEAD (port 10001 unless given), or auto for the one that this machine "
            "is in; cache and scheduler then run on this machine. Needs coppice\\[ray]. Default: this machine alone."
        ),
    ] = "",
    gpus_per_worker: GpusPerWorker = _DEFAULTS.gpus_per_worker,
    nodes_per_worker: NodesPerWorker = _DEFAULTS.nodes_per_worker,
    certs: Annotated[
        Path | None,
        typer.Option(
            help="With --on: folder on every node with what `coppice certs` issued to cache cache-0, scheduler "
            "scheduler-0 and worker worker-0, worker-1, ..."
        ),
    ] = None,
    insecure_network: Annotated[
        bool,
        typer.Option("--insecure-network", help="With --on: no TLS between services, which nobody else reaches."),
    ] = False,
) -> None:
    """Start the whole stack on this machine, for development, or on a Ray cluster. Ctrl-C stops it."""
    options = UpOptions(**locals())  # flags and options have the same names
    from coppice_cli.up import run_up

    raise typer.Exit(run_up(options))


@bench.command(cls=Command)
def smoke(
    url: Annotated[str, typer.Option(help="A running stack, http://HOST:PORT. Default: start one, then stop it.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line and nothing else.")] = False,
    api_key: Annotated[str, typer.Option(help="Bearer token, for a stack with tenants.")] = "",
    model: Model = "",
    dtype: Dtype = _DEFAULTS.dtype,
    device: Device = _DEFAULTS.device,
    num_blocks: NumBlocks = _DEFAULTS.num_blocks,
    block_size: BlockSize = _DEFAULTS.block_size,
    workers: Workers = _DEFAULTS.workers,
    tensor_parallel: TensorParallel = _DEFAULTS.tensor_parallel,
    threads: Threads = _DEFAULTS.threads,
) -> None:
    """Measure prefill, decode, and the first token with a cold and a warm cache; under a minute on a small machine."""
    from coppice_cli.bench.smoke import run_smoke

    options = UpOptions(
        model=model,
        port=0,
        dtype=dtype,
        device=device,
        num_blocks=num_blocks,
        block_size=block_size,
        workers=workers,
        tensor_parallel=tensor_parallel,
        threads=threads,
    )
    raise typer.Exit(run_smoke(url=url, api_key=api_key, as_json=json, options=options))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def sim(context: typer.Context) -> None:
    """Run the deterministic simulation: coppice sim --seed N (see coppice sim --help)."""
    try:
        from coppice_sim.command import main
    except ModuleNotFoundError as error:
        raise CoppiceError(
            f"the simulation is not installed ({error.name} is missing)", hint="install from a checkout: make venv"
        ) from error
    raise typer.Exit(main(context.args))


@app.command()
def health(
    address: Annotated[
        str, typer.Argument(help="HOST:PORT of a gRPC server, or the URL of a REST API, which is asked for /readyz.")
    ],
    cert: TlsCert = None,
    key: TlsKey = None,
    ca: TlsCa = None,
) -> None:
    """Ask a service whether it serves: exit code 0 when it does, 1 when not. For container health checks.

    Certificates of an https:// URL are verified, but not on loopback: a public name never fits there.
    """
    from coppice.addresses import parse_address
    from coppice_up.probe import GrpcServing, RestReady

    files = files_of(cert, key, ca)
    if "://" in address:
        serves = RestReady(address)()
    else:
        serves = GrpcServing(parse_address(address), files)()
    typer.echo("serving" if serves else "not serving", err=not serves)
    raise typer.Exit(EXIT_OK if serves else EXIT_FAILURE)


@app.command()
def version() -> None:
    """Print the version of Coppice, of Python and of what computes."""
    from coppice.versions import versions

    for name, number in versions().items():
        typer.echo(f"{name} {number}")
