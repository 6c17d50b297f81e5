"""Regrowth at random: whatever is lost of the log, nothing stale is found, and leases go on."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from coppice.messages.index import Grant, Publish, Published
from coppice_cache.core.base.events import IndexEvent
from tests.unit.cache.crash import After, Before, found
from tests.unit.cache.world import MS, lease_id, tokens


class Busy(Before):
    def __init__(self, seed: int) -> None:
        super().__init__(num_blocks=48)
        self.rng = Random(seed)
        self.prompts: dict[int, bytes] = {}
        self.published: dict[int, int] = {}
        self.number = 0
        for _ in range(self.rng.randrange(5, 60)):
            self._something()
            self.all_events()

    def _something(self) -> None:
        rng = self.rng
        roll = rng.random()
        if roll < 0.45 or not self.prompts:
            self.number += 1
            prompt = tokens(4 * rng.randrange(1, 4)) + tokens(4 * rng.randrange(3), rng.choice((500, 600))) + tokens(4)
            prompt += tokens(rng.randrange(5), rng.randrange(1000, 1100))
            answer = self.acquire(self.number, prompt, reserve=len(prompt) // 4 + 8)
            if isinstance(answer, Grant):
                self.prompts[self.number] = prompt + tokens(8, 2000 + self.number)
                self.published[self.number] = answer.num_cached_tokens // 4
        elif roll < 0.8:
            number = rng.choice(list(self.prompts))
            first, last = self.published[number], len(self.prompts[number]) // 16
            if first < last:
                count = rng.randrange(1, last - first + 1)
                answer = self.publish(number, first, self.prompts[number][16 * first : 16 * (first + count)])
                assert isinstance(answer, Published), answer
                self.published[number] += count
        else:
            number = rng.choice(list(self.prompts))
            del self.prompts[number]
            self.release(number)
        self.now_ns += MS


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_lost_nothing_stale_is_found_and_leases_go_on(seed: int) -> None:
    before = Busy(seed)
    rng = before.rng
    events: list[IndexEvent] = before.all_events()
    if rng.random() < 0.6:
        events = events[: rng.randrange(len(events) + 1)]
    generations, seals = before.arrays()
    for block in range(48):
        if rng.random() < 0.05:
            seals[block] = 0  # the scheduler has not told the worker of its publication yet
    claims = tuple(c for c in before.claims() if _is_sealed(c.shared, seals))
    later, later_seals = generations.copy(), seals.copy()
    held = {h & 0xFFFFFF for c in claims for h in np.frombuffer(c.shared + c.owned, "<u8").tolist()}
    for block in range(48):
        if block not in held and rng.random() < 0.05:
            later[block], later_seals[block] = later[block] + 1, 0
    after = After(before, events, claims=claims, arrays=(generations, seals), second=(later, later_seals)).open()
    now = after.check_against_the_worker()
    if events is before.events and (seals == before.arrays()[1]).all() and (later == generations).all():
        assert now == found(before), "all of it is back"
    for number, prompt in before.prompts.items():
        if lease_id(number) not in after.settled:
            continue
        first, last = after.settled[lease_id(number)], before.published[number]
        if first < last:
            answer = after.do(Publish(lease_id(number), first, prompt[16 * first : 16 * last]))
            assert isinstance(answer, Published), answer
            assert answer.num_published_blocks == last
    for claim in claims:
        after.release(int.from_bytes(claim.lease_id, "big"))
    stats = after.core.stats()
    assert stats.leases == stats.pins == stats.leased_blocks == stats.draining_blocks == 0
    assert stats.cached_blocks == len(found(after))


def _is_sealed(shared: bytes, seals: np.ndarray) -> bool:
    return all(seals[h & 0xFFFFFF].any() for h in np.frombuffer(shared, "<u8").tolist())
