"""Settings of a gpu-worker."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from coppice.settings import SessionAddressText
from coppice.tls.settings import ListeningSettings


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
    kernels: Literal["auto", "native", "torch", "triton"] = Field(
        "auto", description="auto: triton on a GPU, native (C++, compiled at first use) on a CPU, else torch."
    )
    num_blocks: int | None = Field(None, ge=1, le=1 << 24, description="Blocks; default: as many as there is room for.")
    kv_memory_mib: int = Field(512, ge=1, description="Memory for KV on a CPU when --num-blocks is not given.")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of a GPU's memory to take in all when --num-blocks is not given."
    )
    host_memory_mib: int = Field(
        0, ge=0, description="Memory of this machine for blocks that the device has no room for; 0 = none."
    )
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per block.")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: as many as cores it may use.")
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that share the model out: one GPU each; on a CPU they share --threads and its memory.",
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
