"""Answers by `Idempotency-Key` end with their tenant; calls at work with their front door."""

from __future__ import annotations

import asyncio

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.idempotency import Claimed, ClaimState, FirstOutcome
from coppice_scheduler.edge.ipc.door_engine import DoorEngine
from tests.contract.planner.test_front_doors import House, run
from tests.fakes.waiting import WAIT_S

BOTH = TenantDirectory([Tenant(id=name, api_key_sha256=(digest_of_key(name),)) for name in "ab"])
ONE = TenantDirectory([Tenant(id="b", api_key_sha256=(digest_of_key("b"),))])


async def claim(engine: DoorEngine, tenant: str, key: bytes = b"k", call: bytes = b"call") -> Claimed:
    return await asyncio.wait_for(engine.claim(tenant, key, call, is_strict=False), WAIT_S)


def test_the_end_of_a_front_door_frees_what_it_claimed() -> None:
    async def test(house: House) -> None:
        one, two = await house.open(1), await house.open(2)
        await claim(one, "a")
        waits = asyncio.create_task(two.claim("a", b"k", b"call", is_strict=False))
        await asyncio.sleep(0)  # so that it is sent before the next one, whose answer says that it was taken
        assert (await claim(two, "a", call=b"other")).state is ClaimState.ANOTHER
        await asyncio.to_thread(house.parents[0].close)
        assert (await asyncio.wait_for(waits, WAIT_S)).state is ClaimState.LOST
        assert (await claim(two, "a")).state is ClaimState.MINE

    run(test)


def test_what_is_kept_of_a_tenant_goes_when_it_is_removed() -> None:
    async def test(house: House) -> None:
        engine = await house.open(1)
        house.claims.keep_tenants("ab")
        for tenant in "ab":
            engine.settle((await claim(engine, tenant)).number, FirstOutcome(b"answer"))
            assert (await claim(engine, tenant)).state is ClaimState.ANSWERED
        house.claims.keep_tenants("b")
        house.claims.keep_tenants("ab")
        assert (await claim(engine, "a")).state is ClaimState.MINE
        assert (await claim(engine, "b")).state is ClaimState.ANSWERED

    run(test)
