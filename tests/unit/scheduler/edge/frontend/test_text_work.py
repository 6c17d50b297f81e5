"""Work on text beside the loop: short before long, tenants in turns, and nothing for those who went away."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import coppice
from coppice.telemetry.logs import REQUEST_ID
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind
from coppice_scheduler.edge.frontend.text_work import SHORT_SIZE, TextWork
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.text.tokenizer import Tokenizer, TooManyTokens

WAIT_S = 60
LONG = SHORT_SIZE + 1


class Bench:
    """Work that begins in a thread, waits to be let go, and is written down."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.changed = threading.Condition()
        self.free: set[str] = set()
        self.all_free = False

    def work(self, name: str) -> Callable[[], str]:
        def blocked() -> str:
            with self.changed:
                self.begun.append(name)
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: self.all_free or name in self.free, WAIT_S)
            return name

        return blocked

    def let_go(self, *names: str) -> None:
        with self.changed:
            self.free |= set(names)
            self.all_free = not names
            self.changed.notify_all()

    async def until(self, *names: str) -> None:
        """Until the work of these names, and no other, has begun."""

        def wait() -> bool:
            with self.changed:
                return self.changed.wait_for(lambda: self.begun == list(names), WAIT_S)

        assert await asyncio.to_thread(wait), self.begun


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    async def bounded() -> None:
        bench = Bench()
        try:
            async with asyncio.timeout(WAIT_S):
                await test(bench)
        finally:
            bench.let_go()

    asyncio.run(bounded())


def start(work: TextWork, bench: Bench, tenant: str, name: str, size: int = LONG) -> asyncio.Task[str]:
    return asyncio.create_task(work.run(tenant, size, bench.work(name)))


def test_what_is_short_does_not_wait_behind_what_is_long() -> None:
    async def test(bench: Bench) -> None:
        work = TextWork(short_threads=1, long_threads=1)
        long = start(work, bench, "a", "long")
        await bench.until("long")
        bench.let_go("short")
        assert await work.run("a", SHORT_SIZE, bench.work("short")) == "short"
        assert not long.done()
        bench.let_go()
        assert await long == "long"

    run(test)


def test_a_tenant_has_one_long_text_in_a_thread_at_a_time() -> None:
    async def test(bench: Bench) -> None:
        work = TextWork(long_threads=2)
        first, second = start(work, bench, "a", "a1"), start(work, bench, "a", "a2")
        await bench.until("a1")
        other = start(work, bench, "b", "b1")
        await bench.until("a1", "b1")  # the second thread was left to it
        bench.let_go()
        assert await asyncio.gather(first, second, other) == ["a1", "a2", "b1"]

    run(test)


def test_tenants_take_turns() -> None:
    async def test(bench: Bench) -> None:
        work = TextWork(long_threads=1)
        names = [("a", f"a{number}") for number in range(4)] + [("b", "b0"), ("b", "b1"), ("c", "c0")]
        tasks = [start(work, bench, *name) for name in names]
        await bench.until("a0")
        bench.let_go()
        await asyncio.gather(*tasks)
        assert bench.begun == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]

    run(test)


def test_what_is_logged_in_a_thread_says_whose_request_it_is() -> None:
    async def test(bench: Bench) -> None:
        work = TextWork(long_threads=1)

        async def request(tenant: str, name: str) -> tuple[str, str]:
            """Its work, which waits its turn behind that of others, and sees an id."""
            REQUEST_ID.set(name)  # a task has a context of its own
            wait = bench.work(name)
            return await work.run(tenant, LONG, lambda: (wait(), REQUEST_ID.get()))

        tasks = [asyncio.create_task(request(*names)) for names in (("a", "a0"), ("a", "a1"), ("b", "b0"))]
        await bench.until("a0")
        bench.let_go()
        assert await asyncio.gather(*tasks) == [("a0", "a0"), ("a1", "a1"), ("b0", "b0")]
        assert REQUEST_ID.get() == ""

    run(test)


def test_work_that_nobody_waits_for_leaves_its_line() -> None:
    async def test(bench: Bench) -> None:
        work = TextWork(long_threads=1, waiting_max=1)
        running = start(work, bench, "a", "a0")
        await bench.until("a0")
        gone = start(work, bench, "a", "a1")
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        after = start(work, bench, "a", "a2")  # there is room for one, and it is free again
        running.cancel()
        await asyncio.wait([running])
        assert bench.begun == ["a0"], "a thread keeps its place until it is done"
        bench.let_go()
        assert await after == "a2"
        assert bench.begun == ["a0", "a2"]

    run(test)


def test_too_much_that_waits_is_refused_and_hurts_no_other_tenant() -> None:
    async def test(bench: Bench) -> None:
        work = TextWork(long_threads=1, waiting_max=2)
        tasks = [start(work, bench, "a", "a0")]
        await bench.until("a0")
        tasks += [start(work, bench, "a", "a1"), start(work, bench, "a", "a2")]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 texts waiting") as refused:
            await work.run("a", LONG, bench.work("a3"))
        assert (refused.value.kind, refused.value.retry_after_ms > 0) == (ErrorKind.BUSY, True)
        tasks.append(start(work, bench, "b", "b0"))
        bench.let_go()
        assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "b0"]

    run(test)


def test_what_work_raises_reaches_who_asked_and_frees_the_thread() -> None:
    async def test(bench: Bench) -> None:
        work = TextWork(long_threads=1)

        def broken() -> None:
            raise TooManyTokens(5)

        for _ in range(3):
            with pytest.raises(TooManyTokens):
                await work.run("a", LONG, broken)

    run(test)


@pytest.fixture
def nobody_is_interrupted() -> Iterator[None]:
    """A thread runs until it gives the interpreter away."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("nobody_is_interrupted")
def test_tokenising_leaves_the_interpreter_to_others() -> None:
    tokenizer = Tokenizer(load_checkpoint_text(Path(coppice.__file__).parent / "demo_model"))
    text = "the quick brown fox jumps over the lazy dog " * 2_000
    events: list[str] = []
    begun = threading.Event()

    def tokenise() -> None:
        begun.set()
        for _ in range(50):  # on a starved machine the other thread may be late for the first ones
            with pytest.raises(TooManyTokens):
                tokenizer.encode_now(text, add_special_tokens=False, at_most=1)
            if events:
                break
        events.append("tokenised")

    thread = threading.Thread(target=tokenise)
    thread.start()
    begun.wait(WAIT_S)
    events.append("somebody else")
    thread.join(WAIT_S)
    assert events == ["somebody else", "tokenised"]
