"""What the core is told, from the service's settings and its tenants file."""

from __future__ import annotations

import os

from coppice.errors import UsageError
from coppice.tenants.directory import DEFAULT_TENANT_ID, TenantDirectory
from coppice_scheduler.core.state.settings import INSTANCE_BYTES, SchedulerSettings, TenantLimits
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_scheduler.edge.planner.tenant_settings import tenant_settings


def core_settings(settings: ServiceSettings, max_context: int, directory: TenantDirectory | None) -> SchedulerSettings:
    """`directory`: of the tenants file; None: there is none. Raises UsageError."""
    unlimited = TenantLimits(max_concurrency=settings.max_queued + settings.max_running, max_queued=settings.max_queued)
    try:
        core = SchedulerSettings(
            instance=os.urandom(INSTANCE_BYTES),
            max_step_tokens=settings.max_step_tokens,
            max_running=settings.max_running,
            max_chunk_tokens=settings.max_chunk_tokens,
            contested_prefill_tokens=settings.contested_prefill_tokens,
            max_overtake_ms=settings.max_overtake_ms,
            match_window=settings.match_window,
            max_queued=settings.max_queued,
            max_queued_tokens=settings.max_queued_tokens,
            queue_timeout_ms=settings.queue_timeout_ms,
            max_steps_in_flight=settings.max_steps_in_flight,
            max_decode_steps=settings.max_decode_steps,
            extend_more_blocks=settings.extend_more_blocks,
            decode_burst_ms=settings.decode_burst_ms,
            single_flight_wait_ms=settings.single_flight_wait_ms,
            retain_priority=settings.retain_priority,
            max_context=max_context,
            default_limits=unlimited,
            tenants={DEFAULT_TENANT_ID: unlimited},
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return core.with_tenants(tenant_settings(directory)) if directory is not None else core
