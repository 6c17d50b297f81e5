"""The KV events of the field: what an engine says of the blocks that it stores and drops. Values only.

The names are those of vLLM's and SGLang's events, so that a reader finds them again. Token ids are packed little-endian
u32 here as everywhere in Coppice; on the wire they are arrays of integers (`coppice.edge.kv_events`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BlockHash = int | bytes
"""A name that the engine gave a block: u64 (vLLM), signed 64-bit (SGLang) or a raw digest. Opaque to everybody else."""

ExtraKey = Any
"""What a block's hash depends on beside tokens: str, int, bytes, or tuples of those (a map is a tuple of pairs)."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks are in the cache, the first of them after `parent_block_hash` (None: a prompt starts here).

    tokens: packed little-endian u32, block_size for each block. extra_keys: one entry per block, where they are told.
    lookahead: per block, the packed tokens after it that its hash depends on (bigram keys, lookahead hashing).
    medium: GPU, CPU, CPU_PINNED, STORAGE, DISK, EXTERNAL, ...; None is the GPU of an old engine.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    tokens: bytes
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    lookahead: tuple[bytes, ...] | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks are not in the cache any more, or not on this medium."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is in the cache any more."""


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """An event of a kind that is younger than this reader."""

    type: str


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """What one publisher says at once. ts: seconds of its wall clock. dp_rank: its data-parallel rank, where told."""

    ts: float
    events: tuple[KvEvent, ...]
    dp_rank: int | None = None
