"""What a block of a model's KV takes, and how many fit into memory of a given size."""

from __future__ import annotations

from pathlib import Path

from coppice_worker.kernels.pool import KvShape
from coppice_worker.model.config.config import ModelConfig, read_config
from coppice_worker.model.config.dtypes import DtypeName, KvDtypeName, kv_dtype_of
from coppice_worker.model.config.shard import WHOLE, Shard
from coppice_worker.model.decoder.ranks import RankGroup


def kv_shape(config: ModelConfig) -> KvShape:
    return KvShape(config.num_layers, config.num_kv_heads, config.head_dim)


def shard_of(group: RankGroup | None) -> Shard:
    return WHOLE if group is None else Shard(group.rank, group.size)


def suggest_num_blocks(
    checkpoint_dir: Path,
    *,
    memory_bytes: int,
    dtype: DtypeName,
    kv_dtype: KvDtypeName = "auto",
    block_size: int,
    shard: Shard = WHOLE,
) -> int:
    """How many blocks of `shard` fit into `memory_bytes` of memory set aside for its KV (weights not counted).

    Raises ValueError if not even one block fits.
    """
    share = shard.share_of(read_config(checkpoint_dir))
    per_block = kv_shape(share).bytes_per_block(block_size, kv_dtype_of(kv_dtype, dtype))
    if memory_bytes < per_block:
        raise ValueError(f"{memory_bytes} bytes do not hold one block of {per_block} bytes; give the pool more memory")
    return memory_bytes // per_block
