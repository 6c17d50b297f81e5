"""What the host tier keeps of prompts that come back after bursts of others, counted in the cache service's core.

    python -m benchmarks.cache.host_tier [--host-blocks 16384] [--rounds 6] [--json]

Virtual time and a fixed seed: the same on every machine. Conversations come in bursts, each again after all others have
come. They need three times the device's blocks, and the host tier has room for all unless told; the link between the
two copies one block after the other. `found` is the share of their history that was in either tier when they came back,
1 where nothing was lost; `waited_ms` what a request waited for room, in the mean.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

from msgspec.structs import replace

from coppice.handles import HANDLE_BYTES
from coppice.ids import TOKEN_BYTES, CacheEpoch, DomainId, LeaseId, SchedulerEpoch
from coppice.messages.index import Acquire, Candidate, Grant, NoCapacity, Publish, Release, Wake
from coppice.messages.registration import CopiesDone, CopyOrder, CopyOrders
from coppice_bench.index.shape import random_tokens
from coppice_bench.report import describe_run, note, print_report
from coppice_bench.rpc.client import NAMESPACE, WORKER, registration
from coppice_cache.core.base.results import ToClientEffect, ToWorkerEffect
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_cache.core.index import IndexCore

NUM_BLOCKS = 4_096
NUM_HOST_BLOCKS = 4 * NUM_BLOCKS  # unless told
BLOCK_SIZE = 16
HISTORY_TOKENS = (768, 2_304)
NUM_CONVERSATIONS = 3 * NUM_BLOCKS * BLOCK_SIZE * 2 // sum(HISTORY_TOKENS)
QUESTION_TOKENS, ANSWER_TOKENS = 32, 64
MS = 1_000_000
TICK_NS = 100 * MS
COPY_NS_PER_BLOCK = 40_000
ORDER_NS = 500_000  # from an order until its copy may begin, and from its end until that is known
HOLD_NS = 400 * MS  # of a lease: prefill and decode
RETRY_NS = 5 * MS
SEED = 1
BURSTS = {"one by one": (1, 25), "bursts of 8": (8, 200), "bursts of 16": (16, 400), "bursts of 32": (32, 800)}
DOMAIN = DomainId("bench")


class Link:
    """Copies what is ordered, one order after the other."""

    def __init__(self) -> None:
        self.free_ns = 0
        self.num_blocks = 0

    def ends_ns(self, order: CopyOrder, now_ns: int) -> int:
        num_blocks = len(order.src) // HANDLE_BYTES
        self.num_blocks += num_blocks
        self.free_ns = max(self.free_ns, now_ns + ORDER_NS) + num_blocks * COPY_NS_PER_BLOCK
        return self.free_ns + ORDER_NS


class Run:
    """One load over one core."""

    def __init__(self, num_host_blocks: int) -> None:
        self.now_ns = 1
        settings = CoreSettings(b"k" * 32, default_domain=DomainConfig(DomainId("any")))
        self.core = IndexCore(settings, CacheEpoch(1), self.now_ns)
        message = registration(NUM_BLOCKS, BLOCK_SIZE)
        host = {"host_generations": bytes(8 * num_host_blocks), "host_seals": bytes(16 * num_host_blocks)}
        self.core.receive_worker(WORKER, replace(message, num_host_blocks=num_host_blocks, **host), self.now_ns)
        self.session = self.core.attach_client(SchedulerEpoch(0), self.now_ns)
        self.core.take_effects()
        self.epoch = self.core.state.workers[WORKER].epoch
        self.link = Link()
        self.source = random.Random(SEED)
        self.histories = [
            random_tokens(self.source, self.source.randint(*HISTORY_TOKENS)) for _ in range(NUM_CONVERSATIONS)
        ]
        self.seen: set[int] = set()
        self.come_ns: dict[LeaseId, int] = {}
        self.waits_ns: list[int] = []
        self.asked = self.found = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._woken: dict[LeaseId, Callable[[], None]] = {}
        self._leases = count(1)

    def at(self, when_ns: int, do: Callable[[], None]) -> None:
        heappush(self._events, (when_ns, next(self._order), do))

    def until(self, end_ns: int) -> None:
        self.at(self.now_ns, self._tick)
        while self._events and self._events[0][0] <= end_ns:
            self.now_ns, _, do = heappop(self._events)
            do()
            self._take_effects()

    def _tick(self) -> None:
        self.core.heard_worker(WORKER, self.now_ns)
        self.core.heard_client(self.session, self.now_ns)
        self.core.tick(self.now_ns)
        self.at(self.now_ns + TICK_NS, self._tick)

    def _take_effects(self) -> None:
        for effect in self.core.take_effects():
            if isinstance(effect, ToWorkerEffect) and isinstance(effect.message, CopyOrders):
                for order in effect.message.orders:
                    self.at(self.link.ends_ns(order, self.now_ns), partial(self._copied, order))
            elif isinstance(effect, ToClientEffect) and isinstance(effect.message, Wake):
                for lease_id in effect.message.lease_ids:
                    self.at(self.now_ns, self._woken.pop(lease_id))

    def _copied(self, order: CopyOrder) -> None:
        self.core.receive_worker(WORKER, CopiesDone(self.epoch, (order.order_id,)), self.now_ns)

    def come(self, conversation: int) -> None:
        prompt = self.histories[conversation] + random_tokens(self.source, QUESTION_TOKENS)
        reserve = len(prompt) // TOKEN_BYTES + ANSWER_TOKENS
        lease_id = LeaseId(next(self._leases).to_bytes(16, "big"))
        self.come_ns[lease_id] = self.now_ns
        op = Acquire(lease_id, DOMAIN, NAMESPACE, prompt, reserve, (Candidate(WORKER, 0),), may_wait=True)
        self._ask(op, conversation)

    def _ask(self, op: Acquire, conversation: int) -> None:
        answer = self.core.execute(self.session, op, self.now_ns)
        if isinstance(answer, Grant):
            self._granted(op, answer, conversation)
        elif isinstance(answer, NoCapacity):
            self.at(self.now_ns + RETRY_NS, lambda: self._ask(op, conversation))
        else:
            self._woken[op.lease_id] = lambda: self._ask(op, conversation)

    def _granted(self, op: Acquire, grant: Grant, conversation: int) -> None:
        history = len(self.histories[conversation]) // TOKEN_BYTES // BLOCK_SIZE * BLOCK_SIZE
        if conversation in self.seen:
            self.asked += history
            self.found += min(history, grant.num_cached_tokens)
            self.waits_ns.append(self.now_ns - self.come_ns.pop(op.lease_id))
        self.seen.add(conversation)
        self.at(self.now_ns + HOLD_NS, lambda: self._end(op))

    def _end(self, op: Acquire) -> None:
        answer = random_tokens(self.source, ANSWER_TOKENS)
        whole = (op.tokens + answer)[:-TOKEN_BYTES]
        block_bytes = BLOCK_SIZE * TOKEN_BYTES
        whole = whole[: len(whole) // block_bytes * block_bytes]
        self.core.execute(self.session, Publish(op.lease_id, 0, whole), self.now_ns)
        self.core.execute(self.session, Release(op.lease_id), self.now_ns)


def measure(size: int, every_ms: int, rounds: int, num_host_blocks: int) -> dict[str, float]:
    run = Run(num_host_blocks)
    turns = [number % NUM_CONVERSATIONS for number in range(rounds * NUM_CONVERSATIONS)]
    for burst, start in enumerate(range(0, len(turns), size)):
        for place, conversation in enumerate(turns[start : start + size]):
            when_ns = burst * every_ms * MS + place * MS // 4
            run.at(when_ns, partial(run.come, conversation))
    run.until((len(turns) // size + 10) * every_ms * MS)
    run.core.check()
    return {
        "found": round(run.found / run.asked, 4),
        "waited_ms": round(sum(run.waits_ns) / len(run.waits_ns) / MS, 2),
        "blocks_copied_per_request": round(run.link.num_blocks / len(turns), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="how often each conversation comes")
    parser.add_argument("--host-blocks", type=int, default=NUM_HOST_BLOCKS, help="of the host tier")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name, (size, every_ms) in BURSTS.items():
        note(name)
        found[name] = measure(size, every_ms, arguments.rounds, arguments.host_blocks)
    sizes = {"num_blocks": NUM_BLOCKS, "num_host_blocks": arguments.host_blocks, "conversations": NUM_CONVERSATIONS}
    print_report({"bench": "host_tier", **found, **sizes, **describe_run()}, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
