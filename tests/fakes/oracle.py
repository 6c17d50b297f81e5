"""`transformers` as the oracle for greedy tokens. A difference counts as none where its two best logits are a tie."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

TIE = 1e-4


class Oracle:
    """Greedy continuations in fp32 on the CPU, never stopping early."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def check(self, prompt: list[int], tokens: list[int]) -> None:
        """Assert that `tokens` is the greedy continuation of `prompt`, up to the first tie that went the other way.

        One pass tells: it is, if each token is the likeliest one after those before it.
        """
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2)
        assert len(logits) == len(tokens) > 0
        for position, (ours, (theirs, _), (high, low)) in enumerate(
            zip(tokens, best.indices.tolist(), best.values.tolist(), strict=True)
        ):
            if ours != theirs:
                assert high - low < TIE, (
                    f"prompt of {len(prompt)} tokens, position {position}: "
                    f"{ours} instead of {theirs} (gap {high - low:.2e})"
                )
                return
