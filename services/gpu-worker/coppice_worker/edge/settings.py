"""Settings of a gpu-worker."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from coppice.addresses import Address, parse_address
from coppice.errors import UsageError
from coppice.settings import SessionAddressText
from coppice.tls.settings import GIVE_TLS, ListeningSettings, refuse_open_hosts

_ANY_HOST = ("", "0.0.0.0", "::")  # nosec # refused (B104)


def _checked_meeting(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        address = parse_address(text)
    except UsageError as error:
        raise ValueError(error.line()) from None
    if address.host in _ANY_HOST or not address.port:
        raise ValueError(f"{text!r} is nowhere that other nodes could go: give the host and port of node 0")
    return text


class WorkerSettings(ListeningSettings):
    """The gpu-worker: holds a model and its block pool, computes the steps that a scheduler plans."""

    env_prefix: ClassVar[str] = "COPPICE_WORKER_"

    worker_id: str = Field("worker-0", min_length=1, max_length=128, description="Name, unique per stack.")
    cache: SessionAddressText = Field(
        "127.0.0.1:7081", description="HOST:PORT or unix:/PATH where the cache service accepts sessions."
    )
    session_port: int = Field(7082, ge=0, le=65535, description="Port for schedulers; 0 takes a free one.")
    grpc_port: int = Field(7072, ge=0, le=65535, description="Port of Drain, Stats and health; 0 takes a free one.")
    http_port: int = Field(8072, ge=0, le=65535, description="Port of /metrics, /healthz and /readyz.")
    advertise: SessionAddressText | None = Field(
        None, description="HOST:PORT or unix:/PATH that schedulers are told; default: where sessions are accepted."
    )
    model: str = Field(description="Checkpoint folder (config.json and safetensors), or a hub id.")
    model_name: str | None = Field(None, description="Name in namespaces and listings; default: the folder's name.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of weights and computation; auto is float32 on a CPU and bfloat16 on a GPU."
    )
    kv_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="Type of KV in blocks; fp8 takes about half the room of 16 bits, and is less exact."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to compute.")
    kernels: Literal["auto", "native", "torch", "triton", "flashinfer"] = Field(
        "auto",
        description="auto: triton on a GPU, native (C++, compiled at first use) on a CPU, else torch. "
        "flashinfer: triton, and for long chunks FlashInfer, where that is installed.",
    )
    num_blocks: int | None = Field(None, ge=1, le=1 << 24, description="Blocks; default: as many as there is room for.")
    kv_memory_mib: int = Field(512, ge=1, description="Memory for KV on a CPU when --num-blocks is not given.")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of a GPU's memory to take in all when --num-blocks is not given."
    )
    host_memory_mib: int = Field(
        0, ge=0, description="Memory of this machine for blocks that the device has no room for; 0 = none."
    )
    disk_folder: str | None = Field(
        None, description="Folder on a local disk for --disk-mib of blocks that --host-memory-mib has no room for."
    )
    disk_mib: int = Field(0, ge=0, description="Room for blocks in --disk-folder; 0 = none.")
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per block.")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: as many as cores it may use.")
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that share the model out: one GPU each; on a CPU they share --threads and its memory.",
    )
    nnodes: int = Field(
        1, ge=1, le=64, description="Machines that share the model out, --tensor-parallel evenly; each runs a worker."
    )
    node_rank: int = Field(
        0, ge=0, le=63, description="Which of --nnodes this is; 0 is the worker that everybody else knows."
    )
    dist_init_addr: Annotated[str | None, AfterValidator(_checked_meeting)] = Field(
        None, description="HOST:PORT of node 0 where the other nodes meet it; the same for all of --nnodes."
    )
    max_sequences: int = Field(256, ge=1, le=65536, description="Sequences attached at once.")
    max_step_tokens: int = Field(8192, ge=1, description="Tokens of one step.")
    cuda_graphs: bool = Field(True, description="Record decode steps at the start and launch each as one, on a GPU.")
    step_timeout_s: float = Field(300.0, gt=0, description="A step that runs longer hangs: the process ends, exit 1.")
    drain_s: float = Field(
        30.0, ge=0, description="Time that running requests get to end after SIGTERM; a second SIGTERM cuts them."
    )
    otlp_endpoint: str | None = Field(
        None, description="OTLP gRPC endpoint for traces: http://HOST:PORT, or https:// under --tls-cert."
    )
    audit_log: str | None = Field(
        None, description="File that gets a JSON line for each act of an operator; default: the log."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["text", "json"] = Field("text", description="How a line of the log is written.")

    @model_validator(mode="after")
    def _nodes_fit(self) -> Self:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank {self.node_rank}: the nodes of --nnodes {self.nnodes} are counted from 0")
        if self.tensor_parallel % self.nnodes:
            raise ValueError(
                f"--tensor-parallel {self.tensor_parallel} cannot be shared out evenly among --nnodes {self.nnodes}"
            )
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise ValueError(f"--nnodes {self.nnodes} needs --dist-init-addr: the HOST:PORT where node 0 is met")
        return self

    @model_validator(mode="after")
    def _disk_fits(self) -> Self:
        if self.disk_mib and not self.disk_folder:
            raise ValueError("--disk-mib needs --disk-folder: where blocks are kept")
        if self.disk_mib and not self.host_memory_mib:
            raise ValueError("--disk-mib needs --host-memory-mib: a disk is read to there and written from there")
        if self.disk_mib and self.tensor_parallel > 1:
            raise ValueError("--disk-mib: a model that is shared out (--tensor-parallel) has no disk tier")
        return self

    @property
    def ranks_per_node(self) -> int:
        return self.tensor_parallel // self.nnodes

    @property
    def ranks_here(self) -> range:
        """Ranks of this node."""
        return range(self.node_rank * self.ranks_per_node, (self.node_rank + 1) * self.ranks_per_node)

    def device_of(self, rank: int) -> int:
        """Number, on its own machine, of the GPU of a rank."""
        return rank % self.ranks_per_node

    @property
    def meets_at(self) -> Address:
        """Where nodes meet. For a worker of several."""
        assert self.dist_init_addr is not None
        return parse_address(self.dist_init_addr)

    def check_listening(self) -> None:
        """Raises UsageError as every service does, and where ranks on other machines could be anybody."""
        super().check_listening()
        if self.nnodes > 1 and self.tls_cert is None and not self.insecure_network:
            refuse_open_hosts(
                {"--dist-init-addr": self.meets_at.host},
                "without TLS whoever reaches it can read every prompt and compute as a rank of this worker",
                f"{GIVE_TLS}, or say --insecure-network where only these services reach that network",
            )
