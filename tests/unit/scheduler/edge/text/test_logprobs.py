"""Log-probabilities are those of the model: as `transformers` computes them, whatever is done to choose a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from coppice.ids import SequenceId
from coppice.messages.step import SamplingParams, SequenceStart, StepPlan, StepResult, TokenLogprobs
from coppice_worker.model.decoder import outputs
from coppice_worker.model.decoder.logits import token_logprobs
from coppice_worker.model.executor import TorchExecutor
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.oracle import model_of
from tests.fakes.worker.worker_plans import compute, h, handles, lease, ready_core, settings, u32

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = {1: list(range(7, 18)), 2: [3, 250, 3, 9, 14, 60], 3: [1, 2]}
PLAIN = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("logprobs"))


class Served:
    def __init__(self, checkpoint: Path, wanted: dict[int, SamplingParams]) -> None:
        self.core = ready_core(settings(num_blocks=32))
        self.executor = TorchExecutor(checkpoint, num_blocks=32, block_size=4)
        self.results: list[StepResult] = []
        self.tokens = {number: list(PROMPTS[number]) for number in wanted}
        self._wanted = wanted

    def start(self, number: int, computed: int = 0) -> SequenceStart:
        owned = handles(*[h(8 * number + block) for block in range(6)])
        tokens, sampling = u32(*PROMPTS[number]), self._wanted[number]
        return SequenceStart(SequenceId(number), lease(number), tokens, computed, b"", b"", owned, sampling)

    def plan(self, **fields: object) -> StepResult:
        result = compute(self.core, self.executor, StepPlan(len(self.results) + 1, **fields))  # type: ignore[arg-type]
        self.results.append(result)
        ids = np.frombuffer(result.sampled_ids, "<u4").tolist()
        for step in np.frombuffer(result.sampled_tokens, "<u4").reshape(-1, max(1, len(ids))).tolist():
            for number, token in zip(ids, step, strict=True):
                self.tokens[number].append(token)
        return result

    def found(self, number: int) -> list[TokenLogprobs]:
        return [found for result in self.results for found in result.logprobs if found.sequence_id == number]


def oracle(checkpoint: Path, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab] log-probabilities of what follows each token."""
    model = model_of(checkpoint)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens]), use_cache=False).logits[0].float(), dim=-1)


def assert_true(checkpoint: Path, tokens: list[int], found: TokenLogprobs) -> None:
    expected = oracle(checkpoint, tokens)
    chosen = np.frombuffer(found.chosen, "<f4")
    top = np.frombuffer(found.top, "<f4").reshape(len(chosen), found.num_top)
    top_ids = np.frombuffer(found.top_ids, "<u4").reshape(len(chosen), found.num_top)
    for index, logprob in enumerate(chosen):
        position = found.first_position + index
        row = expected[position - 1]
        assert abs(float(row[tokens[position]]) - logprob) < 1e-4
        best = row.topk(found.num_top)
        np.testing.assert_allclose(top[index], best.values.numpy(), atol=1e-4)
        np.testing.assert_allclose(row[top_ids[index].astype(np.int64)].numpy(), best.values.numpy(), atol=1e-4)


def places(found: list[TokenLogprobs]) -> list[tuple[int, int, int]]:
    return [(entry.first_position, len(entry.chosen) // 4, entry.num_top) for entry in found]


def test_sampled_tokens_of_those_who_want_it(checkpoint: Path) -> None:
    wanted = {
        1: SamplingParams(temperature=1.5, seed=5, num_logprobs=3, presence_penalty=2.0, logit_bias=u32(9) + b"\0\0 A"),
        2: PLAIN,
        3: SamplingParams(temperature=0.0, num_logprobs=0),
    }
    served = Served(checkpoint, wanted)
    attach = tuple(served.start(number) for number in wanted)
    served.plan(attach=attach, rows=u32(3, 2, 1), row_tokens=u32(2, 6, 11))
    served.plan(repeat_rows=True)
    served.plan(repeat_rows=True, num_decode_steps=4)
    served.plan(rows=u32(2), row_tokens=u32(1))
    assert places(served.found(1)) == [(11, 1, 3), (12, 1, 3), (13, 4, 3)]
    assert places(served.found(3)) == [(2, 1, 0), (3, 1, 0), (4, 4, 0)]
    assert served.found(2) == []
    assert 9 in served.tokens[1][11:], "the bias has its way, and the log-probabilities do not show it"
    for number in (1, 3):
        for found in served.found(number):
            assert_true(checkpoint, served.tokens[number], found)


@pytest.mark.parametrize("chunks", [(11,), (4, 7), (1, 2, 8), (10, 1)])
@pytest.mark.parametrize("slice_tokens", [1, 3, 1000])
def test_prompts_however_they_are_cut(
    checkpoint: Path, chunks: tuple[int, ...], slice_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "_PROMPT_LOGITS_MAX", 320 * slice_tokens)
    wanted = {
        1: SamplingParams(temperature=0.0, num_logprobs=2, num_prompt_logprobs=2),
        2: SamplingParams(temperature=0.0, num_prompt_logprobs=0),
    }
    served = Served(checkpoint, wanted)
    start = 0
    for index, chunk in enumerate(chunks):
        rows, row_tokens = (u32(1, 2), u32(chunk, 6)) if index == 0 else (u32(1), u32(chunk))
        attach = (served.start(1), served.start(2)) if index == 0 else ()
        served.plan(attach=attach, rows=rows, row_tokens=row_tokens)
        start += chunk
    served.plan(rows=u32(1, 2), row_tokens=u32(1, 1), num_decode_steps=2)
    ends = np.cumsum(chunks).tolist()
    expected = [
        (start + 1, min(end, 10) - start, 2)
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
        if min(end, 10) > start
    ]
    assert places(served.found(1)) == [*expected, (11, 1, 2), (12, 2, 2)]
    assert places(served.found(2)) == [(1, 5, 0)]
    for number in wanted:
        for found in served.found(number):
            assert_true(checkpoint, served.tokens[number], found)


def test_only_the_prompt_is_reported_after_a_preemption(checkpoint: Path) -> None:
    """Of 11 known tokens the first 8 are the prompt; what was generated was reported when it was."""
    served = Served(checkpoint, {1: SamplingParams(temperature=0.0, num_logprobs=1, num_prompt_logprobs=1)})
    resumed = replace(served.start(1), num_prompt_tokens=8)
    served.plan(attach=(resumed,), rows=u32(1), row_tokens=u32(11))
    assert places(served.found(1)) == [(1, 7, 1), (11, 1, 1)]


def test_more_than_the_vocabulary_has(checkpoint: Path) -> None:
    found = token_logprobs(torch.zeros(2, 5), torch.tensor([1, 4]), 20)
    assert found.top_ids.shape == (2, 5)


def test_ranks_count_the_tokens_that_are_at_least_as_likely() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    found = token_logprobs(logits, torch.tensor([2, 1]), 1, ranks=True)
    assert found.ranks is not None
    assert found.ranks.tolist() == [3, 4]  # of those that are alike all count
    assert token_logprobs(logits, torch.tensor([0, 1]), 1).ranks is None
