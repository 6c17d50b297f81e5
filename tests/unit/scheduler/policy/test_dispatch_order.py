"""What a turn of the planner costs depends on what happens in it, not on how many tenants wait. Lines of Python are
counted, not time."""

from __future__ import annotations

from coppice.messages.index import Acquire, MatchHint, MatchHints, MatchQueries
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import Bench
from tests.unit.repository.test_no_per_token_python import count_lines

LINES_PER_TENANT = 6


def crowded(num_tenants: int) -> Bench:
    """One request runs; of each tenant two wait, and the cache service has said what it knows of them."""
    bench = Bench(SchedulerSettings(instance=b"instance", max_running=1, max_step_tokens=64, max_queued=4096))
    bench.submit("first", 5, max_new=40)
    bench.settle()
    bench.hold = True
    for number in range(num_tenants):
        bench.submit(f"a{number}", 5, tenant=f"t{number}")
        bench.submit(f"b{number}", 6, tenant=f"t{number}")
    bench.hold = False
    bench.advance()
    for message in bench.other_messages:
        assert isinstance(message, MatchQueries)
        hints = tuple(MatchHint((), ()) for _ in message.queries)
        bench.core.index_message(MatchHints(bench.cache_epoch, hints), bench.now_ns)
    assert len(bench.other_messages) == num_tenants
    bench.advance()
    return bench


def served(bench: Bench) -> Bench:
    """No two tenants alike: of those served alike each is looked at for who came first."""
    shares = bench.core._life.shares
    for number in range(shares.num_tenants):
        shares.charge(number, 7 * number)
    return bench


def lines_of_a_turn(bench: Bench) -> int:
    return count_lines(lambda: bench.core.advance(bench.now_ns))


def test_a_turn_in_which_nothing_happens() -> None:
    few, many = lines_of_a_turn(served(crowded(20))), lines_of_a_turn(served(crowded(220)))
    assert many - few < 200 * LINES_PER_TENANT, f"{few} lines with 20 tenants, {many} with 220"


def test_a_turn_in_which_a_place_comes_free() -> None:
    def lines(num_tenants: int) -> int:
        bench = served(crowded(num_tenants))
        bench.core.cancel("first", bench.now_ns)
        count = lines_of_a_turn(bench)
        assert bench.core.stats().waiting == 2 * num_tenants
        bench.core.check()
        return count

    few, many = lines(20), lines(220)
    assert many - few < 200 * LINES_PER_TENANT, f"{few} lines with 20 tenants, {many} with 220"


def test_tenants_that_were_served_alike_go_in_the_order_in_which_they_came() -> None:
    bench = crowded(8)
    for number in range(8):
        bench.core.cancel("first" if not number else f"a{number - 1}", bench.now_ns)
        while bench.plans:
            bench.result()
        bench.settle()
        running = [name for name, request in bench.core._life.requests.items() if request.sequence is not None]
        assert running == [f"a{number}"]
    assert not bench.ops(Acquire)
