"""Answers by `Idempotency-Key`: each tenant's own, within bounds that no other tenant moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coppice_scheduler.edge.base.idempotency import Claim, ClaimState, FirstOutcome, Settled
from coppice_scheduler.edge.processes.answer_table import KEPT_NS, AnswerTable, Told

CALL = b"call"


def claim(table: AnswerTable, number: int, key: bytes, tenant: str = "a", *, strict: bool = False) -> list[Told]:
    return table.claim(0, Claim(number, tenant, key, CALL, strict), 0)


def states(told: list[Told]) -> list[ClaimState]:
    return [claimed.state for _, claimed in told]


def kept(table: AnswerTable, number: int, size: int, tenant: str = "a", *, strict: bool = False) -> bytes:
    """The key of an answer of this size."""
    key = b"%d" % number
    assert states(claim(table, number, key, tenant, strict=strict)) == [ClaimState.MINE]
    table.settle(0, Settled(number, FirstOutcome(b"x" * size)), 0)
    table.check()
    return key


def test_a_waiter_at_another_front_door_hears_the_outcome() -> None:
    table = AnswerTable(waiters_max=1)
    claim(table, 1, b"k")
    assert table.claim(7, Claim(5, "a", b"k", CALL, False), 0) == []
    assert states(claim(table, 2, b"k")) == [ClaimState.CROWDED]
    outcome = FirstOutcome(b"answer")
    ((door, told),) = table.settle(0, Settled(1, outcome), 0)
    assert (door, told.number, told.state, told.outcome) == (7, 5, ClaimState.ANSWERED, outcome)


def test_an_answer_goes_with_its_time_and_with_its_tenant() -> None:
    table = AnswerTable()
    key = kept(table, 1, 10)
    table.expire(KEPT_NS - 1)
    assert states(claim(table, 2, key)) == [ClaimState.ANSWERED]
    table.expire(KEPT_NS)
    assert states(claim(table, 3, key)) == [ClaimState.MINE]
    table.claim(1, Claim(4, "a", key, CALL, False), 0)
    assert states(table.keep_tenants({"b"})) == [ClaimState.LOST]
    assert table.settle(0, Settled(3, FirstOutcome(b"late")), 0) == []
    assert states(claim(table, 5, key)) == [ClaimState.MINE]
    table.check()


def test_the_end_of_a_front_door_frees_its_claims_and_no_answers() -> None:
    table = AnswerTable()
    key = kept(table, 1, 10)
    claim(table, 2, b"k")
    table.claim(1, Claim(1, "a", b"k", CALL, False), 0)
    assert [(door, told.state) for door, told in table.close_door(0)] == [(1, ClaimState.LOST)]
    assert states(claim(table, 3, b"k") + claim(table, 4, key)) == [ClaimState.MINE, ClaimState.ANSWERED]
    table.check()


def test_others_take_nothing_of_what_a_tenant_has_of_its_own() -> None:
    table = AnswerTable(own_bytes=2000, tenant_bytes=4000, shared_bytes=2000)
    strict = kept(table, 1, 1000, "s", strict=True)
    for number in range(2, 20):
        kept(table, number, 1000, "abc"[number % 3])
    assert states(claim(table, 30, strict, "s", strict=True)) == [ClaimState.ANSWERED]


def test_a_strict_tenant_has_its_own_room_and_no_more() -> None:
    table = AnswerTable(own_bytes=2000, tenant_bytes=4000, shared_bytes=4000)
    for strict, tenant, first_is in ((False, "a", ClaimState.ANSWERED), (True, "s", ClaimState.MINE)):
        first = kept(table, 1, 1000, tenant, strict=strict)
        kept(table, 2, 1000, tenant, strict=strict)
        assert states(claim(table, 3, first, tenant, strict=strict)) == [first_is]


STEP = st.tuples(
    st.sampled_from(["claim", "settle", "door", "expire", "tenants"]),
    st.integers(0, 2),
    st.sampled_from("ab"),
    st.integers(0, 5),
    st.integers(0, 1500),
)


@given(st.lists(STEP, max_size=60))
def test_bounds_hold_whatever_comes(steps: list[tuple[str, int, str, int, int]]) -> None:
    table = AnswerTable(own_bytes=1500, tenant_bytes=3000, shared_bytes=1500, calls_max=3, waiters_max=2)
    open_claims: set[tuple[int, int]] = set()
    for now, (what, door, tenant, key, size) in enumerate(steps):
        told: list[Told] = []
        if what == "claim":
            open_claims.add((door, now))
            told = table.claim(door, Claim(now, tenant, b"%d" % key, CALL, tenant == "b"), now)
        elif what == "settle" and open_claims:
            owner, number = min(open_claims)
            told = table.settle(owner, Settled(number, FirstOutcome(b"x" * size)), now)
            open_claims.discard((owner, number))
        elif what == "door":
            told = table.close_door(door)
        elif what == "expire":
            table.expire(now + size * KEPT_NS // 1000)
        elif what == "tenants":
            told = table.keep_tenants({tenant})
        open_claims -= {(at, claimed.number) for at, claimed in told if claimed.state is not ClaimState.MINE}
        table.check()
