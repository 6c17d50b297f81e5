"""What one tenant has waiting takes a share of each turn of the loop, and no more."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from coppice_scheduler.edge.frontend.generation_spec import MAX_PROMPTS, GenerationSpec, TokenPrompt
from coppice_scheduler.edge.frontend.loop_share import LoopShare
from tests.unit.scheduler.edge.frontend.test_frontdoor_calls import MODEL, TENANT, World, pack


class Pieces:
    """Who got a turn, in order."""

    def __init__(self, units: int) -> None:
        self.share = LoopShare(units)
        self.done: list[str] = []

    def ask(self, tenant: str, units: int = 1) -> asyncio.Task[None]:
        async def piece() -> None:
            await self.share.take(tenant, units)
            self.done.append(tenant)

        return asyncio.create_task(piece())


def test_a_tenant_gets_its_units_of_a_turn_and_others_theirs() -> None:
    async def scenario() -> None:
        pieces = Pieces(units=4)
        tasks = [pieces.ask("a") for _ in range(100)]
        await asyncio.sleep(0)
        assert pieces.done == ["a"] * 4
        late = pieces.ask("b")
        await asyncio.sleep(0)
        assert "b" in pieces.done
        assert len(pieces.done) < 10
        await asyncio.gather(*tasks, late)
        assert pieces.done.count("a") == 100

    asyncio.run(scenario())


def test_each_turn_is_bounded_until_all_is_done() -> None:
    async def scenario() -> None:
        pieces = Pieces(units=4)
        tasks = [pieces.ask("a") for _ in range(50)]
        seen = 0
        while seen < 50:
            await asyncio.sleep(0)
            assert len(pieces.done) - seen <= 4
            seen = len(pieces.done)
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_what_was_taken_too_much_is_missing_in_the_next_turns() -> None:
    async def scenario() -> None:
        pieces = Pieces(units=4)
        tasks = [pieces.ask("a", 40), pieces.ask("a"), pieces.ask("b")]
        await asyncio.sleep(0)
        assert pieces.done == ["a", "b"]
        for _ in range(9):
            await asyncio.sleep(0)
        assert pieces.done == ["a", "b"]
        await asyncio.gather(*tasks)
        assert pieces.done == ["a", "b", "a"]

    asyncio.run(scenario())


def test_pieces_of_nothing_go_with_the_one_that_pays() -> None:
    async def scenario() -> None:
        pieces = Pieces(units=4)
        tasks = [pieces.ask("a", 4), *(pieces.ask("a", units) for units in (0, 0, 0, 0, 0, 6, 0, 0, 3))]
        await asyncio.sleep(0)
        assert len(pieces.done) == 1
        while len(pieces.done) == 1:
            await asyncio.sleep(0)
        assert len(pieces.done) == 7, "five, and the one that pays for them"
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_the_order_within_a_tenant_is_kept() -> None:
    async def scenario() -> None:
        share, done = LoopShare(2), []

        async def piece(number: int) -> None:
            await share.take("a", 1)
            done.append(number)

        await asyncio.gather(*(piece(number) for number in range(20)))
        assert done == list(range(20))

    asyncio.run(scenario())


def test_who_comes_while_another_wakes_does_not_go_first() -> None:
    async def scenario() -> None:
        share, done = LoopShare(2), []

        async def piece(name: str, units: int, *, later: bool = False) -> None:
            if later:
                await asyncio.sleep(0)  # to the turn in which those who wait are let go
            await share.take("a", units)
            done.append(name)

        await asyncio.gather(piece("whole turn", 2), piece("waits", 1), piece("comes", 1, later=True))
        assert done == ["whole turn", "waits", "comes"]

    asyncio.run(scenario())


def test_who_goes_away_leaves_its_place() -> None:
    async def scenario() -> None:
        pieces = Pieces(units=1)
        tasks = [pieces.ask("a") for _ in range(10)]
        await asyncio.sleep(0)
        for task in tasks[1:9]:
            task.cancel()
        await asyncio.wait_for(tasks[9], 60)
        assert pieces.done == ["a"] * 2
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())


def test_who_is_let_go_and_who_comes_then_do_not_add_up() -> None:
    """Pieces that come in the turn in which others wake are none too many."""

    async def scenario() -> None:
        pieces = Pieces(units=8)
        tasks = [pieces.ask("a") for _ in range(16)]
        most = seen = 0
        for _ in range(20):
            tasks += [pieces.ask("a") for _ in range(8)]
            await asyncio.sleep(0)
            most, seen = max(most, len(pieces.done) - seen), len(pieces.done)
        assert most == 8
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_nothing_is_kept_of_tenants_that_are_gone() -> None:
    async def scenario() -> None:
        pieces = Pieces(units=1)
        await asyncio.gather(*(pieces.ask(f"t{number % 10}") for number in range(100)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not pieces.share._taken
        assert not pieces.share._lines

    asyncio.run(scenario())


def test_many_answers_of_one_tenant_begin_between_those_of_others() -> None:
    """One client asks for thousands of answers at once; its neighbour's request is not behind them all."""
    other = TENANT.model_copy(update={"id": "other"})
    many = GenerationSpec(MODEL, tuple(TokenPrompt(pack([5])) for _ in range(MAX_PROMPTS)), max_tokens=1)

    async def scenario() -> None:
        world = World()

        async def ask(tenant: Any, spec: GenerationSpec) -> None:
            call = await world.frontdoor.open(tenant, spec)
            async with aclosing(call.deltas()) as deltas:
                async for _ in deltas:
                    pass

        flood = [asyncio.create_task(ask(TENANT, many)) for _ in range(8)]
        await asyncio.sleep(0)
        await ask(other, GenerationSpec(MODEL, (TokenPrompt(pack([5])),), max_tokens=1))
        begun = [request.tenant for request in world.engine.requests]
        assert len(begun) < 2 * MAX_PROMPTS, "the neighbour's request ended after those of a call or two"
        assert "other" in begun
        await asyncio.gather(*flood)
        assert len(world.engine.requests) == 8 * MAX_PROMPTS + 1

    asyncio.run(scenario())
