"""Front doors with several planners: where a request goes, what becomes of it when its planner is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from coppice.ids import DomainId, WorkerId
from coppice_scheduler.core.state.request import Finish, LookedUp, Output, OutputError, OutputErrorCode, Request
from coppice_scheduler.edge.ipc import placing
from coppice_scheduler.edge.ipc.door_engine import DoorEngine
from coppice_scheduler.edge.ipc.door_messages import Tenants
from coppice_scheduler.edge.ipc.links import ParentLink, PlannerLink
from coppice_scheduler.edge.planner import doors
from coppice_scheduler.edge.planner.planner import Planner
from tests.contract.planner.test_planner_lost import LONG, reading, tokens_of
from tests.fakes.cache.scripted_core import HANGS
from tests.fakes.scheduler.house import MODEL, House, request, until
from tests.fakes.waiting import WAIT_S

WORKERS = tuple(WorkerId(f"w{place}") for place in range(3))


@pytest.fixture(autouse=True)
def _all_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    script_planners(monkeypatch)


def script_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no cache service. What a front door counts decides alone where requests go, however slow it all is: no
    load that was said in the middle of a request, and no look-up without an answer."""
    monkeypatch.setattr(Planner, "problems", property(lambda planner: ()))
    monkeypatch.setattr(doors, "STATS_EVERY_NS", 600_000_000_000)
    monkeypatch.setattr(placing, "LOOKUP_S", WAIT_S)


def with_planners(count: int, test: Callable[[list[House], DoorEngine], Awaitable[None]]) -> None:
    """A front door with so many planners, each ready and with one worker of its own."""

    async def go() -> None:
        houses = [House(workers=(worker,)) for worker in WORKERS[:count]]
        with ExitStack() as stack:
            for house in houses:
                stack.callback(house.stop)
            loop = asyncio.get_running_loop()

            def reach(house: House) -> Callable[[PlannerLink], Awaitable[object]]:
                async def connect(link: PlannerLink) -> object:
                    if house.is_without_planner:
                        raise ConnectionRefusedError("nobody is there")
                    return await loop.create_connection(lambda: link, sock=house.connect())

                return connect

            engine = DoorEngine(0, MODEL, [reach(house) for house in houses], ParentLink())
            keeping = asyncio.create_task(engine.keep_planners())
            await until(lambda: all(port.state.ready for port in engine._ports))
            try:
                await asyncio.wait_for(test(houses, engine), WAIT_S)
            finally:
                keeping.cancel()

    asyncio.run(go())


def where(houses: list[House], request_id: str) -> list[int]:
    return [place for place, house in enumerate(houses) if request_id in house.core.submitted]


def hints(houses: list[House], *found: tuple[int, int]) -> None:
    """What every lookup finds: tokens by place of the worker."""
    for house in houses:
        house.core.hints = tuple(WORKERS[place] for place, _ in found), tuple(count for _, count in found)


def hanging(name: str, **fields: Any) -> Request:
    return replace(request(name, [HANGS, *range(20, 60)]), **fields)


async def started(houses: list[House], engine: DoorEngine, asked: Request) -> tuple[asyncio.Task[None], list[Output]]:
    outputs: list[Output] = []
    task = reading(engine, asked, outputs)
    await until(lambda: any(asked.request_id in house.core.running for house in houses))
    return task, outputs


def test_a_request_goes_where_its_prompt_is_cached() -> None:
    async def test(houses: list[House], engine: DoorEngine) -> None:
        hints(houses, (0, 8), (2, 32))
        task, _ = await started(houses, engine, hanging("r"))
        assert where(houses, "r") == [2]
        engine.finish("r")
        await task

    with_planners(3, test)


def test_what_is_cached_nowhere_is_spread() -> None:
    async def test(houses: list[House], engine: DoorEngine) -> None:
        tasks = [await started(houses, engine, hanging(f"r{number}")) for number in range(4)]
        assert sorted(len(house.core.submitted) for house in houses) == [2, 2]
        for number, (task, _) in enumerate(tasks):
            engine.finish(f"r{number}")
            await task

    with_planners(2, test)


def test_what_was_sent_somewhere_counts_as_cached_there_until_it_begins() -> None:
    beginning = list(range(200, 300))

    async def test(houses: list[House], engine: DoorEngine) -> None:
        first, _ = await started(houses, engine, request("first", [HANGS, *beginning]))
        (home,) = where(houses, "first")
        other, _ = await started(houses, engine, request("other", [HANGS, *range(300, 320)]))  # fewer than at home
        assert where(houses, "other") == [1 - home]
        task, _ = await started(houses, engine, request("alike", [HANGS, *beginning, 7, 8]))
        assert where(houses, "alike") == [home]
        for name in ("first", "other", "alike"):
            engine.finish(name)
        await asyncio.gather(first, other, task)

    with_planners(2, test)


def test_forks_and_steps_go_where_the_first_of_their_call_is() -> None:
    async def test(houses: list[House], engine: DoorEngine) -> None:
        hints(houses, (1, 32))
        family = [hanging("first"), hanging("fork", fork_of="first"), hanging("call", num_places=2)]
        tasks = [asyncio.create_task(_read(engine, asked)) for asked in family]
        await until(lambda: sum(len(house.core.running) for house in houses) == 3)
        assert where(houses, "first") == where(houses, "fork") == [1]
        assert houses[1].core.submitted.index("first") < houses[1].core.submitted.index("fork")
        (at,) = where(houses, "call")
        hints(houses, (1 - at, 32))
        tasks.append(asyncio.create_task(_read(engine, hanging("step", step_of="call", fork_of="over"))))
        await until(lambda: bool(where(houses, "step")))
        assert where(houses, "step") == [at]
        for name in ("first", "fork", "call", "step"):
            engine.finish(name)
        await asyncio.gather(*tasks)

    with_planners(2, test)


async def _read(engine: DoorEngine, asked: Request) -> None:
    async for _ in engine.generate(asked):
        pass


def test_without_an_answer_in_time_a_request_goes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "LOOKUP_S", 0.01)

    async def test(houses: list[House], engine: DoorEngine) -> None:
        for house in houses:
            monkeypatch.setattr(house.core, "look_up", lambda lookup: None)
        task, outputs = await started(houses, engine, request("r", [*LONG]))
        await task
        assert tokens_of(outputs) == LONG

    with_planners(2, test)


def test_streams_of_a_lost_planner_go_on_at_once_at_the_others() -> None:
    async def test(houses: list[House], engine: DoorEngine) -> None:
        outputs: list[list[Output]] = [[] for _ in range(6)]
        tasks = [reading(engine, request(f"r{place}", [place, *LONG]), into) for place, into in enumerate(outputs)]
        await until(lambda: all(len(tokens_of(into)) > 5 for into in outputs))
        there = {place: where(houses, f"r{place}") for place in range(6)}
        await asyncio.to_thread(houses[0].lose_planner, for_good=True)
        await asyncio.gather(*tasks)
        for place, into in enumerate(outputs):
            assert tokens_of(into) == [place, *LONG]
        moved = {f"r{place}" for place, houses_of in there.items() if houses_of == [0]}
        assert moved
        assert set(houses[1].core.resumed) == moved
        assert engine.accepts
        assert not engine._ports[0].is_there

    with_planners(2, test)


def test_a_planner_that_is_lost_while_it_is_asked_keeps_no_request() -> None:
    async def test(houses: list[House], engine: DoorEngine) -> None:
        lookups: list[object] = []
        for house in houses:
            house.core.look_up = lookups.append  # type: ignore[method-assign]
        outputs: list[Output] = []
        task = reading(engine, request("r", [*LONG]), outputs)
        await until(lambda: bool(lookups))
        (question,) = engine._placing._questions.values()
        question.timer.cancel()
        asked = engine._ports.index(question.asked)
        await asyncio.to_thread(houses[asked].lose_planner, for_good=True)
        await task
        assert tokens_of(outputs) == LONG
        assert where(houses, "r") == [1 - asked]

    with_planners(2, test)


def test_an_abort_ends_what_is_at_any_planner_and_what_is_at_none_yet() -> None:
    async def test(houses: list[House], engine: DoorEngine) -> None:
        tasks = [await started(houses, engine, hanging(f"r{number}", names=("call",))) for number in range(2)]
        assert where(houses, "r0") != where(houses, "r1")
        for house in houses:
            house.core.look_up = lambda lookup: None  # type: ignore[method-assign]
        late: list[Output] = []
        tasks.append((reading(engine, hanging("late", names=("call",)), late), late))
        tasks.append(await started_or_asked(engine, hanging("other")))
        await until(lambda: len(engine._placing._questions) == 2)
        assert await engine.abort("t", ("call",)) == 3
        for task, outputs in tasks[:3]:
            await task
            assert outputs[-1].error is not None
            assert outputs[-1].error.code is OutputErrorCode.ABORTED
        tasks[3][0].cancel()
        await asyncio.gather(tasks[3][0], return_exceptions=True)

    with_planners(2, test)


async def started_or_asked(engine: DoorEngine, asked: Request) -> tuple[asyncio.Task[None], list[Output]]:
    outputs: list[Output] = []
    return reading(engine, asked, outputs), outputs


def test_whoever_leaves_before_its_place_is_known_is_asked_for_nowhere() -> None:
    async def test(houses: list[House], engine: DoorEngine) -> None:
        lookups: list[Any] = []
        for house in houses:
            house.core.look_up = lookups.append  # type: ignore[method-assign]
        task, _ = await started_or_asked(engine, hanging("r"))
        await until(lambda: bool(lookups))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (number,) = engine._placing._questions
        engine._placing.looked_up(LookedUp(number))
        await asyncio.sleep(0.02)
        assert where(houses, "r") == []
        assert not engine._placing.unasked()

    with_planners(2, test)


def test_on_idle_planners_a_prompt_goes_home() -> None:
    async def test(houses: list[House], engine: DoorEngine) -> None:
        homes = []
        for number in range(8):
            asked = replace(request(f"r{number}", [HANGS, *range(number, number + 40)]), domain=DomainId("d"))
            task, _ = await started(houses, engine, asked)
            homes += where(houses, f"r{number}")
            assert homes[-1] == placing._home(asked, engine._ports)
            assert placing._home(asked, tuple(reversed(engine._ports))) == 1 - homes[-1], "whatever their order"
            engine.finish(f"r{number}")
            await task
        assert set(homes) == {0, 1}

    with_planners(2, test)


def test_what_ended_while_no_planner_was_there_is_asked_of_none() -> None:
    async def test(houses: list[House], engine: DoorEngine) -> None:
        for house in houses:
            await asyncio.to_thread(house.lose_planner, for_good=True)
        await until(lambda: not any(port.is_there for port in engine._ports))
        outputs: list[Output] = []
        task = reading(engine, hanging("ends"), outputs)
        await asyncio.sleep(0)
        waits = reading(engine, hanging("waits"), [])
        await until(lambda: len(engine._placing.unasked()) == 2)
        engine._streams.end("ends", OutputError(OutputErrorCode.KEY_REVOKED, "its key was revoked"))
        houses[0].is_without_planner = False
        await until(lambda: "waits" in houses[0].core.running)
        assert houses[0].core.submitted == ["waits"]
        engine.finish("waits")
        await asyncio.gather(task, waits)

    with_planners(2, test)


def test_a_flood_of_one_tenant_asks_for_a_few_of_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "LOOKUPS_MAX", 2)

    async def test(houses: list[House], engine: DoorEngine) -> None:
        lookups: list[Any] = []
        for house in houses:
            house.core.look_up = lookups.append  # type: ignore[method-assign]
        outputs: list[list[Output]] = [[] for _ in range(5)]
        tasks = [reading(engine, hanging(f"r{number}"), into) for number, into in enumerate(outputs)]
        tasks.append(reading(engine, replace(hanging("other"), tenant="other"), []))
        await until(lambda: len(lookups) == 3 and sum(len(house.core.running) for house in houses) == 3)
        for lookup in lookups:
            engine._placing.looked_up(LookedUp(lookup.number))
        assert not engine._placing._num_asking
        await until(lambda: sum(len(house.core.running) for house in houses) == 6)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with_planners(2, test)


def test_a_tenants_file_counts_when_all_planners_that_are_there_know_it() -> None:
    async def test(houses: list[House], engine: DoorEngine) -> None:
        heard: list[bytes] = []
        engine.tenants_changed = heard.append
        first: Any
        first, second = engine._ports
        first._take(Tenants(b"new"))
        assert heard == []
        second._take(Tenants(b"new"))
        first._take(Tenants(b"new"))
        assert heard == [b"new"]
        first._take(Tenants(b"newer"))
        assert heard == [b"new"]
        await asyncio.to_thread(houses[1].lose_planner, for_good=True)
        await until(lambda: heard == [b"new", b"newer"])

    with_planners(2, test)


def test_no_finish_is_lost_when_all_planners_are() -> None:
    async def test(houses: list[House], engine: DoorEngine) -> None:
        task, outputs = await started(houses, engine, hanging("r"))
        for house in houses:
            await asyncio.to_thread(house.lose_planner, for_good=True)
        await until(lambda: not any(port.is_there for port in engine._ports))
        assert not outputs or outputs[-1].finish is None
        engine.finish("r")
        await task
        assert outputs[-1].finish is Finish.STOP

    with_planners(2, test)
