"""From hidden states to what a step gave."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from coppice_worker.core.batch.guides import Masks, fill_masks
from coppice_worker.core.batch.step_batch import (
    NO_OUTPUT,
    Int64,
    Logprobs,
    PromptTokens,
    StepBatch,
    StepOutput,
)
from coppice_worker.kernels.backend import Arithmetic
from coppice_worker.kernels.upload import Upload
from coppice_worker.model.decoder.decoder import Decoder
from coppice_worker.model.decoder.logits import join_logprobs, token_logprobs
from coppice_worker.model.decoder.sampler import sample_and_report

_PROMPT_LOGITS_MAX = 1 << 23  # logits of prompt tokens in memory at a time


class Outputs:
    """Samples, and reports log-probabilities, whatever a batch asks for."""

    def __init__(self, decoder: Decoder, arithmetic: Arithmetic, upload: Upload) -> None:
        self._decoder, self._arithmetic, self._upload = decoder, arithmetic, upload
        self._mask_thread = ThreadPoolExecutor(1, "masks")  # it begins with the first grammar

    def of(self, batch: StepBatch, hidden: Callable[[], torch.Tensor]) -> StepOutput:
        """`hidden` computes the hidden states [T, hidden] before the final norm, beside the masks of guided rows."""
        guided = batch.sample.guided
        if guided is None:
            return self._of(batch, hidden(), None)
        masks = self._mask_thread.submit(fill_masks, guided, self._decoder.config.vocab_size)
        states = hidden()
        return self._of(batch, states, masks.result())

    def _of(self, batch: StepBatch, hidden: torch.Tensor, masks: Masks | None) -> StepOutput:
        prompt = None if batch.prompt is None else self._prompt_logprobs(hidden, batch.prompt)
        if batch.sample.rows.size == 0:
            self._wait()
            return NO_OUTPUT if prompt is None else replace(NO_OUTPUT, prompt_logprobs=prompt)
        logits = self.logits(batch, hidden)
        tokens, logprobs = sample_and_report(logits, batch.sample, self._arithmetic, masks)
        broken = masks.rows[masks.broken] if masks is not None and masks.broken.any() else None
        return StepOutput(tokens.cpu().numpy().astype(np.int32), logprobs, prompt, broken)

    def logits(self, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor:
        """[R, vocab] of the rows that are sampled, each of its last new token."""
        last: Int64 = batch.query_starts[batch.sample.rows + 1].astype(np.int64) - 1
        return self._decoder.logits(hidden.index_select(0, self._to_device(last)))

    def _prompt_logprobs(self, hidden: torch.Tensor, prompt: PromptTokens) -> Logprobs:
        """Logits of all these tokens at once would be large: slice by slice."""
        packed, tokens = self._to_device(prompt.packed), self._to_device(prompt.token_ids)
        num_top, size = int(prompt.num_top.max()), max(1, _PROMPT_LOGITS_MAX // self._decoder.config.vocab_size)
        slices = [slice(start, start + size) for start in range(0, len(packed), size)]
        return join_logprobs(
            [
                token_logprobs(self._decoder.logits(hidden[packed[part]]), tokens[part], num_top, ranks=True)
                for part in slices
            ]
        )

    def _to_device(self, array: Int64) -> torch.Tensor:
        return self._upload.lend([array])[0]

    def _wait(self) -> None:
        """Nothing is fetched that the host would wait for: the step is over when the device has computed it."""
        if self._upload.device.type == "cuda":
            torch.cuda.current_stream(self._upload.device).synchronize()
