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
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._known: dict[tuple[tuple[int, ...], int], tuple[list[int], list[float]]] = {}

    def continuation(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Tokens, and at each the distance of the two best logits."""
        key = (tuple(prompt), num_tokens)
        if key not in self._known:
            with torch.inference_mode():
                output = self._model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=num_tokens,
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            tokens = output.sequences[0, len(prompt) :].tolist()
            best = [logits[0].topk(2).values for logits in output.logits]
            self._known[key] = (tokens, [float(two[0] - two[1]) for two in best])
        return self._known[key]

    def check(self, prompt: list[int], tokens: list[int]) -> None:
        """Assert that `tokens` is the greedy continuation of `prompt`, up to the first tie that went the other way."""
        expected, gaps = self.continuation(prompt, len(tokens))
        for position, (ours, theirs, gap) in enumerate(zip(tokens, expected, gaps, strict=True)):
            if ours != theirs:
                assert gap < TIE, (
                    f"prompt of {len(prompt)} tokens, position {position}: {ours} instead of {theirs} (gap {gap:.2e})"
                )
                return
