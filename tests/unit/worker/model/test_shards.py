"""The shares of several workers are the whole model, each thing once, and what all need in full."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.errors import UsageError
from coppice_worker.kernels.backend import Projection
from coppice_worker.model.config.config import ModelConfig, read_config
from coppice_worker.model.config.shard import Shard
from coppice_worker.model.decoder.linear import Projections
from coppice_worker.model.decoder.weights import DecoderWeights
from coppice_worker.model.loader import Checkpoint, LoadProgress
from tests.fakes.checkpoints import write_tiny_checkpoint

MODELS: dict[str, dict[str, Any]] = {
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2-tied": {"family": "qwen2", "tie": True, "vocab_size": 321},
    "odd-heads": {"family": "qwen2", "num_attention_heads": 14, "hidden_size": 224, "intermediate_size": 99},
    "replicated": {"family": "llama", "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 323},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shards")
    return {name: write_tiny_checkpoint(root / name, **settings) for name, settings in MODELS.items()}


def load(folder: Path, shard: Shard) -> DecoderWeights:
    checkpoint = Checkpoint(folder, read_config(folder), device=torch.device("cpu"), dtype=torch.float32, shard=shard)
    return checkpoint.weights(Projections())


def apply(projections: list[Projection], rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [projection(part) for projection, part in zip(projections, rows, strict=True)]


def heads_of(config: ModelConfig, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[T, (H + 2 HK) D] -> query [T, H, D], key and value [T, HK, D]."""
    counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    return qkv.view(len(qkv), -1, config.head_dim).split(counts, dim=1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama-biases", "qwen2-tied", "odd-heads", "replicated"])
def test_shares_make_the_whole(folders: dict[str, Path], name: str, size: int) -> None:
    config = read_config(folders[name])
    shards = [Shard(rank, size) for rank in range(size)]
    if config.num_heads % size:
        with pytest.raises(UsageError, match="num_attention_heads"):
            load(folders[name], shards[0])
        return
    whole, shares = load(folders[name], Shard()), [load(folders[name], shard) for shard in shards]
    local = [shard.share_of(config) for shard in shards]
    hidden = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(0))
    layer, parts = whole.layers[1], [share.layers[1] for share in shares]

    query, key, value = heads_of(config, layer.qkv(hidden))
    held = [heads_of(c, part.qkv(hidden)) for c, part in zip(local, parts, strict=True)]
    assert torch.equal(torch.cat([part[0] for part in held], dim=1), query)
    group = config.num_heads // config.num_kv_heads
    for rank, (_, own_key, own_value) in enumerate(held):
        # The KV heads that this worker's queries read in the whole model.
        first = rank * local[rank].num_heads // group
        count = own_key.shape[1]
        assert count * group >= local[rank].num_heads
        assert torch.equal(own_key, key[:, first : first + count])
        assert torch.equal(own_value, value[:, first : first + count])

    attended = query.flatten(1)
    pieces = attended.split([c.num_heads * c.head_dim for c in local], dim=1)
    together = sum(apply([part.output for part in parts], list(pieces)))
    torch.testing.assert_close(together, layer.output(attended))
    gated = layer.gated(hidden)
    own_gated = [part.gated(hidden) for part in parts]
    torch.testing.assert_close(torch.cat(own_gated, dim=1), gated)
    torch.testing.assert_close(sum(apply([part.down for part in parts], own_gated)), layer.down(gated))

    logits = [share.head(hidden) for share in shares]
    assert len({part.shape for part in logits}) == 1
    torch.testing.assert_close(torch.cat(logits, dim=1)[:, : config.vocab_size], whole.head(hidden))
    for share in shares:
        assert torch.equal(share.embedding, whole.embedding)
        assert torch.equal(share.final_norm, whole.final_norm)


def test_shares_of_the_mlp_leave_nothing_out(folders: dict[str, Path]) -> None:
    config = read_config(folders["odd-heads"])
    assert config.intermediate_size == 99
    parts = [Shard(rank, 2).part("intermediate", config) for rank in range(2)]
    assert [0, *(part.stop for part in parts)] == [*(part.start for part in parts), 99]
    assert all(one.stop == other.start for one, other in pairwise(parts))


def test_kv_heads_that_neither_split_nor_repeat_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, num_attention_heads=12, num_key_value_heads=3, hidden_size=96)
    with pytest.raises(UsageError, match="num_key_value_heads"):
        load(folder, Shard(0, 2))
    assert Shard(5, 6).share_of(read_config(folder)).num_kv_heads == 1


def test_progress_counts_the_share_alone(folders: dict[str, Path]) -> None:
    def total(shard: Shard) -> int:
        seen: list[LoadProgress] = []
        folder = folders["llama-biases"]
        checkpoint = Checkpoint(
            folder,
            read_config(folder),
            device=torch.device("cpu"),
            dtype=torch.float32,
            shard=shard,
            on_progress=seen.append,
        )
        checkpoint.weights(Projections())
        return seen[-1].parameters_total if seen[-1].parameters_done == seen[-1].parameters_total else -1

    assert 0.4 * total(Shard()) < total(Shard(0, 2)) < 0.8 * total(Shard())
