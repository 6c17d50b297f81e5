"""What each tenant has used this month, of the records of all front doors, against its budget.

    front doors --write--> records in --request-log <--reads what is new, once a second-- each front door

So a budget holds across restarts and crashes, and over all schedulers that write to one folder. It is passed by what is
at work when it is used up, and by what ends within a second or two.
"""

from __future__ import annotations

import logging
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from coppice.request_log.record import decoded
from coppice.request_log.writer import PREFIX, SUFFIX
from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind

REFRESH_S = 1.0

_log = logging.getLogger("coppice.scheduler")


class Budgets:
    """`refresh` may run in a thread of its own, everything else in that of the front door."""

    def __init__(self, folder: str | None) -> None:
        """Without a folder nothing is known to be used."""
        self._folder = None if folder is None else Path(folder)
        self._month = ""
        self._used: Counter[str] = Counter()
        self._read: dict[Path, int] = {}  # bytes of each file that were counted
        self._warned: set[str] = set()
        self._is_wanted = False  # somebody who calls has a budget

    def refresh(self, now: datetime) -> None:
        """Count what was recorded since the last time; a month begins with nothing."""
        if self._folder is None or not self._is_wanted:
            return
        month = f"{now.astimezone(UTC):%Y-%m}"
        if month != self._month:
            self._month, self._used, self._read, self._warned = month, Counter(), {}, set()
        for path in sorted(self._folder.glob(f"{PREFIX}{month}-*{SUFFIX}")):
            self._count(path)

    def _count(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        return  # its rest is still to come
                    self._read[path] = self._read.get(path, 0) + len(line)
                    record = decoded(line)
                    if record is not None:
                        self._used[record.tenant] += record.tokens_in + record.tokens_out
        except OSError as error:
            _log.warning("what tenants used is not known: %s: %s", path, error)

    def used(self, tenant: str) -> int:
        """Tokens of prompts and outputs of this month."""
        return self._used[tenant]

    def want(self) -> None:
        """From now on count, though nobody with a budget has called."""
        self._is_wanted = True

    def check(self, tenant: Tenant, now: datetime) -> None:
        """Raises ApiError (BUSY) when the budget is used up; says once a month that most of it is."""
        if not tenant.has_budget:
            return
        self.want()
        used = self.used(tenant.id)
        if tenant.tokens_per_month and used >= tenant.tokens_per_month:
            start = _next_month(now)
            message = (
                f"tenant {tenant.id} has used {used} of its {tenant.tokens_per_month} tokens of this month; "
                f"it goes on at {start:%Y-%m-%d} 00:00 UTC"
            )
            left_ms = int((start - now).total_seconds() * 1000)
            raise ApiError(ErrorKind.BUSY, message, code="insufficient_quota", retry_after_ms=left_ms)
        soft = tenant.soft_tokens_per_month
        if soft and used >= soft and tenant.id not in self._warned:
            self._warned.add(tenant.id)
            _log.warning(
                "tenant %s has used %d tokens of this month, of which %d are to be told", tenant.id, used, soft
            )


def _next_month(now: datetime) -> datetime:
    now = now.astimezone(UTC)
    year, month = (now.year + 1, 1) if now.month == 12 else (now.year, now.month + 1)
    return datetime(year, month, 1, tzinfo=UTC)
