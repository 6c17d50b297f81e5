"""Front doors of several schedulers at one planner: whose tokens go where, and who is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import struct
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from coppice.edge.wire import FIRST_BYTES_MAX
from coppice.ids import DomainId
from coppice_scheduler.core.state.request import Finish, LookedUp, Lookup, Output, RefusedReason
from coppice_scheduler.edge.base.engine import NO_STATS
from coppice_scheduler.edge.ipc.door_messages import (
    DOOR_SHIFT,
    PEERS_VERSION,
    Asks,
    Beat,
    Cancel,
    Named,
    NotTaken,
    Opened,
    PlannerState,
    Tenants,
    Turn,
)
from coppice_scheduler.edge.ipc.peers import peers, port
from coppice_scheduler.edge.planner.peers import channel, slots
from coppice_scheduler.edge.planner.planner import Planner
from tests.contract.planner.test_planner_lost import LONG, reading, tokens_of
from tests.contract.planner.test_several_planners import hanging
from tests.fakes.api.engine import unpack
from tests.fakes.certificates import Authority
from tests.fakes.message_values import CODECS
from tests.fakes.messages.shapes import shape_of
from tests.fakes.scheduler.house import request, until
from tests.fakes.scheduler.peers import WORKERS, Cell, Raw, has, opened, with_cell


@pytest.fixture(autouse=True)
def _all_are_ready_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted planners have no cache service."""
    monkeypatch.setattr(Planner, "problems", property(lambda planner: ()))
    monkeypatch.setattr(peers, "LOOK_S", 0.05)


# ---- many front doors at one planner ----


def test_front_doors_of_two_schedulers_with_the_same_number_get_their_own_tokens() -> None:
    async def test(cell: Cell) -> None:
        house, (address, *_) = cell.houses[0], cell.addresses
        doors = [await cell.door(3, house), *[await cell.door(3, None, address) for _ in range(3)]]
        for door in doors:
            await has(door, 1)
        outputs: dict[str, list[Output]] = {f"{number}-{place}": [] for number in range(4) for place in range(10)}
        tasks = [reading(doors[int(name[0])], request(name, [int(name[0]) + 20, int(name[2:]), *LONG]), into)
                 for name, into in outputs.items()]  # fmt: skip
        await asyncio.gather(*tasks)
        for name, into in outputs.items():
            assert tokens_of(into) == [int(name[0]) + 20, int(name[2:]), *LONG]
            assert into[-1].finish is Finish.LENGTH

    with_cell(1, test)


def test_numbers_are_mapped_on_the_way_in_and_back_on_the_way_out() -> None:
    async def test(cell: Cell) -> None:
        house = cell.houses[0]
        own = await cell.door(7, house)
        await has(own, 1)
        far = await asyncio.to_thread(Raw, cell.addresses[0], opened(door=7))
        assert await asyncio.to_thread(far.hear, Named) == Named(b"w0")
        asks = replace(request("r", [1, 2]), number=7 << DOOR_SHIFT | 5)
        house.core.hints = (WORKERS[:1], (3,))
        lookup = Lookup(7 << DOOR_SHIFT | 6, DomainId("d"), b"")
        far.say(Asks((asks,), (), (), (lookup,)))
        seen: list[int] = []
        found: list[LookedUp] = []
        while len(seen) < 2 or not found:
            turn = await asyncio.to_thread(far.hear, Turn)
            seen += [number for batch in turn.tokens for number in unpack(batch.numbers)]
            found += turn.looked_up
        assert seen == [7 << DOOR_SHIFT | 5] * 2
        assert found == [LookedUp(7 << DOOR_SHIFT | 6, WORKERS[:1], (3,))]
        (slot,) = [slot for slot, door in house.doors._doors.items() if door.peer]
        assert slot != 7
        far.close()
        await until(lambda: slot not in house.doors._doors)

    with_cell(1, test)


def test_a_slot_is_anothers_only_after_all_that_were_free_longer() -> None:
    free = slots.Slots()
    assert free.take(7) == 7
    first = free.take_for_peer()
    assert first is not None
    free.give_back(first, is_peer=True)
    taken = [free.take_for_peer() for _ in range(slots.PEER_DOORS_MAX)]
    assert first not in taken
    assert free.take_for_peer() is None
    assert {free.take(number) for number in range(64)} & set(taken) == set()
    assert len({free.take(taken[0] or 0), *taken}) == slots.PEER_DOORS_MAX + 1


def test_a_request_id_that_is_at_work_for_another_is_refused_and_not_to_be_cancelled() -> None:
    async def test(cell: Cell) -> None:
        house = cell.houses[0]
        own = await cell.door(0, house)
        await has(own, 1)
        outputs: list[Output] = []
        task = reading(own, hanging("same"), outputs)
        await until(lambda: "same" in house.core.running)
        far = await asyncio.to_thread(Raw, cell.addresses[0], opened())
        far.say(Asks((request("same", [1]),), (Cancel("same", Finish.CANCELLED),)))
        (refusal,) = (await asyncio.to_thread(far.hear, Turn)).refusals
        assert refusal.refused.reason is RefusedReason.INTERNAL
        far.close()
        await until(lambda: len(house.doors._doors) == 1)
        assert "same" in house.core.running
        assert not house.failures
        own.finish("same")
        await task

    with_cell(1, test)


def test_a_front_door_that_comes_again_takes_the_place_of_what_is_left_of_it() -> None:
    """Its planner has not noticed yet that the connection is gone, as when a machine is cut off from the network."""

    async def test(cell: Cell) -> None:
        house = cell.houses[0]
        first = await asyncio.to_thread(Raw, cell.addresses[0], opened())
        first.say(Asks((hanging("r"),), ()))
        await until(lambda: "r" in house.core.running)
        second = await asyncio.to_thread(Raw, cell.addresses[0], opened())
        second.say(Asks((request("r", [1, 2]),), ()))
        tokens: list[int] = []
        while len(tokens) < 2:
            turn = await asyncio.to_thread(second.hear, Turn)
            assert not turn.refusals
            tokens += [token for batch in turn.tokens for token in unpack(batch.tokens)]
        assert tokens == [1, 2]
        assert len(house.doors._doors) == 1
        first.close()
        second.close()

    with_cell(1, test)


def test_another_scheduler_is_told_nothing_of_the_tenants() -> None:
    async def test(cell: Cell) -> None:
        far = await asyncio.to_thread(Raw, cell.addresses[0], opened())
        house = cell.houses[0]
        task = reading(await cell.door(0, house), hanging("ours"), [])
        await until(lambda: house.doors.planner.stats.running == 1)
        state = await asyncio.to_thread(far.hear, PlannerState)
        while not state.load_tokens:
            state = await asyncio.to_thread(far.hear, PlannerState)
        assert state.stats == NO_STATS
        task.cancel()
        settings: Any = None
        cell.houses[0].doors.set_tenants(settings, b"secret")
        own = await cell.door(0, cell.houses[0])
        await until(lambda: own._own[0].content == b"secret")
        late = await asyncio.to_thread(Raw, cell.addresses[0], opened(instance=b"late"))
        for each in (late, far):
            each.say(Asks((request(f"r{each is far}", [1]),), ()))
            await asyncio.to_thread(each.hear, Turn)
            assert not [message for message in each.heard if isinstance(message, Tenants)]
            each.close()

    with_cell(1, test)


# ---- who is refused ----


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"version": PEERS_VERSION + 1}, "builds differ"),
        ({"model_id": "other"}, "the model differs: other at the front door, m at the planner"),
        ({"vocab_size": 7}, "the vocabulary differs: 7 at the front door, 100 at the planner"),
        ({"max_context": 7}, "the longest context differs: 7 at the front door, 64 at the planner"),
        ({"instance": b""}, "which front door"),
    ],
)
def test_whoever_does_not_fit_hears_why(wrong: dict[str, Any], says: str) -> None:
    async def test(cell: Cell) -> None:
        far = await asyncio.to_thread(Raw, cell.addresses[0], opened(**wrong))
        assert says in (await asyncio.to_thread(far.hear, NotTaken)).why
        assert await asyncio.to_thread(far.is_closed)

    with_cell(1, test)


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", FIRST_BYTES_MAX + 1), b"own", b"ask"]
)
def test_a_stranger_that_does_not_say_who_it_is_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "STRANGER_S", 0.2)
    first = {b"own": Opened(0), b"ask": Asks((), ())}.get(said)

    async def test(cell: Cell) -> None:
        far = await asyncio.to_thread(Raw, cell.addresses[0], first)
        far.socket.sendall(said if first is None else b"")
        assert await asyncio.to_thread(far.is_closed)
        assert not cell.houses[0].doors._doors

    with_cell(1, test)


def test_one_that_falls_silent_is_closed_and_one_that_beats_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "SILENT_S", 3.0)

    async def test(cell: Cell) -> None:
        silent, beats = [
            await asyncio.to_thread(Raw, cell.addresses[0], opened(instance=name)) for name in (b"1", b"2")
        ]
        doors = cell.houses[0].doors._doors
        await until(lambda: len(doors) == 2)
        while len(doors) == 2:
            beats.say(Beat())
            await asyncio.sleep(0.05)
        assert [door.peer for door in doors.values()] == [b"2"]
        silent.close()
        beats.close()

    with_cell(1, test)


def test_there_is_room_for_so_many_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "CONNECTIONS_MAX", 2)

    async def test(cell: Cell) -> None:
        strangers = [await asyncio.to_thread(Raw, cell.addresses[0], None) for _ in range(2)]
        last = await asyncio.to_thread(Raw, cell.addresses[0], opened())
        while "the most there may be; others wait" not in caplog.text:
            await asyncio.sleep(0.02)
        assert not cell.houses[0].doors._doors
        strangers[0].close()
        while not cell.houses[0].doors._doors:
            await asyncio.sleep(0.02)
        for each in (strangers[1], last):
            each.close()

    with_cell(1, test)


def test_with_tls_a_scheduler_is_served_and_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    planner, door, worker = (
        authority.credentials(role, name) for role, name in (("scheduler", "a"), ("scheduler", "b"), ("worker", "w"))
    )

    async def test(cell: Cell) -> None:
        served = cell.listen(cell.houses[0], planner)
        of_worker = cell.listen(cell.houses[0], worker)
        good = await cell.door(0, None, served, tls=door)
        await has(good, 1)
        outputs: list[Output] = []
        await reading(good, request("r", [*LONG]), outputs)
        assert tokens_of(outputs) == LONG
        for tls, address, why in (
            (worker, served, "coppice://worker/w may not open sessions of the kind 'doors'"),
            (door, of_worker, "answers there in place of coppice://scheduler"),
            (None, served, "it "),
        ):
            with caplog.at_level(logging.WARNING):
                caplog.clear()
                bad = await cell.door(1, None, address, tls=tls)
                await until(lambda why=why: why in caplog.text)  # type: ignore[misc]
            assert not bad.ready

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(port, "TOLD_AFTER_S", 0.0)
        patch.setattr(channel, "STRANGER_S", 1.0)
        with_cell(1, test)


# ---- versions ----

SHAPES = {4: "d757fc9e660a86a7"}


def test_another_shape_of_these_messages_is_another_version() -> None:
    """Front doors and planners of different builds refuse each other by this number alone."""
    shapes = [shape_of(CODECS[name].kinds) for name in ("door to planner", "planner to door")]
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16]
    assert {PEERS_VERSION: digest} == SHAPES, "raise PEERS_VERSION"
