"""Settings of the cache service, and what the core is told of them."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SecretStr, field_validator

from coppice.errors import UsageError
from coppice.ids import DomainId
from coppice.settings import EnvOnly, Settings
from coppice.tenants import DomainShares, TenantDirectory
from coppice_cache.core.errors import SettingsRefused
from coppice_cache.core.settings import CoreSettings, DomainConfig, Mode

SEAL_KEY_BYTES_MIN = 16
SEAL_KEY_BYTES_MAX = 64


class CacheSettings(Settings):
    """The cache service: knows which worker holds which prefix, and who owns each block."""

    env_prefix: ClassVar[str] = "COPPICE_CACHE_"

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    grpc_port: int = Field(7071, ge=0, le=65535, description="Port of the PrefixIndex service; 0 takes a free one.")
    http_port: int = Field(8071, ge=0, le=65535, description="Port of the admin REST; 0 takes a free one.")
    redis_url: str | None = Field(None, description="redis://HOST:PORT/DB of Redis or Valkey; optional.")
    tenants: str | None = Field(None, description="Tenants file; without one, any domain is served.")
    epoch_file: str | None = Field(None, description="File that remembers the cache epoch over restarts.")
    session_ttl_ms: int = Field(10_000, ge=100, description="Silence after which a client's leases are taken back.")
    worker_ttl_ms: int = Field(10_000, ge=100, description="Silence after which a worker's epoch is dead.")
    heartbeat_ms: int = Field(1_000, ge=20, description="How often sessions hear a digest of their leases.")
    otlp_endpoint: str | None = Field(None, description="OTLP gRPC endpoint for traces.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    seal_key: Annotated[SecretStr, EnvOnly("COPPICE_SEAL_KEY")] = Field(
        SecretStr(""), description="Key of the seals: 16 to 64 bytes in hexadecimal."
    )

    @field_validator("seal_key")
    @classmethod
    def _is_hex(cls, value: SecretStr) -> SecretStr:
        try:
            num_bytes = len(bytes.fromhex(value.get_secret_value()))
        except ValueError:
            raise ValueError("must be hexadecimal; make one with: openssl rand -hex 32") from None
        if num_bytes and not SEAL_KEY_BYTES_MIN <= num_bytes <= SEAL_KEY_BYTES_MAX:
            raise ValueError(f"has {num_bytes} bytes; it must have {SEAL_KEY_BYTES_MIN} to {SEAL_KEY_BYTES_MAX}")
        return value

    @property
    def has_seal_key(self) -> bool:
        return bool(self.seal_key.get_secret_value())


def core_settings(settings: CacheSettings) -> CoreSettings:
    """Reads the tenants file; makes a random seal key where none is given. Raises UsageError."""
    key = bytes.fromhex(settings.seal_key.get_secret_value()) or os.urandom(SEAL_KEY_BYTES_MAX)
    directory = TenantDirectory.load(settings.tenants) if settings.tenants else TenantDirectory.single_default()
    try:
        return CoreSettings(
            seal_key=key,
            domains=tuple(_domain_config(shares) for shares in directory.domains()),
            default_domain=None if settings.tenants else DomainConfig(DomainId("default")),
            session_ttl_ms=settings.session_ttl_ms,
            worker_ttl_ms=settings.worker_ttl_ms,
            heartbeat_ms=settings.heartbeat_ms,
        )
    except SettingsRefused as refused:
        raise UsageError(str(refused)) from refused


def _domain_config(shares: DomainShares) -> DomainConfig:
    # The guarantees of a group were summed in floating point and may exceed its maximum by a hair.
    return DomainConfig(
        domain=shares.domain,
        mode=Mode(shares.mode),
        guarantee_share=min(shares.guarantee_share, shares.maximum_share),
        maximum_share=shares.maximum_share,
    )
