"""Non-interference: what a strict domain is told is a function of its own ops, its own time and its configuration.

The same script is played twice: once with everybody in it, once with the strict domain alone. Its answers must be equal
in every word, retry hints and wakes included. Block numbers and generations say where something lies, not what became
of it; of those the counts are compared.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from coppice.ids import DomainId, SchedulerEpoch, WorkerId
from coppice.messages.index import (
    Abandon,
    Acquire,
    Answer,
    Candidate,
    Distrust,
    Extend,
    Extended,
    Grant,
    Publish,
    Published,
    Release,
    Wake,
)
from coppice.messages.registration import CopiesDone, CopyOrders, Fence, FenceAck
from coppice.messages.reuse import Reuse
from coppice_cache.core.base.results import ToClientEffect, ToWorkerEffect
from coppice_cache.core.base.settings import Mode
from coppice_cache.core.index import IndexCore
from tests.unit.cache.stand import BLOCK, CAPPED, CONFIG, DOMAINS, POOLS, SPACES, STRICT, prompt
from tests.unit.cache.world import MS, World, lease_id, registration

Script = list[tuple[str, DomainId, dict[str, Any]]]
SPACE = SPACES[0]


def script(seed: int, length: int) -> Script:
    """Moves of all domains, drawn once: what is drawn does not depend on what happens."""
    rng = Random(seed)
    moves: Script = []
    kinds = (
        ["acquire"] * 5 + ["publish"] * 4 + ["extend", "end", "end", "distrust", "invalidate", "pin", "unpin", "tick"]
    )
    for number in range(1, length):
        data = prompt(rng.randrange(1, 14), rng.choice([1, 3, 4, 5, 7, 8, 99, 99]), rng.randrange(2))
        drawn = {"number": number, "data": data, "which": rng.randrange(1 << 12), "more": rng.randrange(6)}
        moves.append((rng.choice(kinds), rng.choice((STRICT, STRICT, CAPPED, *DOMAINS)), drawn))
    return moves


def told(answer: Answer) -> object:
    """The answer without places."""
    if isinstance(answer, Grant):
        places = len(answer.shared), answer.shared_seals, len(answer.owned), len(answer.zero), answer.copy_seal
        return "grant", answer.lease_id, answer.worker_id, answer.num_cached_tokens, places, answer.num_copy_tokens
    if isinstance(answer, Extended):
        return "extended", answer.lease_id, answer.first_block, len(answer.owned), len(answer.zero)
    if isinstance(answer, Published):
        return "published", answer.lease_id, answer.num_published_blocks, len(answer.handles), answer.seals
    return answer


class Player:
    """Plays the moves of some domains; those of the others only let time pass."""

    def __init__(self, domains: tuple[DomainId, ...]) -> None:
        self.domains = domains
        self.now_ns = 1_000 * MS
        self.core: IndexCore = World(CONFIG).core
        for name, (num_blocks, num_host_blocks, num_disk_blocks) in POOLS.items():
            message = registration(name, num_blocks=num_blocks, block_size=BLOCK)
            below = {"num_host_blocks": num_host_blocks, "num_disk_blocks": num_disk_blocks}
            self.core.receive_worker(name, msgspec.structs.replace(message, **below), self.now_ns)
        epochs = {domain: self.core.attach_client(SchedulerEpoch(0), self.now_ns) for domain in DOMAINS}
        self.epochs = epochs
        self.core.take_effects()
        self.leases: dict[DomainId, dict[bytes, tuple[Acquire, Grant, list[int]]]] = {domain: {} for domain in DOMAINS}
        self.heard: list[object] = []  # by the strict domain

    def play(self, moves: Script) -> list[object]:
        for kind, domain, drawn in moves:
            self.now_ns += 7 * MS
            if kind == "tick":
                self.tick(drawn["which"])
            elif domain in self.domains:
                getattr(self, kind)(domain, **drawn)
            self.deliver()
        return self.heard

    def note(self, domain: DomainId, what: object) -> None:
        if domain == STRICT:
            self.heard.append(what)

    def do(self, domain: DomainId, op: Any) -> Answer:
        answer = self.core.execute(self.epochs[domain], op, self.now_ns)
        self.note(domain, told(answer))
        return answer

    def acquire(self, domain: DomainId, number: int, data: bytes, which: int, more: int) -> None:
        both = (Candidate(WorkerId("w"), which % 5), Candidate(WorkerId("v"), which % 3))
        flags = {"may_wait": which & 1 == 1, "wants_copy": which & 2 == 2, "skip_match": which % 9 == 8}
        said = {"reuse": tuple(Reuse)[which % 3], "call_kind": which % 17}
        op = Acquire(
            lease_id(number), domain, SPACE, data, len(data) // 4 + more, both[: 1 + which % 2], **said, **flags
        )
        answer = self.do(domain, op)
        if isinstance(answer, Grant):
            self.leases[domain][op.lease_id] = (op, answer, [answer.num_cached_tokens // BLOCK])

    def one(self, domain: DomainId, which: int) -> tuple[Acquire, Grant, list[int]] | None:
        leases = list(self.leases[domain].values())
        return leases[which % len(leases)] if leases else None

    def publish(self, domain: DomainId, number: int, data: bytes, which: int, more: int) -> None:
        found = self.one(domain, which)
        if found is not None:
            op, _, settled = found
            tokens = op.tokens[4 * BLOCK * settled[0] : len(op.tokens) // (4 * BLOCK) * 4 * BLOCK]
            if tokens:
                answer = self.do(domain, Publish(op.lease_id, settled[0], tokens))
                settled[0] = answer.num_published_blocks if isinstance(answer, Published) else settled[0]

    def extend(self, domain: DomainId, number: int, data: bytes, which: int, more: int) -> None:
        found = self.one(domain, which)
        if found is not None:
            self.do(domain, Extend(found[0].lease_id, found[0].reserve_tokens + more))

    def end(self, domain: DomainId, number: int, data: bytes, which: int, more: int) -> None:
        found = self.one(domain, which)
        if found is not None:
            del self.leases[domain][found[0].lease_id]
            self.do(domain, Abandon(found[0].lease_id) if which % 4 == 0 else Release(found[0].lease_id))

    def distrust(self, domain: DomainId, number: int, data: bytes, which: int, more: int) -> None:
        found = self.one(domain, which)
        if found is not None:
            self.do(domain, Distrust(found[0].lease_id, found[1].shared[-8:]))

    def invalidate(self, domain: DomainId, number: int, data: bytes, which: int, more: int) -> None:
        tokens = data if which % 2 and len(data) >= 4 * BLOCK else None
        count = self.core.invalidate(now_ns=self.now_ns, domain=domain, namespace=SPACE, tokens=tokens)
        self.note(domain, ("invalidated", count))

    def pin(self, domain: DomainId, number: int, data: bytes, which: int, more: int) -> None:
        self.core.unpin(f"{domain} {which % 2}", self.now_ns)
        self.note(domain, self.core.pin(f"{domain} {which % 2}", domain, SPACE, data, self.now_ns))

    def unpin(self, domain: DomainId, number: int, data: bytes, which: int, more: int) -> None:
        self.note(domain, self.core.unpin(f"{domain} {which % 2}", self.now_ns))

    def tick(self, which: int) -> None:
        self.now_ns += (100, 300, 900)[which % 3] * MS
        for epoch in self.epochs.values():
            self.core.heard_client(epoch, self.now_ns)
        for worker_id in POOLS:
            self.core.heard_worker(worker_id, self.now_ns)
        self.core.tick(self.now_ns)

    def deliver(self) -> None:
        """Workers answer at once; the strict domain hears of its wakes."""
        for effect in self.core.take_effects():
            if isinstance(effect, ToClientEffect) and effect.epoch == self.epochs[STRICT]:
                if isinstance(effect.message, Wake):
                    self.note(STRICT, ("woken", effect.message.lease_ids))
            elif isinstance(effect, ToWorkerEffect):
                message = effect.message
                if isinstance(message, Fence):
                    ack = FenceAck(message.fence_id, message.worker_epoch)
                    self.core.receive_worker(effect.worker_id, ack, self.now_ns)
                elif isinstance(message, CopyOrders):
                    ids = tuple(order.order_id for order in message.orders)
                    self.core.receive_worker(effect.worker_id, CopiesDone(message.worker_epoch, ids), self.now_ns)
        self.core.check()
        self.core.take_events()


def heard(seed: int, domains: tuple[DomainId, ...]) -> list[object]:
    return Player(domains).play(script(seed, 150))


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.wide) for first in (10, 20, 30))])
def test_a_strict_domain_hears_the_same_with_and_without_the_others(first: int) -> None:
    for seed in range(first, first + 10):
        alone = heard(seed, (STRICT,))
        assert heard(seed, DOMAINS) == alone
        assert len(alone) > 20


def test_a_private_domain_feels_the_load_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: without its mode the same domain hears something else."""
    private = tuple(replace(config, mode=Mode.PRIVATE) for config in CONFIG.domains)
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", replace(CONFIG, domains=private))
    assert any(heard(seed, DOMAINS) != heard(seed, (STRICT,)) for seed in range(5))
