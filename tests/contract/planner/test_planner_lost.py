"""A planner is lost and another comes: what a front door brings it, and what readers of streams notice of it."""

from __future__ import annotations

import asyncio
import socket

import pytest
from msgspec.structs import replace

from coppice.messages.step import SamplingParams
from coppice_scheduler.core.state.request import (
    Finish,
    Granted,
    Output,
    OutputErrorCode,
    Refused,
    RefusedReason,
    Request,
    Resumed,
)
from coppice_scheduler.edge.base.engine import EngineLost
from coppice_scheduler.edge.base.idempotency import ClaimState
from coppice_scheduler.edge.ipc.door_engine import MOVES_MAX, DoorEngine
from coppice_scheduler.edge.text.streams import Stream
from tests.fakes.api.engine import unpack
from tests.fakes.cache.scripted_core import HANGS
from tests.fakes.scheduler.house import House, read, request, run, until

LONG = list(range(10, 400))  # tokens of a prompt that the script says again, one each turn


def reading(engine: DoorEngine, asked: Request, into: list[Output]) -> asyncio.Task[None]:
    async def go() -> None:
        async for output in engine.generate(asked):
            into.append(output)

    return asyncio.create_task(go())


async def running(house: House, engine: DoorEngine, asked: Request) -> tuple[asyncio.Task[None], list[Output], Stream]:
    """A request at work: what reads it, what it has read, and the stream between."""
    outputs: list[Output] = []
    task = reading(engine, asked, outputs)
    await until(lambda: asked.request_id in house.core.running)
    stream = engine._streams.find(asked.request_id)
    assert stream is not None
    return task, outputs, stream


def tokens_of(outputs: list[Output]) -> list[int]:
    return unpack(b"".join(output.tokens for output in outputs))


def test_streams_of_all_front_doors_go_on_behind_what_they_have() -> None:
    async def test(house: House) -> None:
        engines = [await house.open(number) for number in (0, 255)]
        outputs: list[list[Output]] = [[] for _ in range(6)]
        streams = [
            reading(engines[place % 2], request(f"r{place}", [place, *LONG]), into)
            for place, into in enumerate(outputs)
        ]
        await until(lambda: all(len(tokens_of(into)) > 5 for into in outputs))
        await asyncio.to_thread(house.lose_planner)
        await until(lambda: len(house.core.resumed) == 6)
        for name, resumed in house.core.resumed.items():
            assert 5 < len(resumed.sent) // 4 < len(LONG), name
            assert resumed.num_moves == 1
        await asyncio.gather(*streams)
        for place, into in enumerate(outputs):
            assert tokens_of(into) == [place, *LONG]
            assert [output.finish for output in into if output.finish] == [Finish.LENGTH]

    run(test)


def test_what_was_asked_without_a_planner_waits_for_one() -> None:
    async def test(house: House) -> None:
        engine = await house.open(0)
        await asyncio.to_thread(house.lose_planner, for_good=True)
        await until(lambda: not engine._ports[0].is_there)
        waits = asyncio.create_task(read(engine, "waits", [1, 2]))
        leaves = asyncio.create_task(read(engine, "leaves", [1, 2]))
        await asyncio.sleep(0)
        assert engine.accepts, "the next one is on its way"
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        with pytest.raises(EngineLost, match="planner was lost"):
            await engine.abort("t", ("waits",))
        house.is_without_planner = False
        assert tokens_of(await waits) == [1, 2]
        assert house.core.submitted == ["waits"]
        assert not house.core.resumed, "no planner had it before"

    run(test)


def test_an_abort_that_waits_hears_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(house: House) -> None:
        engine = await house.open(0)
        before = engine._ports[0]._link
        near, far = socket.socketpair()
        with far:
            monkeypatch.setattr(house, "connect", lambda: near)  # of a planner that reads nothing
            await asyncio.to_thread(house.lose_planner)
            await until(lambda: engine._ports[0]._link not in (None, before))
            waits = asyncio.create_task(engine.abort("t", ("x",)))
            await until(lambda: bool(engine._aborts) and not engine._ports[0]._aborts)
        with pytest.raises(EngineLost, match="send it again"):
            await waits
        monkeypatch.undo()

    run(test)


def test_a_stop_that_was_on_its_way_is_one() -> None:
    async def test(house: House) -> None:
        engine = await house.open(0)
        task, outputs, _ = await running(house, engine, request("stops", [HANGS]))
        engine._ports[0]._link = None  # what is said now reaches nobody
        engine.finish("stops")
        await task
        assert outputs[-1].finish is Finish.STOP
        assert outputs[-1].num_prompt_tokens == 1

    run(test)


def test_what_a_front_door_drew_for_an_answer_is_drawn_once() -> None:
    """The seed of a call without one, above all: another one would change what follows."""

    async def test(house: House) -> None:
        engine = await house.open(0)
        drawn = SamplingParams(temperature=0.8, seed=2**63 + 5)
        asked = replace(request("r", [HANGS]), sampling=drawn, max_new_tokens=9, priority=3)
        task, _, _ = await running(house, engine, asked)
        first, _ = house.core.running["r"]
        await asyncio.to_thread(house.lose_planner)
        await until(lambda: bool(house.core.resumed))
        again, _ = house.core.running["r"]
        assert first.sampling == drawn
        assert again.resumed is not None
        assert replace(again, resumed=None) == first
        engine.finish("r")
        await task

    run(test)


def test_usage_and_log_probabilities_go_on_where_they_were() -> None:
    async def test(house: House) -> None:
        engine = await house.open(0)
        task, _, stream = await running(house, engine, request("r", [HANGS]))
        stream.granted(Granted("r", 16))
        await asyncio.to_thread(house.lose_planner)
        await until(lambda: bool(house.core.resumed))
        assert house.core.resumed["r"] == Resumed(b"", 0, 16, 1)
        engine.finish("r")
        await task

    run(test)


def test_the_end_of_one_that_is_refused_on_the_move_is_an_error_and_no_refusal() -> None:
    async def test(house: House) -> None:
        engine = await house.open(0)
        task, outputs, stream = await running(house, engine, request("r", [HANGS]))
        stream.num_moves = 1
        engine._streams.refuse("r", Refused(RefusedReason.TENANT_REMOVED, "gone", 0))
        await task
        assert outputs[-1].finish is Finish.ERROR
        assert outputs[-1].error is not None
        assert outputs[-1].error.code is OutputErrorCode.TENANT_REMOVED

    run(test)


def test_after_so_many_moves_a_request_ends_with_a_typed_error() -> None:
    async def test(house: House) -> None:
        engine = await house.open(0)
        moved: list[str] = []
        engine.moved = lambda asked: moved.append(asked.request_id)
        task, outputs, _ = await running(house, engine, replace(request("r", [HANGS]), streams=False))
        for _ in range(MOVES_MAX + 1):
            await until(lambda: "r" in house.core.running and engine.stats().running == 1)
            await asyncio.to_thread(house.lose_planner)
        await task
        assert outputs[-1].error is not None
        assert outputs[-1].error.code is OutputErrorCode.SCHEDULER_LOST
        assert moved == ["r"] * MOVES_MAX

    run(test)


def test_calls_with_a_key_outlive_the_planner() -> None:
    async def test(house: House) -> None:
        engine = await house.open(0)
        assert (await engine.claim("a", b"k", b"call", is_strict=False)).state is ClaimState.MINE
        await asyncio.to_thread(house.lose_planner)
        assert (await engine.claim("a", b"k", b"other", is_strict=False)).state is ClaimState.ANOTHER

    run(test)
