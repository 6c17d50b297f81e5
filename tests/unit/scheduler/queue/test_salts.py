"""A request's salt goes wherever its prompt is looked up: acquires, hints, claims; and no fork crosses it."""

from __future__ import annotations

from msgspec.structs import replace

from coppice.ids import CacheEpoch, DomainId, SchedulerEpoch
from coppice.messages.index import Acquire, MatchQueries, Reattach
from coppice.namespaces import digest_salt, with_salt
from coppice_scheduler.core.state.request_bounds import out_of_bounds
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import Bench
from tests.fakes.scheduler.scheduler_ledger import NAMESPACE

ONE, TWO = digest_salt(DomainId("d"), "user 1"), digest_salt(DomainId("d"), "user 2")
NAMES = [with_salt(NAMESPACE, salt) for salt in (ONE, TWO, b"")]


def test_an_acquire_names_the_salted_namespace() -> None:
    bench = Bench()
    for number, salt in enumerate((ONE, TWO, b"")):
        bench.submit(f"r{number}", 9, salt=salt)
    assert [op.namespace for op in bench.ops(Acquire) if isinstance(op, Acquire)] == NAMES


def test_hints_are_asked_for_in_the_salted_namespace() -> None:
    """Else the order within a tenant would tell one user what another has sent."""
    bench = Bench(SchedulerSettings(instance=b"instance", max_running=1, max_step_tokens=64))
    bench.submit("first", 1, max_new=50)
    bench.answer()
    bench.hold = True
    for number, salt in enumerate((ONE, TWO, b"")):
        bench.submit(f"r{number}", 9, salt=salt)
    bench.advance()
    (asked,) = [message for message in bench.other_messages if isinstance(message, MatchQueries)]
    assert [query.namespace for query in asked.queries] == NAMES


def test_a_lease_is_claimed_under_its_salt() -> None:
    bench = Bench()
    bench.submit("r", 9, salt=ONE)
    bench.answer()
    bench.other_messages.clear()
    bench.core.index_attached(SchedulerEpoch(1), CacheEpoch(2), True, bench.now_ns)
    bench.advance()
    (claim,) = [claim for m in bench.other_messages if isinstance(m, Reattach) for claim in m.claims]
    assert claim.namespace == NAMES[0]


def test_no_fork_of_a_request_with_another_salt() -> None:
    bench = Bench()
    bench.submit("r0", 10, salt=ONE)
    bench.submit("other salt", 10, fork_of="r0", salt=TWO)
    bench.submit("no salt", 10, fork_of="r0")
    assert len(bench.ops(Acquire)) == 3, "each computes the prompt for itself"
    bench.submit("same salt", 10, fork_of="r0", salt=ONE)
    assert len(bench.ops(Acquire)) == 3, "this one waits for the first"


def test_a_salt_of_another_length_is_out_of_bounds() -> None:
    bench = Bench()
    bench.submit("r", 3, salt=ONE)
    request = bench.core._life.requests["r"].request
    assert out_of_bounds(request) == ""
    for wrong in (b"x", ONE + b"x", ONE[:-1]):
        assert out_of_bounds(replace(request, salt=wrong)) == "salt"
