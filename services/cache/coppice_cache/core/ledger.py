"""Block ledger of one worker: every block is in exactly one state, and one method moves it.

    FREE --grant--> LEASED --publish--> CACHED --evict--> FREE
                      |
                      |--release--> FREE
                      `--drain--> DRAINING --fence acknowledged--> FREE

The free list is first in, first out, so that a generation that went wrong has the longest time to be noticed. A block
whose counter is used up in this cache epoch stays FREE but is not in the list: it is never granted again.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from struct import pack, unpack

from coppice.handles import BLOCK_BITS, BLOCKS_MAX, COUNTER_MAX, HANDLE_BYTES, epoch_of, make_generation
from coppice.ids import CacheEpoch, DomainId, Generation
from coppice.seals import NO_SEAL, SEAL_BYTES
from coppice_cache.core.quotas import DomainUse
from coppice_cache.core.settings import DomainConfig, Mode


class BlockState(IntEnum):
    FREE = 0
    LEASED = 1
    CACHED = 2
    DRAINING = 3


_FREE, _LEASED, _CACHED, _DRAINING = BlockState

# Stand-ins for the last domain of a block; no client can name either.
_NOBODY = DomainConfig(DomainId(""))  # never granted
_UNKNOWN = DomainConfig(DomainId("\0unknown"))  # granted by an earlier cache epoch


def unpack_handles(packed: bytes | bytearray) -> tuple[int, ...]:
    return unpack(f"<{len(packed) // HANDLE_BYTES}Q", packed)


def unpack_blocks(packed: bytes | bytearray) -> list[int]:
    return [handle & (BLOCKS_MAX - 1) for handle in unpack_handles(packed)]


@dataclass(frozen=True, slots=True)
class Granted:
    """Handles of newly leased blocks, and those among them that must be zeroed first (I15)."""

    owned: bytes
    zero: bytes


class Ledger:
    """State, generation, seal and last domain of each block."""

    def __init__(self, num_blocks: int, cache_epoch: CacheEpoch, *, any_wipes: bool) -> None:
        self.num_blocks = num_blocks
        self.cache_epoch = cache_epoch
        self.state = bytearray(num_blocks)
        self.generation = array("Q", bytes(8 * num_blocks))
        self.seals = bytearray(SEAL_BYTES * num_blocks)
        self._nobody = DomainUse(_NOBODY, 0)
        self.unknown = DomainUse(_UNKNOWN, 0)
        self.last_use = [self._nobody] * num_blocks
        # Blocks to be zeroed by a lease that did not publish them since: it may have ended before it told the worker.
        self._zeroing = bytearray(num_blocks)
        self.counts = [num_blocks, 0, 0, 0]
        self.free: deque[int] = deque(range(num_blocks))
        self.checked = self.generation[:]  # generations at the last check (I4)
        self._any_wipes = any_wipes

    @property
    def num_free(self) -> int:
        """Blocks that can be granted; leaves out those whose counter is used up."""
        return len(self.free)

    def load(self, generations: bytes, seals: bytes) -> None:
        """Take over what a worker reports of a pool that was used before."""
        self.generation = array("Q", unpack(f"<{self.num_blocks}Q", generations))
        self.seals = bytearray(seals)
        for block, generation in enumerate(self.generation):
            if generation:
                self.last_use[block] = self.unknown
        self.free = deque(block for block in range(self.num_blocks) if not self.is_used_up(block))

    def close(self) -> None:
        """Rule 3: nothing is known of who uses what, so every block drains."""
        assert self.counts[_FREE] == self.num_blocks
        self.last_use = [self.unknown] * self.num_blocks
        for block in range(self.num_blocks):
            self._move(block, _DRAINING)
        self.free.clear()

    def handle(self, block: int) -> int:
        return (self.generation[block] << BLOCK_BITS) | block

    def seal(self, block: int) -> bytes:
        return bytes(self.seals[block * SEAL_BYTES : (block + 1) * SEAL_BYTES])

    def set_seal(self, block: int, seal: bytes) -> None:
        self.seals[block * SEAL_BYTES : (block + 1) * SEAL_BYTES] = seal

    def grant(self, use: DomainUse, count: int) -> Granted:
        """Lease `count` free blocks under new generations."""
        owned, zero = [], []
        for _ in range(count):
            block = self.free.popleft()
            before = self.generation[block]
            if epoch_of(Generation(before)) == self.cache_epoch:
                after = Generation(before + 1)
            else:
                after = make_generation(self.cache_epoch, 1)
            assert after > before, "the cache epoch is not above the block's (I4)"
            self.generation[block] = after
            self.set_seal(block, NO_SEAL)
            handle = (after << BLOCK_BITS) | block
            if self._zeroing[block] or self._must_zero(self.last_use[block], use):
                self._zeroing[block] = True
                zero.append(handle)
            self.last_use[block] = use
            self._move(block, _LEASED)
            owned.append(handle)
        return Granted(pack(f"<{len(owned)}Q", *owned), pack(f"<{len(zero)}Q", *zero))

    def publish(self, block: int, seal: bytes) -> None:
        assert self.state[block] == _LEASED
        self.set_seal(block, seal)
        self._zeroing[block] = False  # it was written under its generation, and zeroed before that
        self._move(block, _CACHED)

    def drain(self, block: int) -> None:
        """LEASED -> DRAINING; a block that drains already stays so."""
        assert self.state[block] in (_LEASED, _DRAINING)
        self._move(block, _DRAINING)

    def undrain(self, block: int) -> None:
        """A live holder is left, or was found after a restart."""
        assert self.state[block] in (_LEASED, _DRAINING)
        self._move(block, _LEASED)

    def adopt(self, block: int, generation: int, use: DomainUse) -> None:
        """A claim on a block of the closed ledger was accepted (rule 4)."""
        assert self.state[block] in (_LEASED, _DRAINING)
        assert generation >= self.generation[block]
        self._move(block, _DRAINING)
        self.last_use[block].draining -= 1
        if generation > self.generation[block]:
            self.generation[block] = generation
            self.set_seal(block, NO_SEAL)
        # Whether the claimant has zeroed it, of whatever was there before, is not known here.
        self._zeroing[block] = self._any_wipes
        self.last_use[block] = use
        use.draining += 1
        self._move(block, _LEASED)

    def put_free(self, block: int) -> None:
        """From any other state; the block is granted again last."""
        assert self.state[block] != _FREE
        self._move(block, _FREE)
        if not self.is_used_up(block):
            self.free.append(block)

    def is_used_up(self, block: int) -> bool:
        generation = Generation(self.generation[block])
        return epoch_of(generation) == self.cache_epoch and generation & COUNTER_MAX == COUNTER_MAX

    def _must_zero(self, before: DomainUse, after: DomainUse) -> bool:
        if after.config.mode is Mode.STRICT:
            return True
        if before is self._nobody:
            return False
        if before is self.unknown:
            return self._any_wipes
        return before.config.domain != after.config.domain and (before.config.wipes or after.config.wipes)

    def _move(self, block: int, to: BlockState) -> None:
        """The only place that changes a state; keeps the totals and the account of the block's domain."""
        use = self.last_use[block]
        came_from = self.state[block]
        self.counts[came_from] -= 1
        self.counts[to] += 1
        self.state[block] = to
        if came_from == _LEASED:
            use.leased -= 1
        elif came_from == _CACHED:
            use.cached -= 1
        elif came_from == _DRAINING:
            use.draining -= 1
        if to == _LEASED:
            use.leased += 1
        elif to == _CACHED:
            use.cached += 1
        elif to == _DRAINING:
            use.draining += 1
