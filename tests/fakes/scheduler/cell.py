"""Several scheduler cores at one index core, driven by hand: what they say of their tenants travels, nothing else does.

A planner's link is there or not. While it is not, what the cache service says to it is lost, and what the planner had
posted may be lost or may have arrived; the next attachment is a fresh one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from coppice.ids import CacheEpoch, SchedulerEpoch
from coppice.messages.cell import CELL_TICK_MS, Planners, Served, ServedElsewhere
from coppice.messages.index import ToClient
from coppice_cache.core.base.results import ToClientEffect
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_cache.core.index import IndexCore
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.state.settings import SchedulerSettings, TenantLimits

MS = 1_000_000
TICK_NS = CELL_TICK_MS * MS


@dataclass
class Planner:
    core: SchedulerCore
    epoch: SchedulerEpoch = SchedulerEpoch(0)
    is_up: bool = False  # its link
    said: list[Served] = field(default_factory=list)
    heard: list[ToClient] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)  # tokens, by tenant
    told: Counter[str] = field(default_factory=Counter)  # of these, when it told its sums last
    was_there: Counter[str] = field(default_factory=Counter)  # tokens that others had told when it started

    @property
    def life(self) -> Lifecycle:
        return self.core._life

    @property
    def elsewhere(self) -> list[ServedElsewhere]:
        return [message for message in self.heard if isinstance(message, ServedElsewhere)]


class Cell:
    def __init__(self, *names: str, **limits: TenantLimits) -> None:
        self.now_ns = 0
        self.limits = limits
        self.cache = self._start_cache(1)
        self.planners: dict[str, Planner] = {}
        self.gone = Counter[str]()  # tokens that planners served which are gone
        for name in names:
            self.start(name)

    def __getitem__(self, name: str) -> Planner:
        return self.planners[name]

    def _start_cache(self, epoch: int) -> IndexCore:
        settings = CoreSettings(seal_key=b"k" * 16, default_domain=DomainConfig("any"))  # type: ignore[arg-type]
        return IndexCore(settings, CacheEpoch(epoch), self.now_ns)

    # --- planners and sessions

    def start(self, name: str) -> Planner:
        settings = SchedulerSettings(instance=b"instance", max_running=8, max_step_tokens=64, tenants=self.limits)
        there = sum((planner.told for planner in self.planners.values()), self.gone.copy())
        self.planners[name] = Planner(SchedulerCore(settings), was_there=there)
        self.attach(name)
        return self.planners[name]

    def attach(self, name: str, *, fresh: bool = True) -> None:
        planner = self.planners[name]
        planner.is_up = True
        if fresh:
            planner.epoch = self.cache.attach_client(planner.epoch, self.now_ns)
        planner.core.index_attached(planner.epoch, self.cache.cache_epoch, fresh, self.now_ns)
        self.carry()

    def lose(self, name: str, *, arrives: bool = True) -> None:
        """Its link; `arrives`: what it posted last is there all the same."""
        planner = self.planners[name]
        if arrives:
            self._hear(planner)
        else:
            planner.core.advance(self.now_ns)
        planner.is_up = False
        planner.core.index_lost(self.now_ns)
        self.carry()

    def die(self, name: str) -> None:
        """The process ends, and the cache service hears of it."""
        planner = self.planners.pop(name)
        self.gone += planner.served
        self.cache.end_client(planner.epoch, self.now_ns)
        self.carry()

    def expire(self, name: str) -> None:
        """Its session ends while the process lives."""
        self.cache.end_client(self.planners[name].epoch, self.now_ns)
        self.lose(name)
        self.attach(name)

    def restart_cache(self, *names: str) -> None:
        """These planners attach again, in this order; the others have lost it."""
        for planner in self.planners.values():
            planner.is_up = False
            planner.core.index_lost(self.now_ns)
        self.cache = self._start_cache(self.cache.cache_epoch + 1)
        for name in names or self.planners:
            self.attach(name)

    # --- what tenants do

    def serve(self, name: str, tenant: str, num_tokens: int) -> None:
        """So many tokens of prefill, of a request with a prompt as long."""
        planner = self.planners[name]
        number = planner.life.shares.number_of(tenant)
        planner.life.shares.charge(number, num_tokens)
        planner.life.rate_limits.charge(tenant, num_tokens, self.now_ns)
        planner.life.own_sums.charge(number, num_tokens)
        planner.served[tenant] += num_tokens

    def come(self, name: str, tenant: str, count: int = 1) -> None:
        """So many requests are at work from now on; below 0: fewer."""
        shares = self.planners[name].life.shares
        for _ in range(abs(count)):
            (shares.come if count > 0 else shares.go)(shares.number_of(tenant))

    # --- time and messages

    def pass_ms(self, ms: float) -> None:
        self.now_ns += int(ms * MS)
        self.carry()

    def tick(self, count: int = 1) -> None:
        """Until what changed has been told, and heard."""
        for _ in range(count):
            self.carry()
            self.now_ns = (self.now_ns // TICK_NS + 1) * TICK_NS
            self.carry()

    def carry(self) -> None:
        for planner in self.planners.values():
            self._hear(planner)
        for effect in self.cache.take_effects():
            if isinstance(effect, ToClientEffect):
                self._tell(effect)

    def _hear(self, planner: Planner) -> None:
        for message in planner.core.advance(self.now_ns).to_index:
            if planner.is_up and isinstance(message, Served):
                planner.said.append(message)
                planner.told = planner.served.copy()
                self.cache.receive_client(planner.epoch, message, self.now_ns)

    def _tell(self, effect: ToClientEffect) -> None:
        for planner in self.planners.values():
            if (
                planner.epoch == effect.epoch
                and planner.is_up
                and isinstance(effect.message, Planners | ServedElsewhere)
            ):
                planner.heard.append(effect.message)
                planner.core.index_message(effect.message, self.now_ns)

    # --- what must hold

    def num_elsewhere(self, name: str, tenant: str) -> int:
        return self.planners[name].life.shares.num_elsewhere(tenant)

    def num_at_work(self, name: str, tenant: str) -> int:
        life = self.planners[name].life
        return life.elsewhere.num_at_work(life.shares.find(tenant))

    def served_by_others(self, name: str) -> Counter[str]:
        """And was not told when this one started."""
        others = sum((other.served for key, other in self.planners.items() if key != name), self.gone.copy())
        return others - self.planners[name].was_there
