"""Bytes of calls that the engine has not got yet."""

from __future__ import annotations

import pytest

from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind
from coppice_scheduler.edge.frontend.body_budget import OWN_BYTES, SMALL_BYTES, Body, BodyBudget

MIB = 1024 * 1024


def who(name: str) -> Tenant:
    return Tenant(id=name, api_key_sha256=())


def filled(budget: BodyBudget, tenant: str, num_bytes: int) -> Body:
    body = budget.body(who(tenant))
    body.add(bytes(num_bytes))
    return body


def refusal(budget: BodyBudget, tenant: str, num_bytes: int) -> ApiError:
    with pytest.raises(ApiError) as caught, budget.body(who(tenant)) as body:
        body.add(bytes(num_bytes))
    assert caught.value.retry_after_ms > 0
    return caught.value


def test_a_tenant_holds_sixteen_mebibytes_and_small_bodies_beside_them() -> None:
    budget = BodyBudget()
    held = [filled(budget, "a", 2 * MIB + SMALL_BYTES) for _ in range(8)]
    error = refusal(budget, "a", SMALL_BYTES + 1)
    assert (error.kind, "tenant a" in error.message) == (ErrorKind.BUSY, True)
    small = [filled(budget, "a", SMALL_BYTES) for _ in range(100)]
    filled(budget, "b", 2 * MIB).release()
    held.pop().release()
    filled(budget, "a", 2 * MIB).release()
    for body in (*small, *held):
        body.release()


def test_tenants_that_hold_all_they_may_leave_everybody_one_large_body() -> None:
    budget = BodyBudget()
    greedy = [filled(budget, f"t{number % 8}", MIB) for number in range(8 * 10)]
    error = refusal(budget, "fresh", 16 * MIB)
    assert (error.kind, "fresh" in error.message or "t0" in error.message) == (ErrorKind.UNAVAILABLE, False)
    filled(budget, "fresh", OWN_BYTES).release()
    assert filled(budget, "fresh", SMALL_BYTES).num_bytes == SMALL_BYTES
    for body in greedy:
        body.release()
    filled(budget, "fresh", 16 * MIB).release()


def test_four_tenants_alone_do_not_fill_a_door() -> None:
    budget = BodyBudget()
    for tenant in "abcd":
        for _ in range(8):
            filled(budget, tenant, 2 * MIB)
    for _ in range(3):
        filled(budget, "e", 2 * MIB)


def test_all_comes_back_once() -> None:
    budget = BodyBudget(tenant_bytes=4 * MIB, shared_bytes=2 * MIB)
    for _ in range(50):
        with budget.body(who("a")) as body:
            for _ in range(4):
                body.add(bytes(MIB))
            assert body.take_bytes() == bytes(4 * MIB)
            body.release()
            body.release()
        refusal(budget, "a", 5 * MIB)


def test_calls_of_a_tenant_are_bounded() -> None:
    budget = BodyBudget(calls_max=2)
    first, second = budget.body(who("a")), budget.body(who("a"))
    with pytest.raises(ApiError, match="2 calls"):
        budget.body(who("a"))
    budget.body(who("b")).release()
    second.release()
    budget.body(who("a")).release()
    first.release()


def test_a_strict_tenant_has_its_own_share_whatever_others_hold_and_no_more() -> None:
    strict = Tenant(id="s", api_key_sha256=(), mode="strict", guarantee_share=0.1)
    for others in (0, 10):
        budget = BodyBudget()
        held = [filled(budget, f"t{number % 8}", MIB) for number in range(8 * others)]
        with budget.body(strict) as body:
            body.add(bytes(OWN_BYTES + SMALL_BYTES))
            with pytest.raises(ApiError) as caught:
                body.add(b"x")
        assert (caught.value.kind, "tenant s" in caught.value.message) == (ErrorKind.BUSY, True)
        for other in held:
            other.release()
