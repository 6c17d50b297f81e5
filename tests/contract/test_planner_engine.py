"""The planner's thread dies: whoever waits for its outputs is told at once."""

from __future__ import annotations

import asyncio

from coppice.ids import DomainId
from coppice.messages.step import SamplingParams
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.request import Finish, Output, Request, SchedulerSettings
from coppice_scheduler.edge.engine import ModelInfo
from coppice_scheduler.edge.planner import PlannerEngine
from tests.fakes.waiting import WAIT_S


class Broken(Exception):
    """What the planner meets."""


def fail() -> None:
    raise Broken


async def read(engine: PlannerEngine, name: str) -> list[Output]:
    request = Request(name, "t", DomainId("d"), bytes(8), SamplingParams(), 4)
    return [output async for output in engine.generate(request)]


async def outcomes_of_a_failure() -> tuple[list[Output], list[Output], list[BaseException]]:
    """Of a stream that is open when the planner fails, of one that comes later, and what the service hears."""
    failures: list[BaseException] = []
    core = SchedulerCore(SchedulerSettings(instance=b"instance"))
    engine = PlannerEngine(core, "127.0.0.1:1", "s", ModelInfo("m", 64, 0), failures.append)
    engine.planner.start()
    try:
        waiting = asyncio.create_task(read(engine, "open"))
        await asyncio.sleep(0)
        engine.planner.later(fail)
        opened = await asyncio.wait_for(waiting, WAIT_S)
        later = await asyncio.wait_for(read(engine, "later"), WAIT_S)
        assert not engine.ready
        assert not engine.accepts
        await asyncio.wait_for(engine.drained(), WAIT_S)
    finally:
        await asyncio.to_thread(engine.planner.stop)
    return opened, later, failures


def test_streams_end_with_an_error_when_the_planner_fails() -> None:
    opened, later, failures = asyncio.run(outcomes_of_a_failure())
    for outputs in (opened, later):
        assert [output.finish for output in outputs] == [Finish.ERROR]
        assert outputs[0].error is not None
    assert [type(failure) for failure in failures] == [Broken]
