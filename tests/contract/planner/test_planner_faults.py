"""A fault that is one request's ends that request; any other ends the planner, as its core may be half-changed."""

from __future__ import annotations

import asyncio

import pytest

from coppice.telemetry.logs import configure_logging
from coppice_scheduler.core.engine import SubmitFailed
from coppice_scheduler.core.state.request import Finish, Refused, RefusedReason, Request
from coppice_scheduler.edge.base.engine import RequestRefused
from coppice_scheduler.edge.base.errors import ErrorKind, from_refused
from tests.contract.planner.test_front_doors import House, read, run, until
from tests.fakes.cache.scripted_core import HANGS, ScriptedCore


class Faulty(ScriptedCore):
    """Fails on requests by their names."""

    def submit(self, request: Request, now_ns: int) -> Refused | None:
        if request.request_id == "poison":
            try:
                raise KeyError("a fault of ours")
            except KeyError as error:
                raise SubmitFailed("request poison") from error
        if request.request_id == "half-way":
            raise KeyError("in the middle of a change")
        return super().submit(request, now_ns)


def faulty(house: House) -> None:
    house.doors.planner._core = Faulty()  # type: ignore[assignment]


def test_a_request_that_cannot_be_decided_on_is_refused_alone(capfd: pytest.CaptureFixture[str]) -> None:
    async def test(house: House) -> None:
        faulty(house)
        engine = await house.open(0)
        hanging = asyncio.create_task(read(engine, "other", [HANGS]))
        await until(lambda: house.doors.num_requests == 1)
        with pytest.raises(RequestRefused) as refused:
            await read(engine, "poison", [1])
        error = from_refused(refused.value.refused)
        assert (error.kind, error.code, error.retry_after_ms) == (ErrorKind.INTERNAL, "internal", 0)
        assert "fault of ours" not in error.message
        assert [output.finish for output in await read(engine, "next", [1])][-1] is Finish.LENGTH
        assert not house.failures
        engine.finish("other")
        assert [output.finish for output in await hanging] == [Finish.STOP]

    configure_logging("error")
    run(test)
    said, _, traceback = capfd.readouterr().err.partition("\n")
    assert "coppice.scheduler: [request poison] a request of tenant t is refused" in said
    assert "KeyError: 'a fault of ours'" in traceback


def test_a_fault_in_the_middle_of_a_change_ends_the_planner() -> None:
    async def test(house: House) -> None:
        faulty(house)
        engine = await house.open(0)
        asking = asyncio.create_task(read(engine, "half-way", [1]))
        await until(lambda: bool(house.failures))
        assert isinstance(house.failures[0], KeyError)
        house.lose_planner()  # its process ends then, and another is started
        assert [output.finish for output in await asking][-1] is Finish.LENGTH

    run(test)


def test_a_quarantined_prompt_is_unavailable_for_a_time() -> None:
    error = from_refused(Refused(RefusedReason.QUARANTINED, "why", 9000))
    assert (error.kind, error.code, error.retry_after_ms) == (ErrorKind.UNAVAILABLE, "prompt_quarantined", 9000)
