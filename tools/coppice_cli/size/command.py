"""`coppice size`: its flags, and what is printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coppice.errors import UnavailableError, UsageError
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Role
from coppice_cli.cache.client import CacheClient
from coppice_cli.tls_options import TlsCa, TlsCert, TlsKey, files_of
from coppice_cli.variables import Command
from coppice_up.options import DTYPES, KV_DTYPES

if TYPE_CHECKING:
    from coppice_cli.size.arithmetic import Asked, Pool

_GIB, _MIB, _KIB = 1 << 30, 1 << 20, 1 << 10
_CONFIG_FILES = ("config.json", "generation_config.json")
_KV_MEMORY_GIB = 0.5  # a worker's --kv-memory-mib on a CPU


class RunningCache(CacheClient):
    flag = "--running"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flags:
    model: str
    memory_gib: float
    context: int
    shared: int
    device: str
    dtype: str
    kv_dtype: str
    block_size: int
    tensor_parallel: int
    gpu_memory_utilization: float
    running: str
    as_json: bool
    cert: Path | None
    key: Path | None
    ca: Path | None

    @property
    def computed_dtype(self) -> str:
        """As a worker chooses it."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.device == "cuda" else "float32"

    def check(self) -> None:
        """Raises UsageError."""
        for flag, value, known in (
            ("--device", self.device, ("cuda", "cpu")),
            ("--dtype", self.dtype, DTYPES),
            ("--kv-dtype", self.kv_dtype, KV_DTYPES),
        ):
            if value not in known:
                raise UsageError(f"{flag} {value} is not known", hint=f"one of {', '.join(known)}")


def add_to(app: typer.Typer) -> None:
    app.command(cls=Command)(size)


def size(
    model: Annotated[
        str, typer.Option(help="Checkpoint folder or hub id, of which config.json is read. Default: the demo model.")
    ] = "",
    memory_gib: Annotated[
        float,
        typer.Option(
            min=0,
            help="Memory of each GPU; on a CPU, that set aside for KV. Default: this machine's GPU; 0.5 on a CPU.",
        ),
    ] = 0.0,
    context: Annotated[
        int, typer.Option(min=0, help="Tokens of a request, its answer included. Default: the model's.")
    ] = 0,
    shared: Annotated[int, typer.Option(min=0, help="Of those, how many all requests begin with.")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    dtype: Annotated[str, typer.Option(help=f"Type of weights and computation: {', '.join(DTYPES)}.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help=f"Type of KV in blocks: {', '.join(KV_DTYPES)}.")] = "auto",
    block_size: Annotated[int, typer.Option(min=1, max=1024, help="Tokens per KV block.")] = 16,
    tensor_parallel: Annotated[int, typer.Option(min=1, max=64, help="GPUs that share the model out.")] = 1,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of a GPU's memory that a worker takes in all.")
    ] = 0.9,
    running: Annotated[
        str, typer.Option(help="Admin REST of a running cache: also what its workers have measured, http://HOST:PORT.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line and nothing else.")] = False,
    cert: TlsCert = None,
    key: TlsKey = None,
    ca: TlsCa = None,
) -> None:
    """How many blocks a model leaves room for, and how many requests of a length run at once."""
    flags = _Flags(**locals())  # they have the same names
    flags.check()
    measured = _running_blocks(running, cert, key, ca) if running else {}
    asked, pool, found = _sized(flags, measured)
    if as_json:
        typer.echo(json.dumps({name: value for name, value in found.items() if name != "basis"}, separators=(",", ":")))
        return
    for line in _lines(found, pool, asked, gpu_memory_utilization):
        typer.echo(line)


def _sized(flags: _Flags, measured: dict[str, int]) -> tuple[Asked, Pool, dict[str, Any]]:
    """`measured`: blocks of workers that run. Raises CoppiceError."""
    from coppice_cli.size.arithmetic import Asked, pool_on_cpu, pool_on_gpu, requests_at_once
    from coppice_worker.model.config.config import read_config

    config = read_config(_folder(flags.model))
    context = flags.context or config.max_context
    if context > config.max_context:
        raise UsageError(
            f"--context {context} is more than the model has", hint=f"its context is {config.max_context} tokens"
        )
    asked = Asked(
        config=config,
        dtype=flags.computed_dtype,
        kv_dtype=flags.kv_dtype,
        block_size=flags.block_size,
        ranks=flags.tensor_parallel,
    )
    if flags.device == "cpu":
        total = int((flags.memory_gib or _KV_MEMORY_GIB) * _GIB)
        pool, basis = pool_on_cpu(asked, kv_memory=total), "given" if flags.memory_gib else "the worker's default"
    else:
        total, free, basis = _gpu_memory(flags.memory_gib)
        pool = pool_on_gpu(asked, total=total, free=free, utilization=flags.gpu_memory_utilization)

    def fits(num_blocks: int) -> int:
        most = asked.limits.max_sequences
        return requests_at_once(
            num_blocks, context=context, shared=flags.shared, block_size=flags.block_size, most=most
        )

    found = {
        "family": config.family,
        "device": flags.device,
        "dtype": asked.dtype,
        "kv_dtype": asked.kv_dtype,
        "ranks": asked.ranks,
        "memory_bytes": total,
        "weights_bytes": pool.weights,
        "step_bytes": pool.step,
        "libraries_bytes": pool.libraries,
        "kv_bytes_per_token": pool.bytes_per_token,
        "kv_bytes_per_block": pool.bytes_per_block,
        "block_size": asked.block_size,
        "blocks": pool.num_blocks,
        "context": context,
        "shared": flags.shared,
        "requests": fits(pool.num_blocks),
        "running": {name: {"blocks": blocks, "requests": fits(blocks)} for name, blocks in measured.items()},
        "basis": basis,
    }
    return asked, pool, found


def _lines(found: dict[str, Any], pool: Pool, asked: Asked, utilization: float) -> list[str]:
    on_gpu, each = found["device"] == "cuda", " of each GPU" if asked.ranks > 1 else ""
    certainty = "estimate" if on_gpu else "exact"
    requests = f"requests of {found['context']} tokens"
    if found["shared"]:
        requests += f", {found['shared']} of them the same"
    rows = [
        (f"memory{each}" if on_gpu else "memory for KV", _bytes(found["memory_bytes"]), found["basis"]),
        (f"weights{each}", _bytes(pool.weights), f"exact: {asked.dtype}, by config.json"),
        (
            f"a largest step{each}",
            _bytes(pool.step),
            f"estimate: {asked.limits.max_step_tokens} tokens, {asked.limits.max_sequences} rows",
        ),
    ]
    if on_gpu:
        rows.append(("libraries, graphs", _bytes(pool.libraries), "allowance; a worker measures it when it starts"))
        rows.append(("share for all of it", f"{utilization:.0%}", "--gpu-memory-utilization"))
    rows += [
        (f"KV of a token{each}", _bytes(pool.bytes_per_token), "exact"),
        (f"KV of a block{each}", _bytes(pool.bytes_per_block), f"exact: {found['block_size']} tokens"),
        ("blocks", f"{pool.num_blocks}", f"{certainty}: {pool.num_blocks * found['block_size']} tokens"),
        (requests, f"{found['requests']}", f"{certainty}; at most {asked.limits.max_sequences} run at once"),
    ]
    for name, measured in found["running"].items():
        rows.append((f"{name} now: blocks", f"{measured['blocks']}", "measured by that worker"))
        rows.append((f"{name} now: such requests", f"{measured['requests']}", "by its blocks"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    head = f"{found['family']}, {asked.config.num_layers} layers, {asked.dtype} on {found['device']}"
    return [head, *(f"  {name:{widths[0]}}  {value:>{widths[1]}}  {said}" for name, value, said in rows)]


def _folder(model: str) -> Path:
    """Weights are not loaded, nor downloaded. Raises UsageError, UnavailableError, CheckpointError."""
    from coppice_up.checkpoint import demo_model_folder
    from coppice_worker.model.config.resolve import resolve_checkpoint

    return resolve_checkpoint(model, _CONFIG_FILES) if model else demo_model_folder()


def _gpu_memory(memory_gib: float) -> tuple[int, int, str]:
    """Total, free, and where that is from. Raises UsageError, UnavailableError."""
    if memory_gib:
        return int(memory_gib * _GIB), int(memory_gib * _GIB), "given"
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError(
            "torch sees no GPU here", hint="give the memory of one with --memory-gib, or say --device cpu"
        )
    free, total = torch.cuda.mem_get_info(0)
    return total, free, f"measured: {torch.cuda.get_device_name(0)}, {_bytes(free)} of it free"


def _running_blocks(url: str, cert: Path | None, key: Path | None, ca: Path | None) -> dict[str, int]:
    files = files_of(cert, key, ca)
    stats = RunningCache(url, None if files is None else Credentials(files, Role.OPERATOR)).stats()
    return {one["worker_id"]: one["num_blocks"] for one in stats["workers"]}


def _bytes(count: int) -> str:
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"
