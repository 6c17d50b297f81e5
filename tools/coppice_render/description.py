"""What each service needs wherever it runs in containers: settings, ports, files. Nothing of any orchestrator.

The manifests for Kubernetes are made from it, and a test compares `docker-compose.yml` with it, so that neither lacks
what the other has. Names of hosts are those of both: `cache`, `redis`, `scheduler`, `worker`.

In values, `{tls}`, `{secrets}` and `{tenants}` are folders, `{model}` and `{model_name}` the checkpoint and what
clients call it, `{worker}` the name of one worker, `{worker_host}` where it is reached, `{device}` where it computes,
`{metrics_host}` where the scheduler's metrics listen, `{otlp}` the collector of traces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

USER = 10_001  # of our images
STATE = "/var/lib/coppice"
DISK = "/var/lib/coppice-disk"
ANY_ADDRESS = "0.0.0.0"  # nosec B104: of a container, which its network shuts
DRAIN_S = 30  # what runs gets to end, as --drain-s has it by default
GRACE_S = DRAIN_S + 10  # before a process that was told to end is killed


@dataclass(frozen=True, slots=True)
class Port:
    """`callers`: services that connect to it; `clients`, `operators` and `metrics` are none of ours."""

    name: str
    number: int
    callers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Service:
    """`environment`: variables beside those of TLS. `secrets`: files of `{secrets}`. `state`: what is kept in STATE.
    `disk`: what is kept in DISK, where there is one."""

    name: str
    ports: tuple[Port, ...]
    environment: Mapping[str, str]
    secrets: tuple[str, ...] = ()
    state: str = ""
    disk: str = ""
    reads_model: bool = False
    reads_tenants: bool = False
    pids_max: int = 1024
    default_settings: Mapping[str, str] = field(default_factory=dict)  # why they are set nowhere, by field


TLS = MappingProxyType(
    {
        "COPPICE_TLS_CERT": "{tls}/cert.pem",
        "COPPICE_TLS_KEY": "{tls}/key.pem",
        "COPPICE_TLS_CA": "{tls}/ca.pem",
    }
)
_TUNING = "its default suits most; set it as a variable where it does not"
_OF_TLS = "said once for all services"
_PORT = "the default, which nothing else in its container takes"
_BROWSERS = "by how the browsers of operators reach it; compose publishes ports of one machine, and says so there"
_NO_FILE = "the log of the container has it"
_ABSENT_ALWAYS = {
    **dict.fromkeys(("tls_cert", "tls_key", "tls_ca"), _OF_TLS),
    "insecure_network": "connections between containers are TLS",
    "audit_log": _NO_FILE,
    "log_level": _TUNING,
    "log_format": _TUNING,
}
_SESSIONS = {
    "session_port": _PORT,
    "session_address": "containers speak over TCP",
    "http_host": "as --host",
    "grpc_port": _PORT,
    "http_port": _PORT,
}

CACHE = Service(
    name="cache",
    ports=(
        Port("sessions", 7081, ("scheduler", "worker")),
        Port("grpc", 7071, ()),
        Port("admin-grpc", 7073, ("operators",)),
        Port("admin", 8071, ("operators", "metrics")),
    ),
    environment={
        "COPPICE_SEAL_KEY_FILE": "{secrets}/seal_key",
        "COPPICE_CACHE_HOST": ANY_ADDRESS,
        "COPPICE_CACHE_HTTP_NAMES": "cache,coppice.internal",  # the second one is in all certificates, for browsers
        "COPPICE_CACHE_REDIS_URL": "rediss://coppice@redis:6379/0?ssl_ca_certs={tls}/ca.pem",
        "COPPICE_CACHE_REDIS_PASSWORD_FILE": "{secrets}/redis_password",
        "COPPICE_CACHE_TENANTS": "{tenants}/tenants.yaml",
        "COPPICE_CACHE_EPOCH_FILE": f"{STATE}/epoch",
        "COPPICE_CACHE_OTLP_ENDPOINT": "{otlp}",
    },
    secrets=("seal_key", "redis_password"),
    state="its epoch, which must not go back",
    reads_tenants=True,
    pids_max=4096,  # each session keeps a thread
    default_settings={
        **_ABSENT_ALWAYS,
        **_SESSIONS,
        "admin_grpc_port": _PORT,
        **dict.fromkeys(("session_ttl_ms", "worker_ttl_ms", "reclaim_grace_ms", "heartbeat_ms"), _TUNING),
        **dict.fromkeys(
            ("eviction_policy", "prefill_us_per_token", "copy_us_per_block", "demote_below_share"), _TUNING
        ),
        "audit_interval_s": _TUNING,
        **dict.fromkeys(("requests_url", "rest_url"), _BROWSERS),
        **dict.fromkeys(
            ("kv_events_zmq", "kv_events_replay", "kv_events_redis_stream", "kv_events_domains"),
            "nobody outside follows the cache unless an operator says who",
        ),
        **dict.fromkeys(("kv_events_topic", "kv_events_tokens"), "goes with the other settings of KV events"),
    },
)

SCHEDULER = Service(
    name="scheduler",
    ports=(
        Port("http", 8000, ("clients",)),
        Port("grpc", 7070, ("clients",)),
        Port("metrics", 8073, ("metrics",)),
    ),
    environment={
        "COPPICE_SCHEDULER_HOST": ANY_ADDRESS,
        "COPPICE_SCHEDULER_CACHE": "cache:7081",
        "COPPICE_SCHEDULER_MODEL": "{model}",
        "COPPICE_SCHEDULER_MODEL_NAME": "{model_name}",
        "COPPICE_SCHEDULER_TENANTS": "{tenants}/tenants.yaml",
        "COPPICE_SCHEDULER_METRICS_HOST": "{metrics_host}",
        "COPPICE_SCHEDULER_METRICS_PORT": "8073",
        "COPPICE_SCHEDULER_OTLP_ENDPOINT": "{otlp}",
    },
    reads_model=True,
    reads_tenants=True,
    default_settings={
        **_ABSENT_ALWAYS,
        **dict.fromkeys(("port", "grpc_port"), _PORT),
        **dict.fromkeys(("front_doors", "planners"), _TUNING),
        **dict.fromkeys(("planner_host", "planner_port", "planner_peers"), "one scheduler; see SEVERAL_SCHEDULERS"),
        **dict.fromkeys(("ssl_certfile", "ssl_keyfile"), "an ingress or a gateway before it does the TLS of clients"),
        **dict.fromkeys(("unknown_fields", "tool_parser", "reasoning_parser"), "by the model and its clients"),
        "request_log": "the newest are kept in memory; name a folder on a volume to keep all of them",
        "cors_origins": "no web page may ask unless an operator says which",
        "console_origins": _BROWSERS,
        **dict.fromkeys(
            ("max_step_tokens", "max_chunk_tokens", "contested_prefill_tokens", "max_overtake_ms"), _TUNING
        ),
        **dict.fromkeys(
            ("match_window", "max_running", "max_queued", "max_queued_tokens", "queue_timeout_ms"), _TUNING
        ),
        **dict.fromkeys(("single_flight_wait_ms", "retain_priority", "max_retain_ms", "max_steps_in_flight"), _TUNING),
        **dict.fromkeys(
            ("extend_more_blocks", "max_decode_steps", "decode_burst_ms", "drain_s", "trace_slow_ms"), _TUNING
        ),
    },
)

WORKER = Service(
    name="worker",
    ports=(
        Port("sessions", 7082, ("scheduler",)),
        Port("grpc", 7072, ("operators",)),
        Port("metrics", 8072, ("metrics",)),
    ),
    environment={
        "COPPICE_WORKER_WORKER_ID": "{worker}",
        "COPPICE_WORKER_HOST": ANY_ADDRESS,
        "COPPICE_WORKER_CACHE": "cache:7081",
        "COPPICE_WORKER_ADVERTISE": "{worker_host}:7082",
        "COPPICE_WORKER_MODEL": "{model}",
        "COPPICE_WORKER_MODEL_NAME": "{model_name}",
        "COPPICE_WORKER_DEVICE": "{device}",
        "COPPICE_WORKER_HOST_MEMORY_MIB": "{host_memory_mib}",
        "COPPICE_WORKER_DISK_FOLDER": "{disk_folder}",
        "COPPICE_WORKER_DISK_MIB": "{disk_mib}",
        "COPPICE_WORKER_OTLP_ENDPOINT": "{otlp}",
    },
    state="kernels that were compiled for this machine; made again where they are lost",
    disk="KV of blocks that host memory has no room for; computed again where it is lost",
    reads_model=True,
    default_settings={
        **_ABSENT_ALWAYS,
        **_SESSIONS,
        **dict.fromkeys(("dtype", "kv_dtype", "kernels", "cuda_graphs"), "by the checkpoint and the device"),
        **dict.fromkeys(("num_blocks", "kv_memory_mib", "gpu_memory_utilization", "block_size"), _TUNING),
        **dict.fromkeys(("threads", "max_sequences", "max_step_tokens", "step_timeout_s", "drain_s"), _TUNING),
        **dict.fromkeys(
            ("nnodes", "node_rank", "dist_init_addr"), "a worker is one container, unless manifests have it span nodes"
        ),
        "tensor_parallel": "one device a worker, unless manifests are rendered for more",
    },
)

SERVICES = (CACHE, SCHEDULER, WORKER)

# What schedulers have beside it where there are several: front doors reach the planners of all.
PLANNERS = Port("planners", 7083, ("scheduler",))
PLANNERS_HOST = "scheduler-planners"  # a name that stands for all schedulers
SEVERAL_SCHEDULERS = MappingProxyType(
    {
        "COPPICE_SCHEDULER_PLANNER_HOST": ANY_ADDRESS,
        "COPPICE_SCHEDULER_PLANNER_PORT": str(PLANNERS.number),
        "COPPICE_SCHEDULER_PLANNER_PEERS": f"{PLANNERS_HOST}:{PLANNERS.number}",
    }
)


def filled(service: Service, places: Mapping[str, str]) -> dict[str, str]:
    """Its variables, with those of TLS; `places` has what the names in braces stand for. What comes out empty is left
    out: without a collector no spans are sent."""
    said = {name: value.format(**places) for name, value in {**TLS, **service.environment}.items()}
    return {name: value for name, value in said.items() if value}
