"""What a user asked of `coppice up`, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coppice.addresses import is_loopback
from coppice.errors import UsageError
from coppice.tenants.file import load_tenants
from coppice_up.ports import LOOPBACK

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "fp8")
DEVICES = ("auto", "cpu", "cuda")
TOOL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral", "mistral_args", "pythonic", "qwen3_coder", "glm45")
REASONING_PARSERS = ("auto", "none", "think", "mistral")
WORKERS_MAX = 16
RANKS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Flags of `coppice up`; ports of 0 take a free one, empty values leave the choice to the stack."""

    model: str = ""
    host: str = LOOPBACK
    port: int = 8000
    grpc_port: int = 0
    dtype: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    gpu_memory_utilization: float = 0.9
    num_blocks: int = 0
    block_size: int = 16
    host_memory_mib: int = 0
    workers: int = 1
    tensor_parallel: int = 1
    threads: int = 0
    tenants: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    max_queued_tokens: int = 0
    tool_parser: str = ""
    reasoning_parser: str = ""
    redis_url: str = ""
    otlp_endpoint: str = ""
    log_dir: Path | None = None
    verbose: bool = False

    def check(self) -> None:
        """Raise UsageError for what can never work."""
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype} is not known", hint=f"one of {', '.join(DTYPES)}")
        if self.kv_dtype not in KV_DTYPES:
            raise UsageError(f"--kv-dtype {self.kv_dtype} is not known", hint=f"one of {', '.join(KV_DTYPES)}")
        if self.device not in DEVICES:
            raise UsageError(f"--device {self.device} is not known", hint=f"one of {', '.join(DEVICES)}")
        for flag, value, known in (
            ("--tool-parser", self.tool_parser, TOOL_PARSERS),
            ("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS),
        ):
            if value and value not in known:
                raise UsageError(f"{flag} {value} is not known", hint=f"one of {', '.join(known)}")
        if not 1 <= self.workers <= WORKERS_MAX:
            raise UsageError(f"--workers {self.workers} is out of range", hint=f"1 to {WORKERS_MAX}")
        if not 1 <= self.tensor_parallel <= RANKS_MAX:
            raise UsageError(f"--tensor-parallel {self.tensor_parallel} is out of range", hint=f"1 to {RANKS_MAX}")
        if self.block_size < 1:
            raise UsageError(f"--block-size {self.block_size} is out of range", hint="16 is usual")
        if self.num_blocks < 0:
            raise UsageError(f"--num-blocks {self.num_blocks} is out of range", hint="leave it out for a default")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization} is out of range", hint="above 0, at most 1"
            )
        if self.host_memory_mib < 0:
            raise UsageError(f"--host-memory-mib {self.host_memory_mib} is out of range", hint="0 for no host tier")
        if self.threads < 0:
            raise UsageError(f"--threads {self.threads} is out of range", hint="leave it out to share the machine out")
        if self.max_queued_tokens < 0:
            raise UsageError(
                f"--max-queued-tokens {self.max_queued_tokens} is out of range", hint="leave it out for a default"
            )
        for flag, port in (("--port", self.port), ("--grpc-port", self.grpc_port)):
            if not 0 <= port <= 65535:
                raise UsageError(f"{flag} {port} is out of range", hint="0 to 65535; 0 takes a free one")
        if self.port and self.port == self.grpc_port:
            raise UsageError(f"--port and --grpc-port are both {self.port}", hint="REST and gRPC need a port each")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise UsageError("--ssl-certfile and --ssl-keyfile belong together", hint="give both, or none")
        if self.tenants is not None:
            load_tenants(self.tenants)
        elif not is_loopback(self.host):
            raise UsageError(
                f"--host {self.host} can be reached from other machines, and without a tenants file everybody who "
                "reaches it may use it",
                hint="give --tenants FILE (see deploy/tenants.example.yaml), or stay on 127.0.0.1",
            )
