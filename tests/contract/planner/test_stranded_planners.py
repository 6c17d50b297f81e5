"""What waits at a planner that has no worker goes on at one that has some, if there is one for long enough."""

from __future__ import annotations

import asyncio

import pytest

from coppice_scheduler.core.state.request import Finish
from coppice_scheduler.edge.ipc import door_engine
from coppice_scheduler.edge.ipc.door_engine import DoorEngine
from coppice_scheduler.edge.planner.planner import Planner
from tests.contract.planner.test_planner_lost import tokens_of
from tests.contract.planner.test_several_planners import (
    hanging,
    hints,
    script_planners,
    started,
    where,
    with_planners,
)
from tests.fakes.api.engine import pack, unpack
from tests.fakes.scheduler.house import House, until
from tests.fakes.waiting import WAIT_S


@pytest.fixture(autouse=True)
def _all_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    script_planners(monkeypatch)


def test_what_waits_at_a_planner_without_a_worker_goes_on_at_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_engine, "STRANDED_S", 0.05)

    async def test(houses: list[House], engine: DoorEngine) -> None:
        hints(houses, (0, 32))
        task, outputs = await started(houses, engine, hanging("r"))
        other, _ = await started(houses, engine, hanging("other"))
        stream = engine._streams.find("r")
        assert stream is not None
        stream.put_tokens(pack([1, 2]))
        number = stream.request.number
        monkeypatch.setattr(Planner, "is_stranded", property(lambda planner: planner is houses[0].doors.planner))
        await until(lambda: "r" in houses[1].core.running)
        assert unpack(houses[1].core.resumed["r"].sent) == [1, 2]
        await until(lambda: not engine._ports[0]._left)
        assert ("r", Finish.CANCELLED) in houses[0].core.cancelled
        assert stream.request.number != number
        assert not stream.has_ended, "the end that it has where it was is none"
        await until(lambda: "other" in houses[1].core.running)
        for name in ("r", "other"):
            engine.finish(name)
        await asyncio.gather(task, other)
        assert tokens_of(outputs) == [1, 2]

    with_planners(2, test)


def test_without_another_it_waits_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_engine, "STRANDED_S", WAIT_S)

    async def test(houses: list[House], engine: DoorEngine) -> None:
        hints(houses, (0, 32))
        task, _ = await started(houses, engine, hanging("r"))
        stranded: list[Planner] = [house.doors.planner for house in houses]
        monkeypatch.setattr(Planner, "is_stranded", property(lambda planner: planner in stranded))
        monkeypatch.setattr(
            Planner, "problems", property(lambda planner: ("no worker",) if planner in stranded else ())
        )
        await until(lambda: not engine.ready)
        engine._rescue(engine._ports[0])  # as after that time
        await asyncio.sleep(0.1)
        assert where(houses, "r") == [0]
        monkeypatch.setattr(door_engine, "STRANDED_S", 0.01)
        del stranded[1]
        await until(lambda: "r" in houses[1].core.running)
        engine.finish("r")
        await task

    with_planners(2, test)


def test_a_planner_that_has_a_worker_again_keeps_what_waits_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_engine, "STRANDED_S", WAIT_S)

    async def test(houses: list[House], engine: DoorEngine) -> None:
        hints(houses, (0, 32))
        task, _ = await started(houses, engine, hanging("r"))
        stranded: list[Planner] = [houses[0].doors.planner]
        monkeypatch.setattr(Planner, "is_stranded", property(lambda planner: planner in stranded))
        await until(lambda: engine._ports[0].is_stranded)
        stranded.clear()
        await until(lambda: not engine._ports[0].is_stranded)
        engine._rescue(engine._ports[0])  # as after that time
        await asyncio.sleep(0.1)
        assert where(houses, "r") == [0]
        engine.finish("r")
        await task

    with_planners(2, test)
