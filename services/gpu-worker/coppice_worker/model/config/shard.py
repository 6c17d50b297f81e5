"""What one of several workers that compute a model together holds of it (tensor parallelism).

query, key, value, gate, up      some rows: whole heads, some of the MLP's columns
output, down                     the columns that belong to them; the results of all workers are added
head                             some of the vocabulary
embedding, norms                 everything

Where there are fewer KV heads than workers, several workers hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from coppice.errors import UsageError
from coppice_worker.model.config.config import ModelConfig

Axis = Literal["query", "key", "intermediate", "vocabulary"]  # a dimension of a tensor that is shared out


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of worker `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def share_of(self, config: ModelConfig) -> ModelConfig:
        """The model as this worker sees it: fewer heads, a narrower MLP. Raises UsageError where heads do not split."""
        num_heads = len(self._heads(config.num_heads, "num_attention_heads"))
        num_kv_heads = len(self._kv_heads(config))
        intermediate_size = len(self._range(config.intermediate_size))
        return replace(config, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=intermediate_size)

    def part(self, axis: Axis, config: ModelConfig) -> slice:
        """What of this dimension is held here; `config` is the whole model's."""
        if axis == "query":
            held = _scaled(self._heads(config.num_heads, "num_attention_heads"), config.head_dim)
        elif axis == "key":
            held = _scaled(self._kv_heads(config), config.head_dim)
        elif axis == "intermediate":
            held = self._range(config.intermediate_size)
        else:
            rows = self.vocabulary_rows(config)
            held = range(min(config.vocab_size, self.rank * rows), min(config.vocab_size, (self.rank + 1) * rows))
        return slice(held.start, held.stop)

    def vocabulary_rows(self, config: ModelConfig) -> int:
        """Rows of each worker's head; the last ones are zeros that stand for no token."""
        return -(-config.vocab_size // self.size)

    def _kv_heads(self, config: ModelConfig) -> range:
        if config.num_kv_heads >= self.size or self.size % config.num_kv_heads:
            return self._heads(config.num_kv_heads, "num_key_value_heads")
        head = self.rank * config.num_kv_heads // self.size
        return range(head, head + 1)

    def _heads(self, count: int, key: str) -> range:
        if count % self.size:
            raise UsageError(
                f"{self.size} ranks cannot share the model's {count} heads ({key})",
                hint="choose a --tensor-parallel that divides the heads",
            )
        return self._range(count)

    def _range(self, count: int) -> range:
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


WHOLE = Shard()
