"""How many bytes of calls a front door holds that the engine has not got yet: unfinished bodies, and texts that wait.

    a call's bytes   |-- first SMALL: always --|-- the rest: from its tenant's own share, then from what all share --|

    tenant           OWN, always there      more, up to TENANT           one whole body fits into OWN
    a strict one     OWN and no more: whether its body is read depends on no other tenant
    front door       what tenants hold beyond OWN, up to SHARED          four tenants cannot take OWN from a fifth

So a budget that is used up stops large bodies only, and a tenant that fills its own does not touch those of others. How
many calls with small bodies a tenant may hold is a number of its own.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Self

from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind
from coppice_scheduler.edge.frontend.generation_spec import MAX_BODY_BYTES

SMALL_BYTES = 64 * 1024
OWN_BYTES = MAX_BODY_BYTES
TENANT_BYTES = 16 * 1024 * 1024
SHARED_BYTES = 64 * 1024 * 1024
CALLS_MAX = 1024  # of one tenant
RETRY_AFTER_MS = 1000
_TOO_MANY_BYTES, _TOO_MANY_BODIES = "too_many_bytes", "too_many_bodies"
NO_ROOM_CODES = frozenset({_TOO_MANY_BYTES, _TOO_MANY_BODIES})  # of refusals that leave a body unread


class BodyBudget:
    """Of one front door."""

    def __init__(
        self,
        *,
        tenant_bytes: int = TENANT_BYTES,
        shared_bytes: int = SHARED_BYTES,
        own_bytes: int = OWN_BYTES,
        calls_max: int = CALLS_MAX,
    ) -> None:
        self._tenant_bytes = tenant_bytes
        self._shared_bytes = shared_bytes
        self._own_bytes = own_bytes
        self._calls_max = calls_max
        self._held: Counter[str] = Counter()  # beyond the first SMALL_BYTES of each call
        self._calls: Counter[str] = Counter()
        self._shared = 0  # of all tenants, what each holds beyond its own share

    def body(self, tenant: Tenant) -> Body:
        """For one call's bytes, inside `with`. Raises ApiError (BUSY) where the tenant has too many calls."""
        if self._calls[tenant.id] >= self._calls_max:
            message = f"tenant {tenant.id} has {self._calls_max} calls whose bodies are not read yet, its maximum"
            raise ApiError(ErrorKind.BUSY, message, code=_TOO_MANY_BODIES, retry_after_ms=RETRY_AFTER_MS)
        self._calls[tenant.id] += 1
        return Body(self, tenant.id, self._own_bytes if tenant.mode == "strict" else self._tenant_bytes)

    def take(self, tenant: str, num_bytes: int, bytes_max: int) -> None:
        """`bytes_max`: that the tenant may hold. Raises ApiError: BUSY where it would hold more, UNAVAILABLE where all
        together would."""
        held = self._held[tenant] + num_bytes
        grown = self._beyond_own(held) - self._beyond_own(held - num_bytes)
        if grown and held > bytes_max:
            raise _refusal(ErrorKind.BUSY, f"Large bodies of tenant {tenant} hold all the memory that it may have.")
        if grown and self._shared + grown > self._shared_bytes:
            raise _refusal(ErrorKind.UNAVAILABLE, "Large bodies hold all the memory that there is for them.")
        self._held[tenant] = held
        self._shared += grown

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """The end of a call that held so much."""
        held = self._held[tenant] - num_bytes
        self._shared -= self._beyond_own(held + num_bytes) - self._beyond_own(held)
        self._held[tenant] = held
        self._calls[tenant] -= 1
        if not self._calls[tenant]:
            del self._calls[tenant], self._held[tenant]

    def _beyond_own(self, held: int) -> int:
        return max(held - self._own_bytes, 0)


class Body:
    """One call's bytes, counted until `release` or the end of `with`."""

    def __init__(self, budget: BodyBudget, tenant: str, bytes_max: int) -> None:
        self._budget = budget
        self._bytes_max = bytes_max  # of the tenant
        self.tenant = tenant
        self._parts: list[bytes] = []
        self._num_counted = 0
        self._is_held = True
        self.num_bytes = 0

    def add(self, part: bytes) -> None:
        """Raises ApiError where there is no room."""
        beyond = max(self.num_bytes + len(part) - SMALL_BYTES, 0)
        if beyond > self._num_counted:
            self._budget.take(self.tenant, beyond - self._num_counted, self._bytes_max)
            self._num_counted = beyond
        self._parts.append(part)
        self.num_bytes += len(part)

    def take_bytes(self) -> bytes:
        """All that came. The bytes are the caller's now; they count until `release` all the same."""
        whole = b"".join(self._parts)
        self._parts.clear()
        return whole

    def release(self) -> None:
        """The engine has it now, or nobody."""
        if self._is_held:
            self._is_held = False
            self._parts.clear()
            self._budget.give_back(self.tenant, self._num_counted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def _refusal(kind: ErrorKind, message: str) -> ApiError:
    return ApiError(kind, message, code=_TOO_MANY_BYTES, retry_after_ms=RETRY_AFTER_MS)
