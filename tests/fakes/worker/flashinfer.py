"""A stand-in for FlashInfer's paged attention: what its documentation says, in float64, one query after the other."""

from __future__ import annotations

import itertools
from typing import Any

import torch

NAMED = {"num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size", "causal", "sm_scale", "window_left"}
NAMED |= {"logits_soft_cap", "q_data_type"}


class FakePagedAttention:
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "HND"
        self.num_plans = self.num_runs = 0

    def plan(
        self, starts: torch.Tensor, page_starts: torch.Tensor, pages: torch.Tensor, in_last: torch.Tensor, **how: Any
    ) -> None:
        assert set(how) == NAMED
        assert how["causal"], "else each query sees all keys"
        assert all(part.dtype == torch.int32 and part.is_contiguous() for part in (starts, page_starts, pages, in_last))
        assert len(pages) == page_starts[-1]
        assert ((in_last >= 1) & (in_last <= how["page_size"])).all()
        self._starts, self._page_starts, self._pages = starts.tolist(), page_starts.tolist(), pages.long()
        self._in_last, self._how = in_last.tolist(), how
        self.num_plans += 1

    def run(self, query: torch.Tensor, blocks: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        how = self._how
        assert query.is_contiguous()
        assert query.dtype == how["q_data_type"]
        assert query.shape[1:] == (how["num_qo_heads"], how["head_dim_qk"])
        assert blocks[0].shape[1:] == (how["num_kv_heads"], how["page_size"], how["head_dim_qk"])
        self.num_runs += 1
        out = torch.zeros(query.shape, dtype=torch.float64)
        spans = zip(itertools.pairwise(self._starts), itertools.pairwise(self._page_starts), self._in_last, strict=True)
        for (start, end), (first, last), in_last in spans:
            pages = self._pages[first:last]
            num_keys = (last - first - 1) * how["page_size"] + in_last
            keys, values = (side[pages].transpose(1, 2).flatten(0, 1)[:num_keys].double() for side in blocks)
            for token in range(start, end):
                position = num_keys - (end - token)
                left = 0 if how["window_left"] < 0 else max(0, position - how["window_left"])
                out[token] = self._one(query[token].double(), keys[left : position + 1], values[left : position + 1])
        return out.to(query.dtype)

    def _one(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[H, D] for query [H, D], keys and values [N, HK, D]."""
        group = len(query) // keys.shape[1]
        keys, values = (side.repeat_interleave(group, dim=1) for side in (keys, values))
        scores = torch.einsum("hd,nhd->hn", query, keys) * self._how["sm_scale"]
        if cap := self._how["logits_soft_cap"]:
            scores = cap * (scores / cap).tanh()
        return torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
