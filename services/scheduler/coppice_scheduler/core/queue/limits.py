"""Requests and tokens per minute, as token buckets that hold a minute's worth.

Tokens are those of prompts as they are taken, cached or not, and of outputs as they come. So a bucket may go below
zero; then its tenant waits until it is above again. A prompt larger than a minute's tokens is taken by a full bucket.
What other planners of the cell took counts when they say so, and what was too much by then is paid back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coppice_scheduler.core.state.request import LimitLeft, TenantLimitsLeft
from coppice_scheduler.core.state.settings import TenantLimits

NS_PER_MINUTE = 60_000_000_000
OWED_MINUTES_MAX = 10  # that other planners can bring a bucket below zero: a wrong sum ends nobody's service for long


@dataclass(slots=True)
class Bucket:
    per_minute: int
    level: float
    at_ns: int

    @classmethod
    def full(cls, per_minute: int, now_ns: int) -> Bucket:
        return cls(per_minute, float(per_minute), now_ns)

    def refill(self, now_ns: int) -> None:
        grown = (now_ns - self.at_ns) * self.per_minute / NS_PER_MINUTE
        self.level = min(float(self.per_minute), self.level + grown)
        self.at_ns = now_ns

    def owe(self, amount: int) -> None:
        """Others took so much."""
        lowest = min(self.level, -float(OWED_MINUTES_MAX * self.per_minute))
        self.level = max(self.level - amount, lowest)

    def left(self) -> LimitLeft:
        lacking = self.per_minute - self.level
        return LimitLeft(self.per_minute, max(0, int(self.level)), int(-(-lacking * 60_000 // self.per_minute)))

    def wait_ns(self, amount: int) -> int:
        """Until so much may be taken; 0: now."""
        lacking = min(amount, self.per_minute) - self.level
        return max(0, int(-(-lacking * NS_PER_MINUTE // self.per_minute)))


@dataclass(slots=True)
class _Tenant:
    requests: Bucket | None
    tokens: Bucket | None
    num_outputs: int  # of the tenant, that `tokens` was charged for


class RateLimits:
    def __init__(self, limits_of: Callable[[str], TenantLimits], outputs_of: Callable[[str], int]) -> None:
        """`outputs_of`: tokens that came for a tenant so far."""
        self._limits_of = limits_of
        self._outputs_of = outputs_of
        self._tenants: dict[str, _Tenant] = {}

    def wait_ms(self, tenant: str, num_tokens: int, now_ns: int) -> tuple[int, str]:
        """How long until a prompt of so many tokens may be taken, and which limit says so; 0: now."""
        state = self._refilled(tenant, now_ns)
        waits = []
        if state.requests is not None:
            waits.append((state.requests.wait_ns(1), f"{state.requests.per_minute} requests per minute"))
        if state.tokens is not None:
            waits.append((state.tokens.wait_ns(num_tokens), f"{state.tokens.per_minute} tokens per minute"))
        wait_ns, why = max(waits, default=(0, ""))
        return -(-wait_ns // 1_000_000), why

    def charge(self, tenant: str, num_tokens: int, now_ns: int) -> None:
        """A request was taken."""
        state = self._refilled(tenant, now_ns)
        if state.requests is not None:
            state.requests.level -= 1
        if state.tokens is not None:
            state.tokens.level -= num_tokens

    def charge_elsewhere(self, tenant: str, num_requests: int, num_tokens: int, now_ns: int) -> None:
        """So much was charged by other planners of late; tokens of prompts and outputs."""
        limits = self._limits_of(tenant)
        if not limits.requests_per_minute and not limits.tokens_per_minute:
            return
        state = self._refilled(tenant, now_ns)
        if state.requests is not None:
            state.requests.owe(num_requests)
        if state.tokens is not None:
            state.tokens.owe(num_tokens)

    def left(self, now_ns: int) -> dict[str, TenantLimitsLeft]:
        """Of the tenants that have limits and sent something."""
        found = {}
        for tenant in self._tenants:
            state = self._refilled(tenant, now_ns)
            if state.requests is not None or state.tokens is not None:
                found[tenant] = TenantLimitsLeft(_left(state.requests), _left(state.tokens))
        return found

    def change(self, now_ns: int) -> None:
        """Limits changed. What is left of a minute is left, as far as the new limit has room for it; a limit that there
        was not begins full."""
        for tenant in list(self._tenants):
            state = self._refilled(tenant, now_ns)
            limits = self._limits_of(tenant)
            state.requests = _changed(state.requests, limits.requests_per_minute, now_ns)
            state.tokens = _changed(state.tokens, limits.tokens_per_minute, now_ns)
            state.num_outputs = self._outputs_of(tenant)

    def _refilled(self, tenant: str, now_ns: int) -> _Tenant:
        state = self._tenants.get(tenant)
        if state is None:
            limits = self._limits_of(tenant)
            state = self._tenants[tenant] = _Tenant(
                _full(limits.requests_per_minute, now_ns), _full(limits.tokens_per_minute, now_ns), 0
            )
        if state.requests is not None:
            state.requests.refill(now_ns)
        if state.tokens is not None:
            num_outputs = self._outputs_of(tenant)
            state.tokens.level -= num_outputs - state.num_outputs
            state.num_outputs = num_outputs
            state.tokens.refill(now_ns)
        return state


def _changed(bucket: Bucket | None, per_minute: int, now_ns: int) -> Bucket | None:
    if bucket is None or not per_minute:
        return _full(per_minute, now_ns)
    return Bucket(per_minute, min(bucket.level, float(per_minute)), now_ns)


def _left(bucket: Bucket | None) -> LimitLeft | None:
    return None if bucket is None else bucket.left()


def _full(per_minute: int, now_ns: int) -> Bucket | None:
    return Bucket.full(per_minute, now_ns) if per_minute else None
