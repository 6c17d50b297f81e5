"""Two schedulers share a cell: fair shares and limits of a tenant are those of the whole cell."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from coppice.ids import DomainId
from coppice.messages.cell import CELL_TICK_MS
from coppice.messages.step import SamplingParams
from coppice_scheduler.core.state.request import Refused, RefusedReason, Request
from coppice_scheduler.core.state.settings import TenantLimits, TenantSettings
from coppice_sim.base.timeline import MS
from coppice_sim.cell_sums import counted_by, knows, served_by
from coppice_sim.hosts.kv_honest import VOCABULARY, reference, salt_of_domain
from coppice_sim.hosts.scheduler import SchedulerHost
from coppice_sim.nemesis import FaultProfile
from coppice_sim.traffic.workload import Ask
from coppice_sim.world import Scope, World

SEED = 69  # two workers, the private tenants amber and birch, steps of some 2 ms
X, Y = "amber", "birch"
PROMPT_TOKENS, OUTPUT_TOKENS = 12, 4
MAX_RUNNING = 8  # of a scheduler
MAX_CONCURRENCY = 24
LONG = 30  # tokens
DELAYS_MS = 4  # two messages, each on its way for 0.5 ms or some more
WITHIN_MS = CELL_TICK_MS + DELAYS_MS


class TwoSchedulers:
    """s0 and s1 with a worker each, and clients of X and Y that ask by a script."""

    def __init__(self, **limits: TenantLimits) -> None:
        scope = Scope(tiers=False, demands=False, absent=frozenset((X, Y)), check_every=0)
        self.world = world = World(SEED, FaultProfile.none(), scope)
        assert set(world.settings.domains) == {X, Y}
        self._rng = Random("prompts")
        self._limits = limits
        world.cluster.start_scheduler("s1")
        self.hosts = dict(world.cluster.schedulers)
        domains = {X: DomainId(X), Y: DomainId(Y)}
        settings = TenantSettings(limits=limits, domains=domains, fixed_domains=frozenset(), guarantees={}, maximums={})
        for host in self.hosts.values():
            host.set_tenants(settings)
        self.run_until(lambda: all(self.num_workers(host) == 1 for host in self.hosts.values()))
        self.run_until(lambda: all(knows(*pair) for pair in (self.pair, self.pair[::-1])))

    @property
    def pair(self) -> tuple[SchedulerHost, SchedulerHost]:
        return self.hosts["s0"], self.hosts["s1"]

    def num_workers(self, host: SchedulerHost) -> int:
        return sum(bool(host.epoch) and w.core.planning == host.epoch for w in self.world.cluster.workers.values())

    def submit(self, name: str, tenant: str, num_outputs: int = OUTPUT_TOKENS) -> Refused | None:
        host, workload = self.hosts[name], self.world.workload
        tokens = [self._rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        packed, number = np.array(tokens, "<u4").tobytes(), len(workload.asks)
        vocabulary = self.world.cluster.env.vocabulary
        request = Request(
            request_id=f"r{number}",
            tenant=tenant,
            domain=DomainId(tenant),
            tokens=packed,
            sampling=SamplingParams(temperature=0.0, seed=number),
            max_new_tokens=num_outputs,
            arrived_ns=host.now_ns,
            number=number,
        )
        expected = reference(packed, num_outputs, seed=number, salt=salt_of_domain(tenant), vocabulary=vocabulary)
        refused: list[Refused | None] = []
        submit = host.submit
        host.submit = lambda one: refused.append(submit(one)) or refused[-1]  # type: ignore[method-assign,func-returns-value]
        workload.enter(Ask(request, host, expected, tokens + expected, len(tokens)))
        host.submit = submit  # type: ignore[method-assign]
        return refused[0]

    def num_at_work(self, name: str, tenant: str) -> int:
        counts = self.hosts[name].core._life.counts
        return counts.tenant_running[tenant] + counts.tenant_waiting[tenant]

    def served(self) -> Counter[str]:
        return served_by(self.hosts["s0"]) + served_by(self.hosts["s1"])

    def run_until(self, condition: Callable[[], bool], each: Callable[[], None] = lambda: None) -> None:
        until_ns = self.world.timeline.now_ns + 20_000 * MS
        while not condition():
            assert self.world.timeline.now_ns < until_ns
            self.world.step()
            each()

    def run_for(self, ms: int, each: Callable[[], None]) -> None:
        until_ns = self.world.timeline.now_ns + ms * MS
        self.run_until(lambda: self.world.timeline.now_ns >= until_ns, each)


def flooded(cell: TwoSchedulers, ms: int) -> Counter[str]:
    """What was served within `ms`, while X asks both schedulers for more than there is, and Y one of them."""

    def flood() -> None:
        for name, tenant in (("s0", X), ("s1", X), ("s0", Y)):
            while cell.num_at_work(name, tenant) < 12:
                cell.submit(name, tenant)

    cell.run_for(500, flood)
    before = cell.served()
    cell.run_for(ms, flood)
    return cell.served() - before


def check_fair_shares() -> None:
    """Y gets its half, but for what the other scheduler served before this one heard of it, and a request at either."""
    served = flooded(TwoSchedulers(), 1_000)
    per_ms = served.total() / 2 / 1_000
    bound = WITHIN_MS * per_ms + 2 * (PROMPT_TOKENS + OUTPUT_TOKENS) * MAX_RUNNING
    assert abs(served[X] - served[Y]) < bound < served.total() / 5, served


def check_concurrency() -> None:
    """Whoever lets one in counts what the other has had at work for a tick and two messages."""
    cell = TwoSchedulers(amber=TenantLimits(max_concurrency=MAX_CONCURRENCY))
    let_in: deque[tuple[int, str]] = deque()  # when, and where
    seen: Counter[str] = Counter()

    def ask(name: str, other: str) -> None:
        now_ns = cell.world.timeline.now_ns
        refused = cell.submit(name, X, LONG)
        if refused is not None:
            assert refused.reason is RefusedReason.TENANT_CONCURRENCY
            assert refused.retry_after_ms > 0
            seen["refused"] += 1
            return
        seen[name] += 1
        let_in.append((now_ns, name))
        while let_in[0][0] < now_ns - WITHIN_MS * MS:
            let_in.popleft()
        lately = sum(where == other for _, where in let_in)
        own, elsewhere = cell.num_at_work(name, X), cell.num_at_work(other, X)
        assert own + max(elsewhere - lately, 0) <= MAX_CONCURRENCY

    names = ["s0", "s1"]
    for number in range(1_000):
        cell.run_for(2, lambda: None)
        if number % 200 == 0:
            names.reverse()
        ask(*names)  # for a while only one asks, so that the other has had its requests for longer than a tick
        if number % 200 >= 120:
            ask(*names[::-1])
    assert min(seen[name] for name in ("s0", "s1", "refused")) > 20, seen


def check_limits_per_minute() -> None:
    """Tokens over both schedulers: a minute's worth, what has flowed in since, and one scheduler's last tick."""
    limit = TenantLimits(tokens_per_minute=2_000)
    cell = TwoSchedulers(amber=limit)
    taken: list[tuple[int, int]] = []  # when, tokens
    began_ns = cell.world.timeline.now_ns
    before = cell.served()[X]
    num_refused = 0
    for _ in range(1_000):
        cell.run_for(2, lambda: None)
        for name in cell.hosts:
            if cell.submit(name, X) is None:
                taken.append((cell.world.timeline.now_ns, PROMPT_TOKENS + OUTPUT_TOKENS))
            else:
                num_refused += 1
    cell.run_for(500, lambda: None)
    passed_ns = taken[-1][0] - began_ns
    allowed = limit.tokens_per_minute * (1 + passed_ns / 60e9)
    end_ns = taken[-1][0]
    lately = sum(tokens for at_ns, tokens in taken if at_ns > end_ns - WITHIN_MS * MS)
    assert num_refused > 100
    assert cell.served()[X] - before > limit.tokens_per_minute * 0.9
    assert sum(tokens for _, tokens in taken) <= allowed + lately + 2 * (PROMPT_TOKENS + OUTPUT_TOKENS)


CHECKS = {"fair shares": check_fair_shares, "concurrency": check_concurrency, "limits": check_limits_per_minute}


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=name, marks=[] if name == "limits" else pytest.mark.wide)
        for name, check in CHECKS.items()
    ],
)
def test_two_schedulers_are_one_cell_to_a_tenant(check: Callable[[], None]) -> None:
    check()


@pytest.mark.wide
def test_restarts_of_the_cache_service_lose_nothing_and_count_nothing_twice() -> None:
    """Where sessions live through them. Who came first counts all that the other served; who came later, all that
    followed the first word."""
    crashes = 0
    for seed in (801, 822, 845):
        world = World(
            seed, replace(FaultProfile.cache_restarts(), cache_crashes=2.0), Scope(tiers=False, demands=False)
        )
        world.cluster.start_scheduler("s1")
        hosts = list(world.cluster.schedulers.values())
        while not all(host.epoch for host in hosts):
            world.step()
        epochs = [host.epoch for host in hosts]
        for _ in range(2_500):
            world.step()
        world.heal()
        if [host.epoch for host in hosts] == epochs:
            crashes += world.record.sometimes["crash of c"]
            earlier, later = sorted(hosts, key=lambda host: host.epoch)
            assert counted_by(earlier) == served_by(later)
            served = served_by(earlier)
            assert all(count >= served[tenant] // 2 for tenant, count in counted_by(later).items())
    assert crashes > 5
