"""Block ledger of one worker: every block is in exactly one state, and one method moves it.

    FREE --grant--> LEASED --publish--> CACHED --evict--> FREE
                      |
                      |--release--> FREE
                      `--drain--> DRAINING --fence acknowledged--> FREE

The free list is first in, first out, so that a generation that went wrong has the longest time to be noticed. A block
whose counter is used up in this cache epoch stays FREE but is not in the list: it is never granted again.

Each column (state, generation, seal, owner) is one packed buffer, about 34 bytes per block in all. It is read and
written in two ways: as a Python buffer for single blocks, and through a numpy view of the same bytes for many at once.
numpy costs about a microsecond per call, and three where it is the first for a while, as between two messages; so
`_FEW` blocks are done one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from coppice.handles import (
    BLOCK_BITS,
    COUNTER_MAX,
    HANDLE_BYTES,
    UInt64,
)
from coppice.ids import CacheEpoch
from coppice.seals import NO_SEAL, SEAL_BYTES
from coppice_cache.core.base.settings import Mode
from coppice_cache.core.pool.block_time import BlockTime, CallTime
from coppice_cache.core.pool.free_ring import Blocks, FreeRing, blocks_array, unpack_blocks
from coppice_cache.core.pool.generations import Bool, are_of_epoch, below_first, is_of_epoch
from coppice_cache.core.pool.quotas import UNKNOWN_INDEX, Account, Owners


class BlockState(IntEnum):
    FREE = 0
    LEASED = 1
    CACHED = 2
    DRAINING = 3


_FREE, _LEASED, _CACHED, _DRAINING = map(int, BlockState)  # numpy takes plain integers in half the time
_FEW = 4  # blocks; measured: up to here plain integers are faster than numpy
_EPOCH_TOO_LOW = "the cache epoch is not above a block's (I4)"
_SEAL = np.dtype((np.void, SEAL_BYTES))  # copied as a whole: gathering rows of two words takes six times as long
_NO_SEAL = np.zeros(1, _SEAL)[0]
_ONE = np.uint64(1)
_BLOCK_BITS = np.uint64(BLOCK_BITS)
_COUNTER_MAX = np.uint64(COUNTER_MAX)


def are_current(ledger: Ledger, handles: bytes | bytearray) -> Bool:
    """Which handles carry the generation that the ledger has for their block."""
    claimed = np.frombuffer(handles, "<u8") >> _BLOCK_BITS
    current: Bool = ledger.generations[blocks_array(handles)] == claimed
    return current


@dataclass(frozen=True, slots=True)
class Granted:
    """Handles of newly leased blocks, and those among them that must be zeroed first (I15)."""

    owned: bytes
    zero: bytes


class Ledger:
    """State, generation, seal and last domain of each block.

    `states`, `generations` and `seal_words` ([n, 2]) are numpy views of the columns: to be read by others,
    written only here. Methods that take packed handles move all of their blocks; these belong to one account.
    """

    def __init__(
        self, num_blocks: int, cache_epoch: CacheEpoch, *, any_wipes: bool, call_time: CallTime | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.cache_epoch = cache_epoch
        self.state = bytearray(num_blocks)
        self.generation = array("Q", bytes(8 * num_blocks))
        self.seals = bytearray(SEAL_BYTES * num_blocks)
        self.owners = Owners(num_blocks)
        # Blocks to be zeroed by a lease that did not publish them since: it may have ended before it told the worker.
        self._zeroing = bytearray(num_blocks)
        self.states = np.frombuffer(self.state, np.uint8)
        self.generations: UInt64 = np.frombuffer(self.generation, np.uint64)
        self.seal_words: UInt64 = np.frombuffer(self.seals, np.uint64).reshape(-1, 2)
        self._whole_seals = np.frombuffer(self.seals, _SEAL)
        self._zeroings = np.frombuffer(self._zeroing, np.bool_)
        self.counts = [num_blocks, 0, 0, 0]
        self.block_time = BlockTime(self.counts, call_time or CallTime())
        self.free = FreeRing(np.arange(num_blocks), num_blocks)
        self.checked: UInt64 | None = None  # generations at the last check (I4)
        self.any_wipes = any_wipes  # may become true later; never false again
        self._num_foreign = num_blocks  # blocks that were not granted in this epoch

    @property
    def num_free(self) -> int:
        """Blocks that can be granted; leaves out those whose counter is used up."""
        return len(self.free)

    def load(self, generations: bytes, seals: bytes) -> None:
        """Take over what a worker reports of a pool that was used before."""
        self.generations[:] = np.frombuffer(generations, "<u8")
        self.seal_words[:] = np.frombuffer(seals, np.uint64).reshape(-1, 2)
        self.owners.indices[self.generations != 0] = UNKNOWN_INDEX
        self._num_foreign = int(np.count_nonzero(~are_of_epoch(self.generations, self.cache_epoch)))
        self.free = FreeRing(np.flatnonzero(~self._are_used_up(np.arange(self.num_blocks))), self.num_blocks)

    def close(self) -> None:
        """Rule 3: nothing is known of who uses what, so every block drains."""
        assert self.counts[_FREE] == self.num_blocks
        self.owners.indices[:] = UNKNOWN_INDEX
        self._move_all(np.arange(self.num_blocks), self.owners.unknown, _FREE, _DRAINING)
        self.free.clear()

    def open(self, held: Collection[int]) -> None:
        """The window's fence was acknowledged: what drains and is not held is free."""
        drains = self.states == _DRAINING
        drains[list(held)] = False
        for account in self.owners.uses_of(np.flatnonzero(drains)):
            blocks = np.flatnonzero(drains & (self.owners.indices == account.owner_index))
            self._move_all(blocks, account, _DRAINING, _FREE)
        self._list_free(np.flatnonzero(drains))

    # for checks

    def are_owned_by(self, account: Account, blocks: Blocks) -> Bool:
        known = self.owners.accounts[account.owner_index] is account
        owned: Bool = (self.owners.indices[blocks] == account.owner_index) & known
        return owned

    # one block

    def handle(self, block: int) -> int:
        return (self.generation[block] << BLOCK_BITS) | block

    def seal(self, block: int) -> bytes:
        return bytes(self.seals[block * SEAL_BYTES : (block + 1) * SEAL_BYTES])

    def set_seal(self, block: int, seal: bytes) -> None:
        self.seals[block * SEAL_BYTES : (block + 1) * SEAL_BYTES] = seal

    def drain(self, block: int) -> None:
        """LEASED -> DRAINING; a block that drains already stays so."""
        assert self.state[block] in (_LEASED, _DRAINING)
        self._move(block, _DRAINING)

    def undrain(self, block: int) -> None:
        """A live holder is left, or was found after a restart."""
        assert self.state[block] in (_LEASED, _DRAINING)
        self._move(block, _LEASED)

    def adopt(self, block: int, generation: int, account: Account) -> Account:
        """A claim on a block of the closed ledger was accepted (rule 4). Returns whose block it was before."""
        came_from = self.state[block]
        assert came_from in (_LEASED, _DRAINING)
        assert generation >= self.generation[block]
        before = self.owners.use_of(block)
        self._hand_over(before, account, came_from, _LEASED, 1)
        self.state[block] = _LEASED
        if generation > self.generation[block]:
            self.generation[block] = generation
            self.set_seal(block, NO_SEAL)
        # Whether the claimant has zeroed it, of whatever was there before, is not known here.
        self._zeroing[block] = self.any_wipes
        self.owners.index[block] = self.owners.index_of(account)
        return before

    def restore(self, account: Account, blocks: Blocks) -> None:
        """LEASED or DRAINING -> CACHED, of whichever accounts: the worker has what was published before a restart."""
        owner = self.owners.index_of(account)
        for came_from in (_LEASED, _DRAINING):
            found = blocks[self.states[blocks] == came_from]
            for before in self.owners.uses_of(found):
                count = int(np.count_nonzero(self.owners.indices[found] == before.owner_index))
                self._hand_over(before, account, came_from, _CACHED, count)
        assert bool(np.isin(self.states[blocks], (_LEASED, _DRAINING)).all()), "a free block cannot be restored"
        self.states[blocks] = _CACHED
        self.owners.indices[blocks] = owner
        self._zeroings[blocks] = False  # it was written under its generation, and zeroed before that

    def put_free(self, block: int) -> None:
        """From any other state; the block is granted again last."""
        assert self.state[block] != _FREE
        self._move(block, _FREE)
        if not self.is_used_up(block):
            self.free.append(block)

    def is_used_up(self, block: int) -> bool:
        generation = self.generation[block]
        return generation & COUNTER_MAX == COUNTER_MAX and is_of_epoch(generation, self.cache_epoch)

    # many blocks

    def grant(self, account: Account, count: int) -> Granted:
        """Lease `count` free blocks under new generations."""
        if count <= _FEW:
            return self._grant_few(account, count)
        blocks = self.free.take(count)
        handles = self._following(self.generations[blocks])
        self.generations[blocks] = handles
        self._whole_seals[blocks] = _NO_SEAL
        handles <<= _BLOCK_BITS
        handles |= blocks.view(np.uint64)
        zero = self._zero_first(blocks, handles, account) if self.any_wipes else b""
        self.owners.indices[blocks] = self.owners.index_of(account)
        self._move_all(blocks, account, _FREE, _LEASED)
        return Granted(handles.tobytes(), zero)

    def publish(self, account: Account, handles: bytes, seals: bytes) -> None:
        """LEASED -> CACHED. They were written under their generation, and zeroed before that."""
        if len(handles) > _FEW * HANDLE_BYTES:
            blocks = blocks_array(handles)
            self._move_all(blocks, account, _LEASED, _CACHED)
            self._whole_seals[blocks] = np.frombuffer(seals, _SEAL)
            self._zeroings[blocks] = False
            return
        few = unpack_blocks(handles)
        self._move_few(few, account, _LEASED, _CACHED)
        for index, block in enumerate(few):
            self.seals[block * SEAL_BYTES : (block + 1) * SEAL_BYTES] = seals[
                index * SEAL_BYTES : (index + 1) * SEAL_BYTES
            ]
            self._zeroing[block] = False

    def evict(self, account: Account, handles: bytes) -> None:
        """CACHED -> FREE; in their order they are granted again last."""
        self._free_all(account, handles, _CACHED)

    def give_back(self, account: Account, handles: bytes, *, drained: bool) -> None:
        """LEASED -> FREE, or DRAINING -> FREE for those that were drained before."""
        self._free_all(account, handles, _DRAINING if drained else _LEASED)

    def drain_all(self, account: Account, handles: bytes) -> None:
        """LEASED -> DRAINING."""
        if len(handles) > _FEW * HANDLE_BYTES:
            self._move_all(blocks_array(handles), account, _LEASED, _DRAINING)
            return
        self._move_few(unpack_blocks(handles), account, _LEASED, _DRAINING)

    def seals_of(self, handles: bytes) -> bytes:
        """The seals of these blocks, packed in the same order."""
        if not handles:
            return b""
        if len(handles) > _FEW * HANDLE_BYTES:
            return self._whole_seals[blocks_array(handles)].tobytes()
        seals, size = self.seals, SEAL_BYTES
        return b"".join([seals[block * size : (block + 1) * size] for block in unpack_blocks(handles)])

    def _grant_few(self, account: Account, count: int) -> Granted:
        blocks, owned, zero = [], [], []
        generation, owner, below = self.generation, self.owners.index_of(account), below_first(self.cache_epoch)
        for _ in range(count):
            block = self.free.popleft()
            before = generation[block]
            if before <= below:
                before = below
                self._num_foreign -= 1
            generation[block] = after = before + 1
            assert is_of_epoch(after, self.cache_epoch), _EPOCH_TOO_LOW
            self.seals[block * SEAL_BYTES : (block + 1) * SEAL_BYTES] = NO_SEAL
            handle = (after << BLOCK_BITS | block).to_bytes(HANDLE_BYTES, "little")
            if self.any_wipes and (self._zeroing[block] or self._must_zero(self.owners.use_of(block), account)):
                self._zeroing[block] = True
                zero.append(handle)
            self.owners.index[block] = owner
            blocks.append(block)
            owned.append(handle)
        self._move_few(blocks, account, _FREE, _LEASED)
        return Granted(b"".join(owned), b"".join(zero))

    def _following(self, generations: UInt64) -> UInt64:
        """The generations under which blocks are granted next. Each of numpy's functions counts here: see above."""
        if not self._num_foreign:
            generations += _ONE
            return generations
        below = below_first(self.cache_epoch)
        if generations.tobytes().count(0) == generations.nbytes:  # never granted before
            generations[:] = below + 1
            self._num_foreign -= len(generations)
            return generations
        self._num_foreign -= int(np.count_nonzero(~are_of_epoch(generations, self.cache_epoch)))
        after: UInt64 = np.maximum(generations, np.uint64(below)) + _ONE
        assert is_of_epoch(int(np.maximum.reduce(after)), self.cache_epoch), _EPOCH_TOO_LOW
        return after

    def _free_all(self, account: Account, handles: bytes, came_from: int) -> None:
        if len(handles) > _FEW * HANDLE_BYTES:
            blocks = blocks_array(handles)
            self._move_all(blocks, account, came_from, _FREE)
            self._list_free(blocks)
            return
        few = unpack_blocks(handles)
        self._move_few(few, account, came_from, _FREE)
        for block in few:
            if not self.is_used_up(block):
                self.free.append(block)

    def _list_free(self, blocks: Blocks) -> None:
        used_up = self._are_used_up(blocks)
        self.free.extend(blocks[~used_up] if np.count_nonzero(used_up) else blocks)

    def _are_used_up(self, blocks: Blocks) -> Bool:
        generations = self.generations[blocks]
        used_up: Bool = (generations & _COUNTER_MAX) == _COUNTER_MAX
        if np.count_nonzero(used_up):
            used_up &= are_of_epoch(generations, self.cache_epoch)
        return used_up

    # residue (I15)

    def _zero_first(self, blocks: Blocks, handles: UInt64, account: Account) -> bytes:
        """Those of the handles whose blocks must be zeroed; asked before they change their owner."""
        zero = self._zeroings[blocks]
        owners = self.owners.indices[blocks].tolist()
        verdicts = {owner: self._must_zero(self.owners.accounts[owner], account) for owner in set(owners)}
        if any(verdicts.values()):
            zero |= np.array([verdicts[owner] for owner in owners])
            self._zeroings[blocks] = zero
        return handles[zero].tobytes()

    def _must_zero(self, before: Account, after: Account) -> bool:
        if after.config.mode is Mode.STRICT:
            return True
        if before is self.owners.nobody:
            return False
        if before is self.owners.unknown:
            return self.any_wipes
        return before.config.domain != after.config.domain and (before.config.wipes or after.config.wipes)

    # the only places that change a state; they keep the totals and the accounts

    def _move(self, block: int, to: int) -> None:
        came_from = self.state[block]
        self.state[block] = to
        self._account(self.owners.use_of(block), came_from, to, 1)

    def _move_few(self, blocks: list[int], account: Account, came_from: int, to: int) -> None:
        state = self.state
        for block in blocks:
            assert state[block] == came_from, f"block {block} is not {BlockState(came_from).name}"
            state[block] = to
        self._account(account, came_from, to, len(blocks))

    def _move_all(self, blocks: Blocks, account: Account, came_from: int, to: int) -> None:
        assert self.states[blocks].tobytes().count(came_from) == len(blocks), (
            f"a block is not {BlockState(came_from).name}"
        )
        self.states[blocks] = to
        self._account(account, came_from, to, len(blocks))

    def _account(self, account: Account, came_from: int, to: int, count: int) -> None:
        if not account.is_touched:
            self.block_time.call_time.touch(self.block_time, account)
        self.counts[came_from] -= count
        self.counts[to] += count
        if came_from == _LEASED:
            account.leased -= count
        elif came_from == _CACHED:
            account.cached -= count
        elif came_from == _DRAINING:
            account.draining -= count
        if to == _LEASED:
            account.leased += count
        elif to == _CACHED:
            account.cached += count
        elif to == _DRAINING:
            account.draining += count

    def _hand_over(self, before: Account, after: Account, came_from: int, to: int, count: int) -> None:
        """Blocks that are not free pass from one account to another, as if they were for a moment."""
        self._account(before, came_from, _FREE, count)
        self._account(after, _FREE, to, count)
