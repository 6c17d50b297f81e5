"""Calls that came with an `Idempotency-Key`: whose they are, who waits for them, and their answers for a time.

    claim --> at work --settle--> answered: kept, in order of their ends --KEPT_NS, or no room--> gone
                 |   \\--> failed, too long, its front door or its tenant gone: forgotten
                 waiters hear of each end

    bytes of a tenant   |-- OWN: always there --|-- more, up to TENANT: from what all share --|   a strict one: OWN

A tenant that finds no room gives up its own oldest answers, never another's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from coppice_scheduler.edge.base.idempotency import (
    ANSWER_BYTES_MAX,
    Claim,
    Claimed,
    ClaimState,
    FirstOutcome,
    Settled,
)

KEPT_NS = 600_000_000_000
OWN_BYTES = 2 * ANSWER_BYTES_MAX
TENANT_BYTES = 8 * ANSWER_BYTES_MAX
SHARED_BYTES = 64 * ANSWER_BYTES_MAX
CALLS_MAX = 1024  # of one tenant, at work and kept
WAITERS_MAX = 16  # for one call
_ENTRY_BYTES = 512  # that a call takes beside its answer

Asker = tuple[int, int]  # front door, number of the claim
Told = tuple[int, Claimed]  # to this front door
_Key = tuple[str, bytes]  # tenant, digest of the key


@dataclass(slots=True, eq=False)
class _Call:
    key: _Key
    call: bytes
    is_strict: bool
    owner: Asker
    waiters: list[Asker] = field(default_factory=list)
    outcome: FirstOutcome | None = None  # once it was answered
    until_ns: int = 0  # from then on

    @property
    def num_bytes(self) -> int:
        """That its answer holds; none while it is at work."""
        return _ENTRY_BYTES + len(self.outcome.body) if self.outcome is not None else 0


class AnswerTable:
    """Of all front doors. The tenant is a part of what is looked up: what another one has is not found."""

    def __init__(
        self,
        *,
        own_bytes: int = OWN_BYTES,
        tenant_bytes: int = TENANT_BYTES,
        shared_bytes: int = SHARED_BYTES,
        calls_max: int = CALLS_MAX,
        waiters_max: int = WAITERS_MAX,
    ) -> None:
        self._own_bytes = own_bytes
        self._tenant_bytes = tenant_bytes
        self._shared_bytes = shared_bytes
        self._calls_max = calls_max
        self._waiters_max = waiters_max
        self._calls: dict[_Key, _Call] = {}
        self._at_work: dict[Asker, _Call] = {}
        self._kept: dict[str, dict[_Key, _Call]] = {}  # by tenant, in the order of their ends
        self._num_calls: Counter[str] = Counter()
        self._held: Counter[str] = Counter()  # bytes by tenant
        self._shared = 0  # bytes of all tenants, what each holds beyond its own room

    def claim(self, door: int, claim: Claim, now_ns: int) -> list[Told]:
        """The answer to `claim`; nothing where it waits for the first call's outcome."""
        self.expire(now_ns)
        asker, key = (door, claim.number), (claim.tenant, claim.key)
        call = self._calls.get(key)
        if call is None:
            return [(door, Claimed(claim.number, self._begin(asker, key, claim)))]
        if call.call != claim.call:
            return [(door, Claimed(claim.number, ClaimState.ANOTHER))]
        if call.outcome is not None:
            return [(door, Claimed(claim.number, ClaimState.ANSWERED, call.outcome))]
        if len(call.waiters) >= self._waiters_max:
            return [(door, Claimed(claim.number, ClaimState.CROWDED))]
        call.waiters.append(asker)
        return []

    def settle(self, door: int, settled: Settled, now_ns: int) -> list[Told]:
        """What those hear who waited. An answer is kept, an error is not."""
        call = self._at_work.pop((door, settled.number), None)
        if call is None:  # forgotten meanwhile
            return []
        outcome = settled.outcome
        told = _told(call, outcome)
        call.waiters.clear()
        if outcome is None or outcome.kind or len(outcome.body) > ANSWER_BYTES_MAX:
            self._forget(call)
        else:
            call.outcome, call.until_ns = outcome, now_ns + KEPT_NS
            self._keep(call)
        return told

    def close_door(self, door: int) -> list[Told]:
        """Its calls at work are lost."""
        told: list[Told] = []
        for call in self._at_work.values():
            call.waiters = [waiter for waiter in call.waiters if waiter[0] != door]
        for asker in [asker for asker in self._at_work if asker[0] == door]:
            told += self._lose(self._at_work[asker])
        return told

    def keep_tenants(self, tenants: Collection[str]) -> list[Told]:
        """Only these are left; what others had is gone."""
        told: list[Told] = []
        for call in [call for key, call in self._calls.items() if key[0] not in tenants]:
            told += self._lose(call)
        return told

    def expire(self, now_ns: int) -> None:
        """Forget answers that are old."""
        for kept in list(self._kept.values()):
            while kept and (oldest := next(iter(kept.values()))).until_ns <= now_ns:
                self._forget(oldest)

    def check(self) -> None:
        """Conservation: what is counted is what is there, within its bounds."""
        held = Counter({tenant: sum(call.num_bytes for call in kept.values()) for tenant, kept in self._kept.items()})
        assert +held == +self._held, "bytes by tenant"
        assert self._shared == sum(self._beyond_own(num_bytes) for num_bytes in held.values()), "shared bytes"
        assert self._shared <= self._shared_bytes, "more is shared than there is"
        assert Counter(tenant for tenant, _ in self._calls) == +self._num_calls, "calls by tenant"
        assert all(count <= self._calls_max for count in self._num_calls.values()), "too many calls"
        assert all(num_bytes <= self._tenant_bytes for num_bytes in held.values()), "too much of one tenant"
        assert all(len(call.waiters) <= self._waiters_max for call in self._calls.values()), "too many wait"
        assert len(self._calls) == len(self._at_work) + sum(map(len, self._kept.values())), "at work or kept"
        for kept in self._kept.values():
            for call in kept.values():
                assert not call.waiters, "nobody waits for what is there"

    def _begin(self, asker: Asker, key: _Key, claim: Claim) -> ClaimState:
        tenant = claim.tenant
        if self._num_calls[tenant] >= self._calls_max:
            if not self._kept.get(tenant):
                return ClaimState.UNKEPT
            self._forget_oldest(tenant)
        self._calls[key] = self._at_work[asker] = _Call(key, claim.call, claim.is_strict, asker)
        self._num_calls[tenant] += 1
        return ClaimState.MINE

    def _keep(self, call: _Call) -> None:
        tenant = call.key[0]
        while not self._has_room(call) and self._kept.get(tenant):
            self._forget_oldest(tenant)
        if not self._has_room(call):
            call.outcome = None
            self._forget(call)
            return
        self._count(tenant, call.num_bytes)
        self._kept.setdefault(tenant, {})[call.key] = call

    def _has_room(self, call: _Call) -> bool:
        before = self._held[call.key[0]]
        after = before + call.num_bytes
        grown = self._beyond_own(after) - self._beyond_own(before)
        bytes_max = self._own_bytes if call.is_strict else self._tenant_bytes
        return after <= bytes_max and (not grown or self._shared + grown <= self._shared_bytes)

    def _forget_oldest(self, tenant: str) -> None:
        self._forget(next(iter(self._kept[tenant].values())))

    def _forget(self, call: _Call) -> None:
        tenant = call.key[0]
        del self._calls[call.key]
        self._at_work.pop(call.owner, None)
        self._num_calls[tenant] -= 1
        kept = self._kept.get(tenant, {})
        if kept.pop(call.key, None) is not None:
            self._count(tenant, -call.num_bytes)
            if not kept:
                del self._kept[tenant]
        if not self._num_calls[tenant]:
            del self._num_calls[tenant]

    def _lose(self, call: _Call) -> list[Told]:
        self._forget(call)
        return _told(call, None)

    def _count(self, tenant: str, num_bytes: int) -> None:
        before = self._held[tenant]
        self._held[tenant] += num_bytes
        self._shared += self._beyond_own(before + num_bytes) - self._beyond_own(before)
        if not self._held[tenant]:
            del self._held[tenant]

    def _beyond_own(self, num_bytes: int) -> int:
        return max(num_bytes - self._own_bytes, 0)


def _told(call: _Call, outcome: FirstOutcome | None) -> list[Told]:
    state = ClaimState.LOST if outcome is None else ClaimState.ANSWERED
    return [(door, Claimed(number, state, outcome)) for door, number in call.waiters]
