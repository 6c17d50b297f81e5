"""The tenants file in the core's words."""

from __future__ import annotations

from coppice.tenants.directory import TenantDirectory
from coppice_scheduler.core.state.settings import Guarantee, Maximum, TenantLimits, TenantSettings


def tenant_settings(tenants: TenantDirectory) -> TenantSettings:
    limits = {
        tenant.id: TenantLimits(
            max_concurrency=tenant.concurrency,
            max_queued=tenant.max_queued,
            weight=tenant.weight,
            requests_per_minute=tenant.requests_per_minute,
            tokens_per_minute=tenant.tokens_per_minute,
            is_strict=tenant.mode_name == "strict",
        )
        for tenant in tenants.tenants
    }
    domains = tenants.domains()
    return TenantSettings(
        limits=limits,
        domains={tenant.id: tenant.domain for tenant in tenants.tenants},
        fixed_domains=frozenset(shares.domain for shares in domains if shares.mode == "strict"),
        guarantees={
            shares.domain: Guarantee(shares.guarantee_share, shares.guarantee_blocks)
            for shares in domains
            if shares.guarantee_share or shares.guarantee_blocks
        },
        maximums={shares.domain: Maximum(shares.maximum_share, shares.maximum_blocks) for shares in domains},
    )
