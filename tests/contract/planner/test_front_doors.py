"""The planner and its front doors over real sockets, in one process: whose tokens go where, who hears of which end."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from coppice.edge.wire import Splitter, packed
from coppice_scheduler.core.state.request import Finish, Output, OutputErrorCode, RefusedReason, TokenBatch
from coppice_scheduler.edge.base.engine import EngineLost, RequestRefused
from coppice_scheduler.edge.base.idempotency import ClaimState, FirstOutcome
from coppice_scheduler.edge.ipc import planner_port
from coppice_scheduler.edge.ipc.door_engine import DoorEngine
from coppice_scheduler.edge.ipc.door_messages import (
    DOOR_TO_PLANNER,
    MESSAGE_BYTES_MAX,
    PLANNER_TO_DOOR,
    Abort,
    Aborted,
    Asks,
    Cancel,
    Opened,
    Turn,
)
from coppice_scheduler.edge.ipc.message_channel import MessageChannel
from coppice_scheduler.edge.planner.doors import by_door
from tests.fakes.api.engine import pack, unpack
from tests.fakes.cache.scripted_core import HANGS
from tests.fakes.scheduler.house import House, read, request, run, until
from tests.fakes.waiting import WAIT_S


def test_tokens_of_many_requests_get_to_their_readers() -> None:
    async def test(house: House) -> None:
        engines = [await house.open(number) for number in (0, 1, 255)]
        prompts = {f"{number}-{place}": [100 + number, *range(place)] for number in range(3) for place in range(20)}
        reading = [read(engines[int(name[0])], name, tokens) for name, tokens in prompts.items()]
        for outputs, tokens in zip(await asyncio.gather(*reading), prompts.values(), strict=True):
            assert unpack(b"".join(output.tokens for output in outputs)) == tokens
            assert [output.finish for output in outputs if output.finish] == [Finish.LENGTH]
        await until(lambda: house.doors.num_requests == 0)
        assert not house.core.cancelled

    run(test)


@pytest.mark.parametrize("streams", [False, True])
def test_a_stream_hears_that_its_request_was_taken_and_waits(streams: bool) -> None:
    async def test(house: House) -> None:
        engine = await house.open(0)
        outputs = engine.generate(replace(request("waits", [HANGS]), streams=streams))
        first = asyncio.ensure_future(anext(outputs))
        await until(lambda: "waits" in house.core.running)
        if streams:
            assert (await first).finish is None
        else:
            engine.finish("waits")
            assert (await first).finish is Finish.STOP
        await outputs.aclose()

    run(test)


def test_refusals_and_early_ends() -> None:
    async def test(house: House) -> None:
        engine = await house.open(0)
        with pytest.raises(RequestRefused) as refused:
            await read(engine, "empty", [])
        assert refused.value.refused.reason is RefusedReason.EMPTY
        stopping = asyncio.create_task(read(engine, "stops", [HANGS]))
        await until(lambda: "stops" in house.core.running)
        engine.finish("stops")
        assert [output.finish for output in await stopping] == [Finish.STOP]
        async with aclosing(engine.generate(request("leaves", [1, 2, 3] * 100))) as outputs:
            await anext(outputs)
        await until(lambda: ("leaves", Finish.CANCELLED) in house.core.cancelled)
        assert house.core.cancelled == [("stops", Finish.STOP), ("leaves", Finish.CANCELLED)]

    run(test)


def test_of_a_call_that_is_refused_the_rest_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front door ends the call; a flood of wide calls would cost the planner each of their requests."""
    monkeypatch.setattr(planner_port, "COLLECT_S", WAIT_S)  # all of them in one message

    async def test(house: House) -> None:
        engine = await house.open(0)
        wide = [read(engine, f"wide-{place}", [], "t", ("wide",)) for place in range(5)]
        others = [read(engine, "other", [1], "t", ("other",)), read(engine, "nameless", [1])]
        done = await asyncio.gather(*wide, *others, return_exceptions=True)
        assert [each.refused.reason for each in done[:5] if isinstance(each, RequestRefused)] == [
            RefusedReason.EMPTY
        ] * 5
        assert not [each for each in done[5:] if isinstance(each, BaseException)]
        assert sorted(house.core.submitted) == ["nameless", "other", "wide-0"]

    run(test)


def test_a_request_that_is_cancelled_at_once_does_not_stay() -> None:
    async def test(house: House) -> None:
        far = house.connect()
        asks = Asks((request("short", [HANGS]),), (Cancel("short", Finish.CANCELLED),))
        far.sendall(packed(DOOR_TO_PLANNER.encode(Opened(0)), DOOR_TO_PLANNER.encode(asks)))
        await until(lambda: bool(house.core.submitted and house.core.cancelled))
        assert not house.core.running
        far.close()

    run(test)


def test_a_front_door_that_goes_takes_its_requests_and_no_others() -> None:
    async def test(house: House) -> None:
        dying, living = await house.open(0), await house.open(1)
        lost = asyncio.create_task(read(dying, "lost", [HANGS]))
        kept = asyncio.create_task(read(living, "kept", [HANGS]))
        await until(lambda: len(house.core.running) == 2)
        house.is_without_planner = True  # it comes back no more
        house.channels[0].close()
        await until(lambda: ("lost", Finish.CANCELLED) in house.core.cancelled)
        await until(lambda: house.cut_off == [0])  # its process is started again
        dying.end_streams("it is over")
        (output,) = await lost
        assert (output.finish, output.error and output.error.code) == (Finish.ERROR, OutputErrorCode.SCHEDULER_LOST)
        assert not dying.accepts
        assert [output.finish for output in await read(dying, "later", [1])] == [Finish.ERROR]
        assert [output.finish for output in await read(living, "other", [1])][-1] is Finish.LENGTH
        assert not kept.done()
        living.finish("kept")
        await kept

    run(test)


def test_the_planner_fails() -> None:
    async def test(house: House) -> None:
        await house.open(0)
        house.core.fails = True
        await until(lambda: bool(house.failures))

    run(test)


def test_a_planner_that_drains_refuses() -> None:
    async def test(house: House) -> None:
        engine = await house.open(0)
        house.doors.drain()
        with pytest.raises(RequestRefused) as refused:
            await read(engine, "late", [1])
        assert refused.value.refused.reason is RefusedReason.DRAINING

    run(test)


def test_stats_are_told_again_and_again() -> None:
    async def test(house: House) -> None:
        engine = await house.open(0)
        reading = asyncio.create_task(read(engine, "hangs", [HANGS]))
        await until(lambda: engine.stats().running == 1)
        engine.finish("hangs")
        await reading
        await until(lambda: engine.stats().running == 0)

    run(test)


def test_a_front_door_that_does_not_read_is_cut_off_and_holds_up_nobody() -> None:
    async def test(house: House) -> None:
        deaf = house.connect(backlog_bytes_max=100_000)
        engine = await house.open(1)
        names = [f"deaf-{place}" for place in range(400)]
        asks = Asks(tuple(request(name, [1] * 2000) for name in names), ())
        await asyncio.to_thread(deaf.sendall, packed(DOOR_TO_PLANNER.encode(Opened(0)), DOOR_TO_PLANNER.encode(asks)))
        await until(lambda: len(house.core.running) == 400)
        while house.core.running:
            assert [output.finish for output in await read(engine, "other", [1])][-1] is Finish.LENGTH
        assert {name for name, _ in house.core.cancelled} == set(names)
        assert house.channels[0].is_closed
        deaf.close()

    run(test)


def test_what_is_no_message_costs_the_connection_only() -> None:
    async def test(house: House) -> None:
        broken = house.connect()
        broken.sendall(b"\x01\x00\x00\x00\xc1")
        await until(lambda: house.channels[0].is_closed)
        broken.close()
        assert [output.finish for output in await read(await house.open(1), "other", [1])][-1] is Finish.LENGTH

    run(test)


def test_frames_keep_their_order_while_the_socket_fills_and_empties() -> None:
    near, far = socket.socketpair()
    codecs = PLANNER_TO_DOOR, DOOR_TO_PLANNER
    channel = MessageChannel(near, *codecs, lambda message: None, lambda: None, peer="a front door")
    channel.start()
    sent = [
        packed(PLANNER_TO_DOOR.encode(Turn((), (TokenBatch(pack([place]), bytes(3_000)),), ())))
        for place in range(3_000)
    ]
    read = bytearray()

    def read_all() -> None:
        while len(read) < sum(map(len, sent)):
            read.extend(far.recv(10_000))

    reading = threading.Thread(target=read_all, daemon=True)
    reading.start()
    for place in range(3_000):
        channel.send(Turn((), (TokenBatch(pack([place]), bytes(3_000)),), ()))
    reading.join(WAIT_S)
    assert read == b"".join(sent)
    channel.close()
    channel.join()
    far.close()


def test_a_batch_is_split_by_the_high_bits() -> None:
    mixed = TokenBatch(pack([1 << 24, 5, 1 << 24 | 3, 5]), pack([1, 2, 3, 4]))
    own = TokenBatch(pack([6, 7]), pack([5, 6]))
    found = by_door([mixed, own, TokenBatch(b"", b"")])
    assert found == {
        0: [TokenBatch(pack([5, 5]), pack([2, 4])), own],
        1: [TokenBatch(pack([1 << 24, 1 << 24 | 3]), pack([1, 3]))],
    }


# --- aborts


def hanging(engine: DoorEngine, name: str, tenant: str, *names: str) -> asyncio.Task[list[Output]]:
    return asyncio.create_task(read(engine, name, [HANGS], tenant, names))


def ended_with(outputs: list[Output]) -> OutputErrorCode | None:
    (output,) = outputs
    assert output.finish is Finish.ERROR
    return output.error and output.error.code


def test_an_abort_reaches_requests_of_other_front_doors_and_of_no_other_tenant() -> None:
    async def test(house: House) -> None:
        asking, holding = await house.open(0), await house.open(1)
        ours = [hanging(door, f"ours-{place}", "a", "x", "*-1") for place, door in enumerate((asking, holding))]
        kept = [hanging(holding, "theirs", "b", "x", "*-1"), hanging(holding, "another", "a", "y")]
        await until(lambda: len(house.core.running) == 4)
        assert await asking.abort("c", ("x", "*-1")) == await asking.abort("a", ("theirs",)) == 0
        assert await asking.abort("a", ("x", "*-1")) == 2
        assert [ended_with(outputs) for outputs in await asyncio.gather(*ours)] == [OutputErrorCode.ABORTED] * 2
        assert set(house.core.running) == {"theirs", "another"}
        assert not any(task.done() for task in kept)
        assert await asking.abort("a", ("x",)) == 0, "they are over"
        assert await holding.abort("b", ("*-1",)) == 1
        assert ended_with(await kept[0]) is OutputErrorCode.ABORTED
        asking_for_both = asking.abort("a", ("y",)), asking.abort("a", ("y",))
        assert await asyncio.gather(*asking_for_both) == [1, 0], "each request ends once"
        assert ended_with(await kept[1]) is OutputErrorCode.ABORTED
        assert house.doors.num_requests == 0
        assert not house.core.cancelled, "a request that was aborted is not cancelled, too"

    run(test)


def test_requests_of_a_front_door_that_went_cannot_be_aborted() -> None:
    async def test(house: House) -> None:
        dying, living = await house.open(0), await house.open(1)
        lost = hanging(dying, "lost", "a", "x")
        await until(lambda: bool(house.core.running))
        house.is_without_planner = True
        house.channels[0].close()
        await until(lambda: house.doors.num_requests == 0)
        dying.end_streams("it is over")
        await lost
        assert await living.abort("a", ("x",)) == 0
        again = await read(living, "lost", [1], "a", ("x",))
        assert again[-1].finish is Finish.LENGTH, "nothing of it is left"
        with pytest.raises(EngineLost):
            await dying.abort("a", ("x",))

    run(test)


def test_each_abort_is_answered_once() -> None:
    async def test(house: House) -> None:
        far = house.connect()
        far.sendall(packed(DOOR_TO_PLANNER.encode(Opened(0))))
        incoming, answers = Splitter(MESSAGE_BYTES_MAX), list[Aborted]()
        for number in (1, 2):
            far.sendall(packed(DOOR_TO_PLANNER.encode(Asks((), (), (Abort(number, "a", ("x",)),)))))
            while len(answers) < number:
                incoming.feed(await asyncio.to_thread(far.recv, 65536))
                for message in map(PLANNER_TO_DOOR.decode, incoming.split()):
                    answers += message.aborted if isinstance(message, Turn) else ()
        assert answers == [Aborted(1, 0), Aborted(2, 0)]
        far.close()

    run(test)


def test_an_abort_that_waits_hears_that_the_planner_is_gone() -> None:
    async def test(house: House) -> None:
        engine = await house.open(0)
        waiting = asyncio.create_task(engine.abort("a", ("x",)))
        gone = asyncio.create_task(engine.abort("a", ("x",)))
        await asyncio.sleep(0)  # they have asked
        gone.cancel()
        engine.end_streams("it is over")
        with pytest.raises(EngineLost, match="it is over"):
            await waiting

    run(test)


def test_a_call_with_a_key_is_found_by_another_front_door_of_the_tenant_alone() -> None:
    async def test(house: House) -> None:
        one, two = await house.open(1), await house.open(2)
        first = await one.claim("a", b"k", b"call", is_strict=False)
        assert first.state is ClaimState.MINE
        assert (await two.claim("b", b"k", b"call", is_strict=False)).state is ClaimState.MINE
        waits = asyncio.create_task(two.claim("a", b"k", b"call", is_strict=False))
        await asyncio.sleep(0)  # it is sent before the next one
        assert (await two.claim("a", b"k", b"other", is_strict=False)).state is ClaimState.ANOTHER
        assert not waits.done()
        outcome = FirstOutcome(b"answer", "user")
        one.settle(first.number, outcome)
        told = await asyncio.wait_for(waits, WAIT_S)
        assert (told.state, told.outcome) == (ClaimState.ANSWERED, outcome)
        assert (await two.claim("a", b"k", b"call", is_strict=False)).outcome == outcome

    run(test)
