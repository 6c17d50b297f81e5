"""What a user asked of `coppice up`, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from coppice.addresses import Address, is_loopback, parse_address
from coppice.errors import UsageError
from coppice_up.ports import LOOPBACK

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "fp8")
DEVICES = ("auto", "cpu", "cuda")
TOOL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral", "mistral_args", "pythonic", "qwen3_coder", "glm45")
REASONING_PARSERS = ("auto", "none", "think", "mistral")
WORKERS_MAX = 16
WORKERS_ON_RAY_MAX = 64
AUTO = "auto"
RAY = "ray://"
RAY_CLIENT_PORT = 10001
RANKS_MAX = 64
PORT_MAX = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Flags of `coppice up`. Empty values leave the choice to the stack; a port of 0 is any free one, None the usual
    one or, where somebody has that, a free one."""

    model: str = ""
    host: str = LOOPBACK
    port: int = 8000
    grpc_port: int | None = 0
    cache_grpc_port: int | None = 0
    cache_admin_port: int | None = 0
    cache_admin_grpc_port: int | None = 0
    operator_port: int | None = 0
    worker_grpc_port: int | None = 0
    worker_http_port: int | None = 0
    dtype: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    gpu_memory_utilization: float = 0.9
    num_blocks: int = 0
    block_size: int = 16
    host_memory_mib: int = 0
    disk_folder: Path | None = None
    disk_mib: int = 0
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
    request_log: Path | None = None
    verbose: bool = False
    on: str = ""
    gpus_per_worker: int = 0
    nodes_per_worker: int = 1
    certs: Path | None = None
    insecure_network: bool = False

    @property
    def gpus(self) -> int:
        """Those that a host reserves for each worker."""
        return self.gpus_per_worker or (self.tensor_parallel if self.device == "cuda" else 0)

    @property
    def ranks(self) -> int:
        """Processes of each worker; several GPUs of a worker are one each."""
        return self.tensor_parallel if self.tensor_parallel > 1 else max(1, self.gpus_per_worker)

    @property
    def listens_on(self) -> str:
        """Host of REST and gRPC; empty where it is the address of a node that the host chooses."""
        return "" if self.on.startswith(RAY) else self.host

    def at_usual_ports(self) -> UpOptions:
        """The same, with the usual port of everything but REST, as `coppice up` has them without a flag."""
        return replace(
            self,
            grpc_port=None,
            cache_grpc_port=None,
            cache_admin_port=None,
            cache_admin_grpc_port=None,
            operator_port=None,
            worker_grpc_port=None,
            worker_http_port=None,
        )

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
        workers_max = WORKERS_ON_RAY_MAX if self.on else WORKERS_MAX
        if not 1 <= self.workers <= workers_max:
            raise UsageError(f"--workers {self.workers} is out of range", hint=f"1 to {workers_max}")
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
        self._check_tiers()
        if self.threads < 0:
            raise UsageError(f"--threads {self.threads} is out of range", hint="leave it out to share the machine out")
        if self.max_queued_tokens < 0:
            raise UsageError(
                f"--max-queued-tokens {self.max_queued_tokens} is out of range", hint="leave it out for a default"
            )
        self._check_ports()
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise UsageError("--ssl-certfile and --ssl-keyfile belong together", hint="give both, or none")
        self._check_cluster()
        if self.on.startswith(RAY):
            return  # the rest is on nodes
        if self.tenants is not None:
            from coppice.tenants.file import load_tenants  # here: flags alone need none of it

            load_tenants(self.tenants)
        elif not is_loopback(self.host):
            raise UsageError(
                f"--host {self.host} can be reached from other machines, and without a tenants file everybody who "
                "reaches it may use it",
                hint="give --tenants FILE (see deploy/tenants.example.yaml), or stay on 127.0.0.1",
            )

    def _check_tiers(self) -> None:
        """Raise UsageError for sizes below the device's that can never work."""
        if self.host_memory_mib < 0:
            raise UsageError(f"--host-memory-mib {self.host_memory_mib} is out of range", hint="0 for no host tier")
        if self.disk_mib < 0:
            raise UsageError(f"--disk-mib {self.disk_mib} is out of range", hint="0 for no disk tier")
        if bool(self.disk_mib) != (self.disk_folder is not None):
            raise UsageError("--disk-folder and --disk-mib belong together", hint="give both, or none")
        if self.disk_mib and not self.host_memory_mib:
            raise UsageError("--disk-mib without --host-memory-mib", hint="a disk is read to there: give some of both")
        if self.disk_mib and self.ranks > 1:
            raise UsageError(
                f"--disk-mib: a model that {self.ranks} processes share has no disk tier", hint="leave it out"
            )
        folder = self.disk_folder
        if folder is not None and not self.on.startswith(RAY) and not folder.is_dir():
            raise UsageError(f"--disk-folder {folder} is not there", hint="mount the disk, or make the folder")

    def _check_ports(self) -> None:
        """Raise UsageError for ports that are none, and for those that were given twice."""
        given: dict[int, str] = {}
        for flag, port in (
            ("--port", self.port),
            ("--grpc-port", self.grpc_port),
            ("--cache-grpc-port", self.cache_grpc_port),
            ("--cache-admin-port", self.cache_admin_port),
            ("--cache-admin-grpc-port", self.cache_admin_grpc_port),
            ("--operator-port", self.operator_port),
            ("--worker-grpc-port", self.worker_grpc_port),
            ("--worker-http-port", self.worker_http_port),
        ):
            if not port:
                continue
            count = self.workers if flag.startswith("--worker") else 1
            if not 0 < port <= PORT_MAX + 1 - count:
                last = f", and the last of {count} workers has {port + count - 1}" if count > 1 else ""
                raise UsageError(f"{flag} {port} is out of range{last}", hint="0 to 65535; 0 takes a free one")
            for number in range(port, port + count):
                if number in given:
                    raise UsageError(
                        f"{given[number]} and {flag} are both {number}",
                        hint="each needs a port of its own; workers have that of the first one and those above it",
                    )
                given[number] = flag

    def _check_cluster(self) -> None:
        """Raise UsageError for flags of a Ray cluster that can never work."""
        if not self.on:
            for flag, value in (
                ("--gpus-per-worker", self.gpus_per_worker),
                ("--nodes-per-worker", self.nodes_per_worker != 1),
                ("--certs", self.certs),
                ("--insecure-network", self.insecure_network),
            ):
                if value:
                    raise UsageError(f"{flag} is for a cluster", hint="give --on ray://HEAD or --on auto, too")
            return
        if self.on != AUTO and not ray_head(self.on):
            raise UsageError(
                f"--on {self.on} is no cluster",
                hint="ray://HEAD or ray://HEAD:10001 for a Ray cluster, auto for the one that this machine is in",
            )
        if self.gpus_per_worker < 0:
            raise UsageError(f"--gpus-per-worker {self.gpus_per_worker} is out of range", hint="0 for none")
        if self.tensor_parallel > 1 and self.gpus not in (0, self.tensor_parallel):
            raise UsageError(
                f"--gpus-per-worker {self.gpus_per_worker} and --tensor-parallel {self.tensor_parallel} differ",
                hint="each process of a worker has one GPU: leave one of them out",
            )
        if self.nodes_per_worker < 1:
            raise UsageError(f"--nodes-per-worker {self.nodes_per_worker} is too few", hint="give at least 1")
        if self.ranks % self.nodes_per_worker:
            raise UsageError(
                f"{self.ranks} process{'es' * (self.ranks > 1)} of a worker cannot be shared out evenly among "
                f"--nodes-per-worker {self.nodes_per_worker}",
                hint=f"give a multiple of {self.nodes_per_worker} with --gpus-per-worker or --tensor-parallel, which "
                "count those of all nodes",
            )
        if self.certs is None and not self.insecure_network:
            raise UsageError(
                "services on several machines speak over a network, and without TLS whoever reaches it can read every "
                "prompt and speak as any service",
                hint="give --certs FOLDER (coppice certs makes it), or say --insecure-network where only these "
                "services reach that network",
            )
        if self.on != AUTO and self.tenants is None:
            raise UsageError(
                "with --on ray://HEAD REST and gRPC listen on the address of a node, and without a tenants file "
                "everybody who reaches it may use them",
                hint="give --tenants FILE (see deploy/tenants.example.yaml), or --on auto on a machine of the cluster",
            )
        if self.on != AUTO and self.host != LOOPBACK:
            raise UsageError(
                f"--host {self.host} has no meaning with --on ray://HEAD",
                hint="the node that Ray chooses has an address",
            )


def ray_head(on: str) -> Address | None:
    """Where the Ray client server of `ray://HEAD[:PORT]` listens; None for anything else."""
    if not on.startswith(RAY):
        return None
    rest = on.removeprefix(RAY)
    try:
        return parse_address(rest if _has_port(rest) else f"{rest}:{RAY_CLIENT_PORT}")
    except UsageError:
        return None


def _has_port(text: str) -> bool:
    return ":" in text.rpartition("]")[2]
