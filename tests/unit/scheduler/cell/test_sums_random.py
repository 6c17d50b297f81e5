"""Whatever happens to sessions: nothing that others served counts twice, and nothing is missed where all lived on."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coppice_scheduler.core.cell.columns import rows_of
from coppice_scheduler.core.cell.elsewhere import AT_WORK_LASTS_MS
from tests.fakes.scheduler.cell import Cell

TENANTS = ("x", "y", "z")
tenants = st.sampled_from(TENANTS)
names = st.sampled_from(("a", "b", "c"))


class CellMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.cell = Cell("a", "b", "c")
        self.cell.tick()
        self.all_lived = True

    @rule(name=names, tenant=tenants, num_tokens=st.integers(1, 1_000))
    def serve(self, name: str, tenant: str, num_tokens: int) -> None:
        self.cell.serve(name, tenant, num_tokens)

    @rule(name=names, tenant=tenants, count=st.integers(1, 3))
    def come(self, name: str, tenant: str, count: int) -> None:
        self.cell.come(name, tenant, count)

    @rule(name=names, tenant=tenants)
    def go(self, name: str, tenant: str) -> None:
        shares = self.cell[name].life.shares
        if shares.num_at_work(shares.number_of(tenant)):
            self.cell.come(name, tenant, -1)

    @rule(ms=st.sampled_from((1.0, 40.0, 100.0, 700.0, 11_000.0)))
    def wait(self, ms: float) -> None:
        self.cell.pass_ms(ms)

    @rule(name=names, arrives=st.booleans())
    def lose(self, name: str, arrives: bool) -> None:
        if self.cell[name].is_up:
            self.cell.lose(name, arrives=arrives)

    @rule(name=names)
    def attach(self, name: str) -> None:
        if not self.cell[name].is_up:
            self.cell.attach(name)

    @rule(order=st.permutations(("a", "b", "c")), count=st.integers(0, 3))
    def restart_cache(self, order: tuple[str, ...], count: int) -> None:
        self.cell.restart_cache(*order[:count]) if count else self.cell.restart_cache("a")

    @rule(name=names)
    def expire(self, name: str) -> None:
        """What was told to a session that ended before it was heard is lost."""
        self.all_lived = False
        self.cell.expire(name)

    @rule(name=names)
    def replace(self, name: str) -> None:
        self.all_lived = False
        self.cell.die(name)
        self.cell.start(name)

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        for name in self.cell.planners:
            truth = self.cell.served_by_others(name)
            assert all(self.cell.num_elsewhere(name, tenant) <= truth[tenant] for tenant in TENANTS)

    def teardown(self) -> None:
        if not hasattr(self, "cell"):
            return
        cell = self.cell
        for name, planner in cell.planners.items():
            if not planner.is_up:
                cell.attach(name)
        cell.pass_ms(AT_WORK_LASTS_MS)  # of whoever died while the cache service did not know it
        cell.tick(2)
        self.nothing_is_counted_twice()
        for name, planner in cell.planners.items():
            others = [other for other in cell.planners.values() if other is not planner]
            for other in others:
                self.is_known(planner.life, other)
            for tenant in TENANTS:
                at_work = sum(o.life.shares.num_at_work(o.life.shares.number_of(tenant)) for o in others)
                assert cell.num_at_work(name, tenant) == at_work
                if self.all_lived:
                    assert cell.num_elsewhere(name, tenant) == cell.served_by_others(name)[tenant]

    @staticmethod
    def is_known(life: object, other: object) -> None:
        """What is heard of another planner is what that one has."""
        sums = life.elsewhere.sums_of(other.epoch)  # type: ignore[attr-defined]
        for tenant, own in other.life.own_sums.by_tenant().items():  # type: ignore[attr-defined]
            heard = sums[life.shares.find(tenant)]  # type: ignore[attr-defined]
            assert heard.tolist() == rows_of((own,))[0].tolist()


CellMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestCell = CellMachine.TestCase
