"""Places for running requests: each strict tenant has some that are its own, all others share the rest."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.ids import DomainId
from coppice.messages.index import Acquire
from coppice_scheduler.core.queue.slot_shares import SlotShares
from coppice_scheduler.core.state.settings import SchedulerSettings, TenantLimits, TenantSettings
from tests.fakes.scheduler.scheduler_bench import Bench, W

TENANTS = {
    "strict": TenantLimits(is_strict=True),
    "small": TenantLimits(),
    "large": TenantLimits(weight=2.0),
}
LIMITS = {"max_running": (8, (0, 0, 0)), "max_sequences": (64, (8, 0, 0))}  # of all workers, or of one


def settings(max_running: int, tenants: dict[str, TenantLimits] = TENANTS) -> SchedulerSettings:
    return SchedulerSettings(
        instance=b"instance",
        max_running=max_running,
        max_step_tokens=64,
        tenants=tenants,
        fixed_domains=frozenset({DomainId("strict")}),
    )


def bench_of(limit: str) -> Bench:
    max_running, limits = LIMITS[limit]
    return Bench(settings(max_running), num_blocks=1000, limits=limits)


def submit(bench: Bench, tenant: str, count: int) -> None:
    """So many requests that run for long, all at once."""
    bench.hold = True
    for _ in range(count):
        name = f"{tenant} {len(bench._names)}"
        assert bench.submit(name, 3, max_new=60, tenant=tenant, domain=tenant) is None
    bench.hold = False
    bench.advance()
    bench.settle()


def running(bench: Bench) -> dict[str, int]:
    return {tenant: stats.running for tenant, stats in bench.core.stats().tenants.items() if stats.running}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_strict_tenant_has_places_while_others_want_more_than_all(limit: str) -> None:
    bench = bench_of(limit)
    submit(bench, "large", 20)
    assert running(bench) == {"large": 6}, "all but the quarter of the strict tenant"
    submit(bench, "strict", 1)
    assert running(bench) == {"large": 6, "strict": 1}
    submit(bench, "strict", 2)
    assert running(bench) == {"large": 6, "strict": 2}
    assert not bench.core.stats().total_preemptions, "nobody had to give one up"


@pytest.mark.parametrize("limit", LIMITS)
def test_a_strict_tenant_gets_no_place_of_others(limit: str) -> None:
    bench = bench_of(limit)
    submit(bench, "strict", 5)
    assert running(bench) == {"strict": 2}
    submit(bench, "small", 9)
    assert running(bench) == {"strict": 2, "small": 6}


@pytest.mark.parametrize("limit", LIMITS)
def test_others_share_their_places_and_take_none_of_a_strict_tenant(limit: str) -> None:
    """`small` may hold a third of six, by its weight; it is given them by `large`, which floods, and by nobody else."""
    bench = bench_of(limit)
    submit(bench, "strict", 5)
    submit(bench, "large", 20)
    submit(bench, "small", 2)
    bench.result(dict.fromkeys(range(1, 9), 7))
    bench.settle()
    assert running(bench) == {"strict": 2, "large": 4, "small": 2}
    assert bench.core.stats().total_preemptions == 2


def test_a_place_of_a_strict_tenant_that_comes_free_is_its_next() -> None:
    bench = bench_of("max_running")
    submit(bench, "strict", 3)
    submit(bench, "large", 20)
    bench.cancel("strict 0")
    bench.settle()
    assert running(bench) == {"large": 6, "strict": 2}


def test_each_takes_its_turn_where_there_are_too_few_places() -> None:
    """One place for two groups: whoever has it, the other waits and is served then."""
    bench = Bench(settings(1), num_blocks=1000)
    submit(bench, "large", 1)
    submit(bench, "strict", 1)
    assert running(bench) == {"large": 1}
    bench.cancel("large 0")
    bench.settle()
    assert running(bench) == {"strict": 1}


def test_the_tenants_file_changes_the_parts_while_requests_run() -> None:
    bench = bench_of("max_running")
    submit(bench, "strict", 5)
    submit(bench, "large", 20)
    equal = {**TENANTS, "strict": TenantLimits(is_strict=True, weight=3.0)}
    domains = {tenant: DomainId(tenant) for tenant in TENANTS}
    bench.core.set_tenants(TenantSettings(equal, domains, frozenset({DomainId("strict")}), {}, {}), bench.now_ns)
    bench.advance()
    bench.settle()
    submit(bench, "small", 1)
    assert running(bench) == {"large": 6, "strict": 2}, "nobody loses a place that it has"
    for number in range(5, 8):
        bench.cancel(f"large {number}")
    bench.settle()
    assert running(bench) == {"large": 3, "small": 1, "strict": 4}


# --- non-interference

_MOVES = st.lists(st.tuples(st.sampled_from(["strict", "small", "large", "end", "step"]), st.integers(0, 7)))


def asked_by_strict(moves: list[tuple[str, int]], limit: str, *, others: bool) -> list[tuple[int, bytes]]:
    """At which move it asks for memory, and for what. Its requests end when it cancels them."""
    bench = bench_of(limit)
    asked: list[tuple[int, bytes]] = []
    for index, (kind, number) in enumerate(moves):
        bench.hold = True
        name = f"{kind} {index}"
        if kind == "strict":
            bench.submit(name, 3 + number, max_new=1000, tenant=kind, domain=kind)
        elif kind in TENANTS and others:
            for more in range(1 + number):
                bench.submit(f"{name} {more}", 3, max_new=60, tenant=kind, domain=kind)
        elif kind == "end":
            at_work = [one for one in bench._names.values() if one.startswith("strict ")]
            if at_work:
                bench.core.cancel(at_work[number % len(at_work)], bench.now_ns)
        bench.advance()
        asked += [(index, op.tokens) for op in bench.ops(Acquire) if isinstance(op, Acquire) and op.domain == "strict"]
        bench.settle()
        if kind == "step" and bench.plans:
            rows = bench.core._life.workers[W].in_flight[0].rows
            bench.result(dict.fromkeys(rows.ids[rows.samples].tolist(), 7))
            bench.settle()
    return asked


@given(_MOVES, st.sampled_from(sorted(LIMITS)))
def test_when_a_strict_tenant_asks_depends_on_itself_alone(moves: list[tuple[str, int]], limit: str) -> None:
    assert asked_by_strict(moves, limit, others=True) == asked_by_strict(moves, limit, others=False)


# --- the parts


@given(
    st.dictionaries(st.text(min_size=1), st.tuples(st.floats(0.1, 10), st.booleans()), min_size=1),
    st.integers(1, 500),
)
def test_parts_fill_the_whole_and_nobody_has_none(tenants: dict[str, tuple[float, bool]], num_slots: int) -> None:
    limits = {name: TenantLimits(weight=weight, is_strict=strict) for name, (weight, strict) in tenants.items()}
    shares = SlotShares(settings(64, limits))
    parts = Counter({tenant: int(shares.of(tenant, num_slots)) for tenant in shares.strict})
    common = shares.of(None, num_slots)
    assert min([common, *parts.values()]) >= 1
    assert parts.total() + common == num_slots or num_slots <= parts.total()
    assert shares.of(None, inf) == inf
