"""The peers, each with the same four questions: store, lookup, grow leaves of one block, evict one of them.

Arguments are prepared in each peer's own form before anything is timed (arrays of int64, tensors, block hashes, encoded
events), so what is timed is the structure alone. Where a peer offers a cheaper and a dearer way to do the same, the
cheaper one is taken.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.index_imports import PeerMissing, import_alone
from coppice.messages.index import Publish
from coppice.seals import NO_SEAL, ChainKey, chain_seals
from coppice_bench.index.core_driver import CoreDriver
from coppice_bench.index.shape import BLOCK_BYTES, BLOCK_SIZE
from coppice_bench.index.tree_level import TreeLevel

_SGLANG = "sglang.srt.mem_cache"
_CHAIN_KEY = ChainKey(b"k" * 32, b"")


def _ids(tokens: bytes) -> array[int]:
    return array("q", np.frombuffer(tokens, dtype="<u4").astype(np.int64).tobytes())


class Peer:
    """One structure of one peer. What `prepare...` and `finish...` do is not timed."""

    name = ""

    def prepare_lookup(self, tokens: bytes) -> Any:
        """The argument of `lookup` and `matched_tokens`."""
        raise AssertionError

    def lookup(self, prepared: Any) -> None:
        """Match, hold what was found, let go of it."""
        raise AssertionError

    def matched_tokens(self, prepared: Any) -> int:
        raise AssertionError

    def prepare_store(self, tokens: bytes, num_known_blocks: int) -> Any:
        """The argument of `store`; the first blocks are there already."""
        raise AssertionError

    def store(self, prepared: Any) -> None:
        """Make the sequence findable."""
        raise AssertionError

    def finish_store(self, prepared: Any) -> None:
        """Let go of it."""

    def evict_one(self) -> None:
        """Free the coldest leaf. Raises PeerMissing where the peer has no such thing."""
        raise PeerMissing("it evicts by time and size, not on demand")

    def add(self, tokens: bytes, num_known_blocks: int = 0) -> None:
        """Store without timing."""
        prepared = self.prepare_store(tokens, num_known_blocks)
        self.store(prepared)
        self.finish_store(prepared)


class SGLangPython(Peer):
    """`RadixCache`: match_prefix + inc_lock_ref + dec_lock_ref; insert; evict(1 token)."""

    name = "sglang_python"

    def __init__(self, site: Path) -> None:
        import torch

        modules = ("base_prefix_cache", "cache_init_params", "evict_policy", "utils", "events")
        radix, base, *_ = import_alone(site, f"{_SGLANG}.radix_cache", *(f"{_SGLANG}.{name}" for name in modules))
        self._torch, self._radix, self._base = torch, radix, base
        self._cache = radix.RadixCache.create_simulated(mock_allocator=_NoAllocator(), page_size=BLOCK_SIZE)
        self._cache.update_eviction_metrics = lambda *_: None

    def prepare_lookup(self, tokens: bytes) -> Any:
        return self._radix.RadixKey(_ids(tokens))

    def prepare_store(self, tokens: bytes, num_known_blocks: int) -> Any:
        key = self._radix.RadixKey(_ids(tokens))
        return key, self._torch.arange(len(key), dtype=self._torch.int64)

    def store(self, prepared: Any) -> None:
        key, value = prepared
        self._cache.insert(self._base.InsertParams(key=key, value=value))

    def lookup(self, prepared: Any) -> None:
        result = self._cache.match_prefix(self._base.MatchPrefixParams(key=prepared))
        self._cache.inc_lock_ref(result.last_device_node)
        self._cache.dec_lock_ref(result.last_device_node)

    def matched_tokens(self, prepared: Any) -> int:
        return int(self._cache.match_prefix(self._base.MatchPrefixParams(key=prepared)).device_prefix_len)

    def evict_one(self) -> None:
        self._cache.evict(self._base.EvictParams(num_tokens=1))


class _NoAllocator:
    """Takes slots back and keeps none: the pool is not what is measured."""

    device = "cpu"

    def free_segment(self, indices: Any, start_pos: int) -> None: ...


class SGLangRust(Peer):
    """The tree core's extension itself, without the Python that wraps it: match_prefix + inc/dec_full_pin; insert."""

    name = "sglang_rust"

    def __init__(self, site: Path) -> None:
        import torch  # its shared libraries have to be there before the extension is

        (core,) = import_alone(site, f"{_SGLANG}.rust_tree_core.mem_cache")
        self._torch, self._core = torch, core
        settings = core.TreeCoreInitParamsBinding(eviction_policy="lru", page_size=BLOCK_SIZE, device="cpu")
        self._tree = core.RustUnifiedTreeCoreBinding(settings, [0])

    def prepare_lookup(self, tokens: bytes) -> Any:
        return _ids(tokens)

    def prepare_store(self, tokens: bytes, num_known_blocks: int) -> Any:
        key = _ids(tokens)
        return key, self._torch.arange(len(key), dtype=self._torch.int64)

    def store(self, prepared: Any) -> None:
        key, value = prepared
        self._tree.insert(self._core.InsertParamsBinding(key=key, value=value))

    def lookup(self, prepared: Any) -> None:
        node = self._tree.match_prefix(self._core.MatchParamsBinding(key=prepared)).last_device_node_id
        self._tree.inc_full_pin(node)
        self._tree.dec_full_pin(node)

    def matched_tokens(self, prepared: Any) -> int:
        return int(self._tree.match_prefix(self._core.MatchParamsBinding(key=prepared)).device_prefix_len)

    def evict_one(self) -> None:
        self._tree.evict_device_start(0, 1)
        self._tree.evict_device_leaf(self._tree.evict_device_next_node(0, {}).node_id)
        self._tree.evict_device_end(0)


class VLLMBlockPool(Peer):
    """`BlockPool`: get_cached_block per block + touch + free_blocks; cache_full_blocks; get_new_blocks(1).

    Block hashes are given, as a vLLM request brings them; its hashing is not timed.
    """

    name = "vllm_block_pool"

    def __init__(self, site: Path, num_blocks: int) -> None:
        (module, *_) = import_alone(site, "vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils")
        self._pool = module.BlockPool(num_blocks, True, BLOCK_SIZE)

    def prepare_lookup(self, tokens: bytes) -> Any:
        return _Hashed(_block_hashes(tokens))

    def prepare_store(self, tokens: bytes, num_known_blocks: int) -> Any:
        """A request has its blocks before they are full, so taking them is not timed."""
        request = _Hashed(_block_hashes(tokens))
        known = self._cached(request)
        self._pool.touch(known)
        request.num_known = len(known)
        request.blocks = known + self._pool.get_new_blocks(len(request.block_hashes) - len(known))
        return request

    def store(self, prepared: Any) -> None:
        num_full = len(prepared.block_hashes)
        self._pool.cache_full_blocks(prepared, prepared.blocks, prepared.num_known, num_full, BLOCK_SIZE, 0)

    def finish_store(self, prepared: Any) -> None:
        self._pool.free_blocks(reversed(prepared.blocks))

    def lookup(self, prepared: Any) -> None:
        found = self._cached(prepared)
        self._pool.touch(found)
        self._pool.free_blocks(reversed(found))

    def matched_tokens(self, prepared: Any) -> int:
        return len(self._cached(prepared)) * BLOCK_SIZE

    def _cached(self, prepared: Any) -> list[Any]:
        found, get = [], self._pool.get_cached_block
        for block_hash in prepared.block_hashes:
            blocks = get(block_hash, [0])
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def evict_one(self) -> None:
        """The pool is full of cached blocks, so taking one evicts one."""
        self._pool.get_new_blocks(1)


class _Hashed:
    """What `BlockPool` reads of a request."""

    def __init__(self, block_hashes: Sequence[bytes]) -> None:
        self.block_hashes = list(block_hashes)
        self.blocks: list[Any] = []
        self.num_known = 0


def _block_hashes(tokens: bytes) -> list[bytes]:
    """Chained, one per block; any hash will do, since hashing is not timed."""
    hashes, parent = [], b""
    for start in range(0, len(tokens) - BLOCK_BYTES + 1, BLOCK_BYTES):
        parent = blake2b(parent + tokens[start : start + BLOCK_BYTES], digest_size=32).digest()
        hashes.append(parent)
    return hashes


class DynamoRadixTree(Peer):
    """`RadixTree`: find_matches on given block hashes (it holds nothing); apply_event of an encoded event."""

    name = "dynamo_radix_tree"

    def __init__(self, site: Path) -> None:
        (core,) = import_alone(site, "dynamo._core")
        self._core = core
        self._tree = core.RadixTree()
        self._events = 0

    def prepare_lookup(self, tokens: bytes) -> Any:
        return self._core.compute_block_hash_for_seq(np.frombuffer(tokens, dtype="<u4").tolist(), BLOCK_SIZE)

    def prepare_store(self, tokens: bytes, num_known_blocks: int) -> Any:
        """The event as an engine would encode it."""
        own, chained = (
            self.prepare_lookup(tokens),
            [int.from_bytes(part[:8], "little") for part in _block_hashes(tokens)],
        )
        self._events += 1
        blocks = [
            {"block_hash": block, "tokens_hash": tokens_hash}
            for block, tokens_hash in zip(chained[num_known_blocks:], own[num_known_blocks:], strict=True)
        ]
        parent = chained[num_known_blocks - 1] if num_known_blocks else None
        event = {"event_id": self._events, "dp_rank": 0, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}}
        return json.dumps(event).encode()

    def store(self, prepared: Any) -> None:
        self._tree.apply_event(7, prepared)

    def lookup(self, prepared: Any) -> None:
        self._tree.find_matches(prepared)

    def matched_tokens(self, prepared: Any) -> int:
        scores = self._tree.find_matches(prepared).scores
        return max(scores.values(), default=0) * BLOCK_SIZE


class Coppice(Peer):
    """Ours: walk + pin + unpin, with its new place in the order of eviction; Publish; the eviction of one block.

    Publish is the whole op: walk, split, hang up, states and seals of the ledger, the answer. Seals are keyed digests,
    which peers compute elsewhere (vLLM, Dynamo) or not at all (SGLang); they are timed alone as well.
    """

    name = "coppice"

    def __init__(self, num_blocks: int) -> None:
        self._driver = CoreDriver(num_blocks, BLOCK_SIZE)
        self._level = TreeLevel(self._driver)

    def prepare_lookup(self, tokens: bytes) -> Any:
        return tokens

    def lookup(self, prepared: Any) -> None:
        self._level.lookup(prepared)

    def matched_tokens(self, prepared: Any) -> int:
        return self._driver.match(prepared)

    def prepare_store(self, tokens: bytes, num_known_blocks: int) -> Any:
        lease_id = self._driver.acquire(tokens)
        return lease_id, num_known_blocks, tokens[num_known_blocks * BLOCK_BYTES :]

    def store(self, prepared: Any) -> None:
        self._driver.do(Publish(*prepared))

    def finish_store(self, prepared: Any) -> None:
        self._driver.release(prepared[0])

    def evict_one(self) -> None:
        self._level.evict_one()

    def acquire_and_release(self, prepared: Any) -> None:
        """The whole ops around a lookup: grant, lease and answer included."""
        self._driver.release(self._driver.acquire(prepared))

    def seals(self, prepared: Any) -> None:
        """Those of a store, alone."""
        chain_seals(_CHAIN_KEY, NO_SEAL, prepared[2], BLOCK_BYTES)
