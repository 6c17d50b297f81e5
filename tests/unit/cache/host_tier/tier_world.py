"""A world whose worker has a host tier, maybe a disk tier too, and how its orders to copy are read and answered."""

from __future__ import annotations

from msgspec.structs import replace as changed

from coppice.ids import DomainId
from coppice.messages.index import Acquire, Answer, Candidate
from coppice.messages.registration import CopiesDone, CopyOrder, CopyOrders
from coppice_cache.core.base.results import ToWorkerEffect
from coppice_cache.core.base.settings import DomainConfig, TierCosts
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, lease_id, registration, settings, tokens

BLOCK = 4
PROMPT = tokens(16)  # four blocks
CHEAP = TierCosts(prefill_us_per_token=100.0, copy_us_per_block=1.0, order_us=10.0)


def world(*domains: DomainConfig, num_blocks: int = 8, host: int = 16, disk: int = 0, **changes: object) -> World:
    """A small device pool that is to be kept half free, a host pool, and maybe one on a disk."""
    values: dict[str, object] = {"tiers": CHEAP, "demote_below_share": 0.5, "flight_tokens_min": 4} | changes
    here = World(settings(*domains, **values))
    message = registration(num_blocks=num_blocks, block_size=BLOCK)
    message = changed(message, num_host_blocks=host, host_generations=bytes(8 * host), host_seals=bytes(16 * host))
    here.register(changed(message, num_disk_blocks=disk, disk_generations=bytes(8 * disk), disk_seals=bytes(16 * disk)))
    here.session = here.attach()
    return here


def orders(here: World) -> list[CopyOrder]:
    """All that went out so far."""
    sent = [effect.message for effect in here.log if isinstance(effect, ToWorkerEffect)]
    return [order for message in sent if isinstance(message, CopyOrders) for order in message.orders]


def answer(here: World, order: CopyOrder, *, failed: bool = False) -> None:
    ids = (order.order_id,)
    worker = here.core.state.workers[W]
    done = CopiesDone(worker.epoch, () if failed else ids, ids if failed else ())
    here.core.receive_worker(W, done, here.now_ns)
    here.collect()


def measured(here: World, **costs: int) -> None:
    """The worker's word on its costs."""
    here.core.receive_worker(W, CopiesDone(here.core.state.workers[W].epoch, **costs), here.now_ns)
    here.collect()


def ask(here: World, number: int, data: bytes = PROMPT + tokens(1, 99), *, domain: DomainId = ALICE) -> Answer:
    op = Acquire(lease_id(number), domain, NAMESPACE, data, len(data) // 4, (Candidate(W, 0),), may_wait=True)
    return here.do(op)


def host_blocks(here: World) -> list[int]:
    """Counts by state: free, leased, cached, draining."""
    host = here.core.state.workers[W].host
    assert host is not None
    return list(host.store.ledger.counts)


def push_out(here: World) -> None:
    """What was on the device has to go."""
    for number in (90, 91):
        here.fill(number, tokens(24, 1_000 * number))
    assert here.core.match(ALICE, NAMESPACE, PROMPT + tokens(1, 99), W).num_cached_tokens == 0


def demoted() -> World:
    """PROMPT is in the host tier, and on the device no more; nothing else is demoted from here on."""
    here = world()
    here.fill(1, PROMPT)
    here.fill(2, tokens(4, 500))
    here.tick()
    for order in orders(here):
        answer(here, order)
    object.__setattr__(here.core.state.settings, "demote_below_share", 0.0)
    push_out(here)
    return here
