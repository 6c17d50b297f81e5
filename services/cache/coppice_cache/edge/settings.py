"""Settings of the cache service, and what the core is told of them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SecretStr, field_validator

from coppice.errors import UsageError
from coppice.ids import DomainId
from coppice.settings import EnvOnly
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.tenant import DomainShares
from coppice.tls.settings import ListeningSettings
from coppice_cache.core.base.errors import SettingsRefused
from coppice_cache.core.base.settings import COSTS_OF_A_DISK, CoreSettings, DomainConfig, Eviction, Mode, TierCosts

SEAL_KEY_BYTES_MIN = 16
SEAL_KEY_BYTES_MAX = 64
_ORIGIN = r"^(https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?)?$"  # it becomes part of a header


class CacheSettings(ListeningSettings):
    """The cache service: knows which worker holds which prefix, and who owns each block."""

    env_prefix: ClassVar[str] = "COPPICE_CACHE_"

    grpc_port: int = Field(7071, ge=0, le=65535, description="Port of the PrefixIndex service; 0 takes a free one.")
    admin_grpc_port: int = Field(
        7073, ge=0, le=65535, description="Port of PrefixIndexAdmin, where the admin REST listens; 0 takes a free one."
    )
    session_port: int = Field(
        7081, ge=0, le=65535, description="Port for sessions of schedulers and workers; 0 takes a free one."
    )
    http_port: int = Field(8071, ge=0, le=65535, description="Port of the admin REST; 0 takes a free one.")
    http_names: tuple[str, ...] = Field(
        (),
        description="Names under which the admin REST is called, such as cache,cache.internal. Others are refused: a "
        "page in a browser may have bent its name to this address. Addresses and localhost are always answered to.",
    )
    requests_url: str = Field(
        "",
        pattern=_ORIGIN,
        description="Where the console finds requests: the scheduler's --metrics-port as a browser of an operator "
        "reaches it, such as http://127.0.0.1:8073; --console-origins there must name the console's own address.",
    )
    rest_url: str = Field(
        "",
        pattern=_ORIGIN,
        description="Where the console's playground finds the REST API as a browser reaches it, such as "
        "http://127.0.0.1:8000; --cors-origins there must name the console's own address.",
    )
    redis_url: str | None = Field(None, description="redis://USER@HOST:PORT/DB of Redis or Valkey; optional.")
    redis_password: Annotated[SecretStr, EnvOnly("COPPICE_CACHE_REDIS_PASSWORD")] = Field(
        SecretStr(""), description="Password of that user of Redis."
    )
    tenants: str | None = Field(None, description="Tenants file; without one, any domain is served.")
    epoch_file: str | None = Field(None, description="File that remembers the cache epoch over restarts.")
    session_ttl_ms: int = Field(10_000, ge=100, description="Silence after which a client's leases are taken back.")
    worker_ttl_ms: int = Field(10_000, ge=100, description="Silence after which a worker's epoch is dead.")
    reclaim_grace_ms: int = Field(
        2_000, ge=20, description="Time that clients have to give borrowed blocks back before they are taken."
    )
    eviction_policy: Literal["adaptive", "lru"] = Field(
        "adaptive", description="What is forgotten first: adaptive learns from each domain what is used again."
    )
    prefill_us_per_token: float | None = Field(
        None,
        gt=0,
        description="What a token costs a worker to compute: a copy from its host tier has to cost less. Default: as "
        "each worker measures it.",
    )
    copy_us_per_block: float | None = Field(
        None,
        gt=0,
        description="What a block costs to copy between device and host. Default: as each worker measures it.",
    )
    demote_below_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of free blocks below which those next to go are copied to the host tier; beside it, as many "
        "as a burst took lately.",
    )
    heartbeat_ms: int = Field(1_000, ge=20, description="How often sessions hear a digest of their leases.")
    audit_interval_s: float = Field(
        600.0,
        ge=0,
        description="Pause between audits of all invariants, in slices beside the work; 0 = only on demand.",
    )
    otlp_endpoint: str | None = Field(
        None, description="OTLP gRPC endpoint for traces: http://HOST:PORT, or https:// under --tls-cert."
    )
    audit_log: str | None = Field(
        None, description="File that gets a JSON line for each act of an operator; default: the log."
    )
    kv_events_zmq: tuple[str, ...] = Field(
        (),
        description="ZMQ endpoint to publish KV events on, as vLLM does, for other routers; such as tcp://*:5557. All "
        "workers are on it, told apart by topic. Routers that expect an endpoint for each worker (Dynamo, SGLang) "
        "need a list: w0=tcp://*:5557,w1=tcp://*:5559.",
    )
    kv_events_replay: tuple[str, ...] = Field(
        (), description="ZMQ endpoint where missed KV events are asked for again; a list of the same workers, if any."
    )
    kv_events_redis_stream: str | None = Field(
        None, min_length=1, description="Redis stream to add KV events to; needs --redis-url."
    )
    kv_events_domains: tuple[str, ...] = Field(
        (),
        description="Domains whose KV events are published, such as tenant/a,group/b. Everybody who reaches the "
        "endpoint or the stream can read all of them, and a router that keeps no tenants apart lets one find out what "
        "another has cached. Without a tenants file, the one default domain; with one, none unless named here.",
    )
    kv_events_topic: str = Field(
        "kv@{worker}@{model}",
        description="Topic of a KV event, made of {worker}, {domain} and {model}. More than one domain needs {domain}.",
    )
    kv_events_tokens: bool = Field(
        False,
        description="Give token ids of blocks, that is the prompts themselves, to readers of KV events and to watchers "
        "that ask for them; never those of strict tenants. Routers that hash tokens on their own (Dynamo, llm-d) need "
        "them; names of blocks are keyed digests and tell nothing.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["text", "json"] = Field("text", description="How a line of the log is written.")
    seal_key: Annotated[SecretStr, EnvOnly("COPPICE_SEAL_KEY")] = Field(
        SecretStr(""),
        description="Key of the seals: 16 to 64 bytes in hexadecimal. Keys of before may follow, after commas: what is "
        "cached and what runs outlives a change then.",
    )

    @field_validator("seal_key")
    @classmethod
    def _are_keys(cls, value: SecretStr) -> SecretStr:
        _seal_keys(value)
        return value

    @field_validator("kv_events_zmq", "kv_events_replay")
    @classmethod
    def _are_endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for worker, endpoint in map(split_endpoint, value):
            if not endpoint.startswith(("tcp://", "ipc://")):
                raise ValueError(f"{endpoint!r} is no ZMQ endpoint; write tcp://ADDRESS:PORT or ipc://PATH")
            if not worker and len(value) > 1:
                raise ValueError(f"{endpoint!r} names no worker; write WORKER={endpoint}, or give a single endpoint")
        if len(dict(map(split_endpoint, value))) < len(value):
            raise ValueError("a worker is named twice")
        return value

    @property
    def has_seal_key(self) -> bool:
        return bool(self.seal_key.get_secret_value())


def _seal_keys(value: SecretStr) -> list[bytes]:
    """Raises ValueError."""
    keys = []
    for text in value.get_secret_value().split(",") if value.get_secret_value() else []:
        try:
            keys.append(bytes.fromhex(text))
        except ValueError:
            raise ValueError("must be hexadecimal; make one with: openssl rand -hex 32") from None
        if not SEAL_KEY_BYTES_MIN <= len(keys[-1]) <= SEAL_KEY_BYTES_MAX:
            size = f"{SEAL_KEY_BYTES_MIN} to {SEAL_KEY_BYTES_MAX}"
            raise ValueError(f"has {len(keys[-1])} bytes; it must have {size}")
    if len(set(keys)) < len(keys):
        raise ValueError("names a key twice; the new one comes first, those of before follow")
    return keys


def split_endpoint(entry: str) -> tuple[str, str]:
    """(worker, endpoint) of WORKER=ENDPOINT; the worker is empty for all of them."""
    worker, _, endpoint = entry.rpartition("=")
    return worker, endpoint


def core_settings(settings: CacheSettings, directory: TenantDirectory) -> CoreSettings:
    """Makes a random seal key where none is given. Raises UsageError."""
    key, *previous_keys = _seal_keys(settings.seal_key) or [os.urandom(SEAL_KEY_BYTES_MAX)]
    try:
        return CoreSettings(
            seal_key=key,
            previous_seal_keys=tuple(previous_keys),
            domains=domain_configs(directory),
            default_domain=None if settings.tenants else DomainConfig(DomainId("default")),
            session_ttl_ms=settings.session_ttl_ms,
            worker_ttl_ms=settings.worker_ttl_ms,
            heartbeat_ms=settings.heartbeat_ms,
            reclaim_grace_ms=settings.reclaim_grace_ms,
            eviction=Eviction(settings.eviction_policy),
            tiers=_tier_costs(settings),
            disk_costs=_disk_costs(settings),
            demote_below_share=settings.demote_below_share,
            record_events=True,
        )
    except SettingsRefused as refused:
        raise UsageError(str(refused)) from refused


def _tier_costs(settings: CacheSettings) -> TierCosts:
    prefill_us, copy_us, unmeasured = settings.prefill_us_per_token, settings.copy_us_per_block, TierCosts()
    return TierCosts(
        prefill_us_per_token=prefill_us or unmeasured.prefill_us_per_token,
        copy_us_per_block=copy_us or unmeasured.copy_us_per_block,
        is_prefill_fixed=prefill_us is not None,
        is_copy_fixed=copy_us is not None,
    )


def _disk_costs(settings: CacheSettings) -> TierCosts:
    """A token costs the same, wherever blocks come from."""
    if (prefill_us := settings.prefill_us_per_token) is None:
        return COSTS_OF_A_DISK
    return replace(COSTS_OF_A_DISK, prefill_us_per_token=prefill_us, is_prefill_fixed=True)


def domain_configs(directory: TenantDirectory) -> tuple[DomainConfig, ...]:
    return tuple(_domain_config(shares) for shares in directory.domains())


def _domain_config(shares: DomainShares) -> DomainConfig:
    # The guarantees of a group were summed in floating point and may exceed its maximum by a hair.
    return DomainConfig(
        domain=shares.domain,
        mode=Mode(shares.mode),
        guarantee_share=min(shares.guarantee_share, shares.maximum_share),
        maximum_share=shares.maximum_share,
        guarantee_blocks=shares.guarantee_blocks,
        maximum_blocks=shares.maximum_blocks,
        zero_on_change=shares.zero_on_change,
    )
