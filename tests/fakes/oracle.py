"""`transformers` as the oracle: greedy tokens, where a tie of the two best logits is no difference; beams."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

TIE = 1e-4
PAD = 319  # of a vocabulary of 320; the models have no use for it


def model_of(checkpoint: Path) -> Any:
    """The model of `transformers`, in fp32 on the CPU."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model.eval()


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


class Oracle:
    """Greedy continuations in fp32 on the CPU, never stopping early."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = model_of(checkpoint)

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


def beams_of_transformers(
    model: Any, prompt: list[int], ends: list[int], *, width: int, count: int, max_tokens: int, length_penalty: float
) -> tuple[list[list[int]], list[float]]:
    """The `count` best answers of a beam search, best first, with their stop tokens; and their scores."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=count,
        length_penalty=length_penalty,
        max_new_tokens=max_tokens,
        eos_token_id=ends or None,
        pad_token_id=PAD,
        do_sample=False,
        early_stopping=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [[token for token in row[len(prompt) :].tolist() if token != PAD] for row in found.sequences]
    return rows, found.sequences_scores.tolist()
