"""Which requests at work came with which key: when a key is revoked, they end.

tenant_of(key) -> tokenise -> began(request) .... ended(request)
                      \\           \\-- revoked --> Engine.end, and an error that says so
                       \\-- revoked --> refused here
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode
from coppice_scheduler.edge.base.engine import Engine
from coppice_scheduler.edge.base.errors import from_output
from coppice_scheduler.edge.request_log.open_record import OpenRecord, current_record

_REVOKED = OutputError(OutputErrorCode.KEY_REVOKED, "The API key of this request was revoked.")


class CallsByKey:
    """`directory` is what counts now."""

    def __init__(self, engine: Engine, directory: TenantDirectory) -> None:
        self._engine = engine
        self.directory = directory
        # By request id: with the key that it came with, and its record.
        self._at_work: dict[str, tuple[Tenant, OpenRecord]] = {}

    def replace(self, directory: TenantDirectory) -> None:
        """`directory` counts from now on. Requests whose key is in it no more end with an error."""
        self.directory = directory
        for request_id, (tenant, _) in list(self._at_work.items()):
            if not directory.admits(tenant):
                self._engine.end(request_id, _REVOKED)

    def moved(self, request_id: str) -> None:
        """Its planner was lost; another one goes on."""
        found = self._at_work.get(request_id)
        if found is not None:
            found[1].moved()

    @contextlib.contextmanager
    def at_work(self, request_id: str, tenant: Tenant) -> Iterator[None]:
        """While a request runs. Raises ApiError when the key was revoked since it was looked at."""
        if not self.directory.admits(tenant):
            raise from_output(_REVOKED)
        self._at_work[request_id] = tenant, current_record()
        try:
            yield
        finally:
            del self._at_work[request_id]
